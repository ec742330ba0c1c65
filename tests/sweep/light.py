"""Work that measures nothing, in a module that imports next to nothing: worker processes start in no time."""

from __future__ import annotations

import os
import signal

from wherewhat.errors import StoreError


def always_dies(job):
    os.kill(os.getpid(), signal.SIGKILL)


def full(job):
    raise StoreError("cannot write: No space left on device")
