"""Work that measures nothing, in a module that imports next to nothing: worker processes start in no time."""

from __future__ import annotations

import os
import signal

from wherewhat.errors import StoreError


def always_dies(task):
    os.kill(os.getpid(), signal.SIGKILL)


def full(task):
    raise StoreError("cannot write: No space left on device")
