"""Files and folders that appear whole or not at all.

Everything is first written under a temporary name in the same folder, flushed to the disk, and only then
renamed. A process that dies in between leaves a temporary name, never half a file under the final one.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from wherewhat.errors import StoreError

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
    """Opens a new binary file that takes the name `path` when the block ends without an error.

    Raises:
        StoreError: The file cannot be written; `path` is then as it was and no temporary file remains.
    """
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
    """Writes `data` to `path` atomically.

    Raises:
        StoreError: The file cannot be written; `path` is then as it was and no temporary file remains.
    """
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Makes a folder to fill that takes the name `path` when the block ends without an error.

    The files inside must be flushed by whoever writes them, which `atomic_file` does.

    Raises:
        StoreError: The folder cannot be written or `path` exists; no temporary folder remains.
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
    """Whether `path` is a folder, decided by one look, since other processes may make and remove it.

    Raises:
        NotADirectoryError: Something else is in its place.
    """
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

    Raises:
        StoreError: A folder cannot be made, or a file is in the way.
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
    """Removes a file, a link or a whole folder, whichever is there; nothing there is fine.

    Raises:
        StoreError: It cannot be removed.
    """
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
