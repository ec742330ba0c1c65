"""One process at a time in a run directory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wherewhat.errors import StoreError
from wherewhat.store.atomic import explain, make_folder, remove_empty

if TYPE_CHECKING:
    from filelock import BaseFileLock

_ATTEMPTS = 100
_PAUSE = 0.01


@contextmanager
def hold(path: Path, *, timeout: float | None, on_wait: Callable[[str], None] | None) -> Iterator[None]:
    """Holds the lock file `path`; the system frees it when the process dies.

    The folder of the lock file is made if need be; what is empty of it in the end is taken away again.

    Args:
        path: The lock file.
        timeout: Seconds to wait while another process holds it; None waits as long as it takes.
        on_wait: Called once with one line before waiting.

    Raises:
        StoreError: The time is up, or the file cannot be made or locked.
    """
    from filelock import FileLock

    lock = FileLock(path, thread_local=False)
    made: list[Path] = []
    try:
        _wait_for(lock, path, timeout=timeout, on_wait=on_wait, made=made)
        try:
            yield
        finally:
            lock.release()
    finally:
        remove_empty(made)


def _wait_for(
    lock: "BaseFileLock",
    path: Path,
    *,
    timeout: float | None,
    on_wait: Callable[[str], None] | None,
    made: list[Path],
) -> None:
    from filelock import Timeout

    try:
        try:
            _acquire(lock, path, seconds=0, made=made)
        except Timeout:
            if timeout == 0:
                raise
            if on_wait is not None:
                on_wait(f"another process works in {path.parent}: waiting for it")
            _acquire(lock, path, seconds=-1 if timeout is None else timeout, made=made)
    except Timeout:
        line = f"another process still works in {path.parent} after {timeout or 0:g} s: wait for it"
        raise StoreError(line) from None
    except (OSError, NotImplementedError) as error:
        reason = explain(error) if isinstance(error, OSError) else "its file system has no locks"
        raise StoreError(f"cannot lock {path.parent}: {reason}") from error


def _acquire(lock: "BaseFileLock", path: Path, *, seconds: float, made: list[Path]) -> None:
    # Another process may take its empty folders away between any two steps here, and the lock file with them;
    # a lock on a file that has no name any more would guard nothing.
    for attempt in range(_ATTEMPTS):
        try:
            made.extend(make_folder(path.parent))
            lock.acquire(timeout=seconds)
        except (StoreError, FileNotFoundError) as error:
            vanished = isinstance(error.__cause__ or error, FileNotFoundError)
            if not vanished or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE)
        else:
            if path.exists():
                return
            lock.release()
    raise FileNotFoundError(f"{path} disappears again and again")
