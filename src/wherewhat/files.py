"""Atomic files and locks: a file or folder appears complete or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from wherewhat.errors import StoreError

if TYPE_CHECKING:
    from filelock import BaseFileLock


_PREFIX = ".tmp-"


def explain(error: OSError) -> str:
    """The reason of an operating system error in a few words, without the path."""
    return error.strerror or str(error) or type(error).__name__


def fsync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut; does nothing where folders cannot be opened."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems have no such operation; their renames are still atomic.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _temporary_name(path: Path) -> Path:
    # The final name is not repeated here: it may already be as long as the file system allows.
    return path.with_name(f"{_PREFIX}{secrets.token_hex(8)}")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a new binary file that takes the name `path` when the block ends without an error."""
    temporary = _temporary_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {explain(error)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Makes a folder to fill that takes the name `path` when the block ends without an error.

    The files inside must be flushed by whoever writes them, which `atomic_file` does.
    """
    temporary = _temporary_name(path)
    try:
        temporary.mkdir()
        yield temporary
        fsync_folder(temporary)
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {explain(error)}") from error
    finally:
        # After the rename there is nothing under the temporary name, and nothing is removed.
        shutil.rmtree(temporary, ignore_errors=True)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, decided by one look, since other processes may make and remove it."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return False
        mode = 0  # a link to nowhere
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
    return True


def make_folder(path: Path) -> list[Path]:
    """Makes `path` and its missing parents.

    Returns:
        The folders that this call made, innermost first, so that a failure later can take them back.
    """
    made: list[Path] = []
    try:
        missing = list(takewhile(lambda folder: not folder.is_dir(), [path, *path.parents]))
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
                made.insert(0, folder)
            if not is_folder(folder):
                # Another process took it away again just now; whoever shares the place tries once more.
                raise FileNotFoundError(errno.ENOENT, f"{folder} has disappeared")
    except (OSError, ValueError) as error:
        remove_empty(made)
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise StoreError(f"cannot make the folder {path}: {reason}") from error
    return made


def remove_empty(folders: list[Path]) -> None:
    """Removes those of `folders`, innermost first, that are empty; leaves the others alone."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove(path: Path) -> None:
    """Removes a file, a link or a whole folder, whichever is there; nothing there is fine."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {explain(error)}") from error


def remove_temporaries(folder: Path) -> None:
    """Removes what processes that died have left in `folder`. Only safe while nobody else writes there."""
    try:
        leftovers = [entry for entry in folder.iterdir() if entry.name.startswith(_PREFIX)]
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {explain(error)}") from error
    for entry in leftovers:
        remove(entry)


def is_temporary(path: Path) -> bool:
    """Whether `path` has a name that only an unfinished write can have."""
    return path.name.startswith(_PREFIX)


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
    lock: BaseFileLock,
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


def _acquire(lock: BaseFileLock, path: Path, *, seconds: float, made: list[Path]) -> None:
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
