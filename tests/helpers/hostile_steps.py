"""Steps of loading that misbehave, by name for another process."""

from __future__ import annotations

import errno
import os
import sys
import time

from wherewhat.errors import CaptureError


def answer(number: int, here: int = -1) -> dict[str, int | bool]:
    """Return a number, and whether this is another process than `here`."""
    return {"number": number, "other process": os.getpid() != here}


def print_lines() -> str:
    sys.stdout.write("a line\n")
    sys.stderr.write("another\n")
    os.write(1, b"{}\n")
    return "done"


def abort() -> None:
    os.abort()


def stop_quietly() -> None:
    os._exit(3)


def allocate() -> None:
    raise MemoryError


def refuse() -> None:
    raise CaptureError("refused with a line of its own")


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def wait_for_ever() -> None:
    time.sleep(3600)
