"""Files of this package: written atomically, locked, hashed and checksummed; canonical JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from wherewhat.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from filelock import BaseFileLock

MOST_BYTES = 1 << 30
"""Largest size of a file of a run directory that is read at once."""

_PREFIX = ".tmp-"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_ATTEMPTS = 100
_PAUSE = 0.01


class ForeignFileError(OSError):
    """A file of a run directory that this package did not write: a pipe, a device, or far too large."""


ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ForeignFileError)
"""Errors of a file of a run directory that is missing, or that something else replaces: it is written again."""


def explain(error: OSError | ValueError) -> str:
    """Return the reason why the system, or Python, refuses a path in a few words, without the path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def atomic_file(path: Path, *, through: Path | None = None) -> Iterator[BinaryIO]:
    """Open a new binary file that is renamed to `path` when the context ends without an error.

    Until then it is in the folder `through`, on the same file system; by default in that of `path`.
    """
    with _renamed(path, through) as temporary, temporary.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes, *, through: Path | None = None) -> None:
    """Write `data` to `path` atomically, through a file in another folder if one is given."""
    with atomic_file(path, through=through) as file:
        file.write(data)


def write_parts(path: Path, parts: Iterable[Any]) -> dict[str, JSON]:
    """Write bytes and arrays to `path` atomically, one after another, and return the file's fingerprint.

    It is computed at the same time, from memory; see :func:`fingerprints`.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        with atomic_file(path) as file:
            hashed: list[Future[None]] = []
            for part in parts:
                hashed.append(pool.submit(digest.update, part))
                file.write(part)
                if len(hashed) > 2:  # parts may be made while they are written: few of them are in memory
                    hashed.pop(0).result()
        for update in hashed:
            update.result()
    return {"sha256": digest.hexdigest()}


def link_file(source: Path, path: Path) -> None:
    """Give a file that is never changed a second name, atomically; copy it where the file system has no hard links."""
    with _renamed(path) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a folder that is renamed to `path` when the context ends without an error.

    Files inside must be flushed to disk when they are written, as `atomic_file` does.
    """
    with _renamed(path) as temporary:
        temporary.mkdir()
        yield temporary
        _fsync_folder(temporary)


@contextmanager
def _renamed(path: Path, through: Path | None = None) -> Iterator[Path]:
    """Give a temporary name, under which a file or folder is made and then renamed to `path`."""
    if not path.name:
        raise StoreError(f"cannot write a file to {str(path)!r}: give it a name")
    # Without the final name, which may already be as long as the file system allows.
    temporary = (through or path.parent) / f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        yield temporary
        temporary.replace(path)
        _fsync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {explain(error)}") from error
    finally:
        # After the rename there is nothing under the temporary name, and nothing is removed.
        shutil.rmtree(temporary, ignore_errors=True)  # ignores a file as well
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable across power failures; do nothing where folders cannot be opened."""
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


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, by a single system call, since other processes may create and remove it."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return False
        mode = 0  # a link to nowhere
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
    return True


def kind_of_file(path: Path) -> str | None:
    """Return what `path` is in words if it exists and is not a regular file, such as ``a folder``; else None."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return _KINDS.get(stat.S_IFMT(mode), None if stat.S_ISREG(mode) else "no regular file")


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raise ForeignFileError for pipes, devices and loops of links."""
    kind = kind_of_file(path)
    if kind is not None and kind != _KINDS[stat.S_IFDIR]:
        raise ForeignFileError(errno.EINVAL, f"it is {kind}, not a file")
    try:
        return path.open("rb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignFileError(errno.EINVAL, explain(error)) from None
        raise


def read_regular(path: Path) -> bytes:
    """Return the content of a file of a run directory; raise ForeignFileError if it is no file, or too large."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ForeignFileError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes")
        return file.read()


def check_written(file: BufferedReader) -> None:
    """Raise ForeignFileError for gigabytes of which hardly any take space, which it would take hours to read."""
    status = os.fstat(file.fileno())
    taken = 512 * getattr(status, "st_blocks", status.st_size)
    if status.st_size > MOST_BYTES and taken < status.st_size // 64:
        raise ForeignFileError(errno.EFBIG, f"almost all of its {status.st_size:,} bytes were never written")


def make_folder(path: Path) -> list[Path]:
    """Create `path` and its missing parents.

    Returns:
        The folders that this call created, innermost first, so that they can be removed after a later failure.
    """
    folders: list[Path] = []
    try:
        missing = list(takewhile(lambda folder: not folder.is_dir(), [path, *path.parents]))
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
                folders.insert(0, folder)
            if not is_folder(folder):
                # Another process has removed it in the meantime; callers that share the folder try again.
                raise FileNotFoundError(errno.ENOENT, f"{folder} has disappeared")
    except (OSError, ValueError) as error:
        _remove_empty(folders)
        raise StoreError(f"cannot make the folder {path}: {explain(error)}") from error
    return folders


def check_writable(path: Path) -> None:
    """Check, without writing, that the folder `path` can be made or written."""
    existing = nearest_folder(path)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StoreError(f"cannot write to {existing}: permission denied; choose another folder")


def nearest_folder(path: Path) -> Path:
    """Return `path` if it is a folder, else the first of its parents that exists."""
    for folder in (path, *path.parents):
        try:
            if is_folder(folder):
                return folder
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot make the folder {path}: {explain(error)}") from error
    return Path()


def _remove_empty(folders: list[Path]) -> None:
    """Remove those of `folders`, innermost first, that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {explain(error)}") from error


def remove_temporaries(folder: Path, *, older_than: float | None = None) -> None:
    """Remove unfinished writes of terminated processes from `folder`, or only those `older_than` that many seconds.

    Without an age, no other process may write there.
    """
    try:
        paths = filter(is_temporary, folder.iterdir())
        leftovers = [path for path in paths if older_than is None or time.time() - path.lstat().st_mtime > older_than]
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {explain(error)}") from error
    for entry in leftovers:
        remove(entry)


def is_temporary(path: Path) -> bool:
    """Return whether `path` has a name that only unfinished writes have."""
    return path.name.startswith(_PREFIX)


@contextmanager
def hold(path: Path, *, timeout: float | None, on_wait: Callable[[str], None] | None) -> Iterator[None]:
    """Hold the lock file `path`; the operating system releases it when the process ends.

    The folder of the lock file is created if necessary, and removed again if it is empty in the end.

    Args:
        path: The lock file.
        timeout: Seconds to wait while another process holds it; None for no limit.
        on_wait: Called once with one line before waiting.
    """
    from filelock import FileLock

    lock = FileLock(path, thread_local=False)
    folders: list[Path] = []
    try:
        _wait_for(lock, path, timeout, on_wait, folders)
        try:
            yield
        finally:
            lock.release()
    finally:
        _remove_empty(folders)


def _wait_for(
    lock: BaseFileLock, path: Path, timeout: float | None, on_wait: Callable[[str], None] | None, folders: list[Path]
) -> None:
    from filelock import Timeout

    try:
        try:
            _acquire(lock, path, seconds=0, folders=folders)
        except Timeout:
            if timeout == 0:
                raise
            if on_wait is not None:
                on_wait(f"another process works in {path.parent}: waiting for it")
            _acquire(lock, path, seconds=-1 if timeout is None else timeout, folders=folders)
    except Timeout:
        line = f"another process still works in {path.parent} after {timeout or 0:g} s: wait for it"
        raise StoreError(line) from None
    except (OSError, NotImplementedError) as error:
        reason = explain(error) if isinstance(error, OSError) else "its file system has no locks"
        raise StoreError(f"cannot lock {path.parent}: {reason}") from error


def _acquire(lock: BaseFileLock, path: Path, *, seconds: float, folders: list[Path]) -> None:
    # Another process may remove its empty folders, with the lock file, between any two steps here; a lock on a file
    # without a name would protect nothing.
    for attempt in range(_ATTEMPTS):
        try:
            folders.extend(make_folder(path.parent))
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


JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""A value that JSON can store."""

HASH_DIGITS = 12
"""Digits of a hash in a folder name."""

MOST_DEPTH = 64
"""Deepest nesting of lists and tables in a file of settings."""

_LONGEST_SLUG = 48
_CHECKSUM = "checksum"
# Smaller files are hashed every time, which takes less than 0.1 s.
_CACHED_FROM_BYTES = 1 << 24
# A file that changed so many nanoseconds before it is hashed may change again without a new time of change.
_SETTLED = 10 * 10**9


def plain_json(value: JSON, *, at: str = "config") -> JSON:
    """Copy `value` into plain dicts and lists, and check that JSON can store it without loss.

    Args:
        value: Anything made of mappings with string keys, sequences, strings, numbers, booleans and None.
        at: Name of the value in errors, extended by the path to the invalid entry.

    Returns:
        The same value made of `dict`, `list` and scalars only.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{at} is {value!r}: give a finite number, or null for none")
        return value
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError(f"{at} is {value!r}: it holds a lone surrogate, give valid Unicode text")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{at} has the key {key!r} of type {type(key).__name__}: use string keys")
            plain_json(key, at=f"a key of {at}")
        return {key: plain_json(entry, at=f"{at}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry, at=f"{at}[{i}]") for i, entry in enumerate(value)]
    raise ConfigError(f"{at} has type {type(value).__name__}: use strings, numbers, booleans, lists or tables")


def canonical_json(value: JSON) -> str:
    """Return the form of `value` that is hashed: sorted keys, no spaces, floats by `repr`, no NaN."""
    return json.dumps(plain_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def readable_json(value: JSON) -> bytes:
    """Return `value` as indented UTF-8 JSON with sorted keys and a final newline."""
    text = json.dumps(plain_json(value), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def check_depth(value: Any) -> None:
    """Raise RecursionError for lists and tables that are nested more than :data:`MOST_DEPTH` deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        # Aliases of YAML are one object in several places, which is followed once.
        level = list({id(inner): inner for outer in level for inner in nested(outer)}.values())
        if not level:
            return
    raise RecursionError


def nested(value: Any) -> Any:
    """Return the values inside a list or table; none of other values."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def parse_object(data: bytes) -> dict[str, JSON] | None:
    """Return the JSON object in some bytes; None if they hold anything else (damaged, a list, deeply nested)."""
    try:
        value = json.loads(data.decode())
        check_depth(value)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, JSON]", value) if isinstance(value, dict) else None


def read_object(path: Path) -> dict[str, JSON] | None:
    """Return the JSON object in a file; None when the file is missing or holds anything else."""
    try:
        return parse_object(read_regular(path))
    except ABSENT:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error


def config_hash(config: Mapping[str, JSON]) -> str:
    """Return the SHA-256 of a configuration's canonical JSON, 64 hexadecimal digits."""
    return text_sha256(canonical_json(config))


def text_sha256(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes, without normalisation."""
    return hashlib.sha256(text.encode()).hexdigest()


def ascii_json_sha256(value: Any) -> str:
    """Return the SHA-256 of a value's JSON with characters beyond ASCII escaped, as stored for models."""
    return text_sha256(json.dumps(value, sort_keys=True, separators=(",", ":")))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file of a run directory."""
    try:
        with open_regular(path) as file:
            check_written(file)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error


def model_file_sha256(path: Path, *, cache: Path | None = None) -> str:
    """Return the SHA-256 of a file of a model.

    Digests of files above 16 MiB are stored in the folder `cache` by path, inode, size and the times at which content
    and inode last changed, which no program can set back; without such a folder, the file is always read.
    """
    # The hub cache stores large files under their own SHA-256.
    name = path.resolve().name if path.is_symlink() else ""
    if re.fullmatch("[0-9a-f]{64}", name):
        return name
    stat = path.stat()
    changed = max(stat.st_mtime_ns, stat.st_ctime_ns)
    if cache is None or stat.st_size < _CACHED_FROM_BYTES or not 0 < changed < time.time_ns() - _SETTLED:
        return _digest(path)
    names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    state = {"path": str(path.resolve()), **{name: getattr(stat, name) for name in names}}
    entry = cache / f"{ascii_json_sha256(state)}.sha256"
    with suppress(OSError):
        known = entry.read_text().strip()
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    digest = _digest(path)
    with suppress(OSError):  # a cache that cannot be written only costs time
        cache.mkdir(parents=True, exist_ok=True)
        entry.write_text(digest)
    return digest


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def slug(name: str, *, fallback: str) -> str:
    """Return the readable part of a file name: ASCII letters, digits, `.`, `_` and `-`, at most 48 characters.

    It never starts with a dot and contains no separator, so it cannot leave its folder. Different names may have the
    same slug; append a hash to distinguish them.
    """
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_name)
    safe = re.sub(r"\.{2,}", ".", safe).strip("-.")[:_LONGEST_SLUG].rstrip("-.")
    return safe or fallback


def part_folder_name(key: str) -> str:
    """Return the folder name of a part: the slug of its key, and a hash that distinguishes all keys."""
    try:
        digest = text_sha256(key)
    except UnicodeEncodeError as error:
        raise StoreError(f"the part name {key!r} is not valid Unicode: rename the document") from error
    return f"{slug(key, fallback='part')}-{digest[:HASH_DIGITS]}"


def run_folder_name(name: str, config_hash: str) -> str:
    """Return the folder name of a run: its slug and the first 12 digits of the configuration's hash."""
    return f"{slug(name, fallback='run')}-{config_hash[:HASH_DIGITS]}"


def write_sealed(path: Path, content: Mapping[str, JSON]) -> None:
    """Write `content` atomically with an added `checksum`: the SHA-256 of its canonical JSON."""
    write_file(path, readable_json({**content, _CHECKSUM: text_sha256(canonical_json(content))}))


def read_sealed(path: Path) -> dict[str, JSON] | None:
    """Return the content that `write_sealed` wrote; None if the file is missing, truncated or altered."""
    content = read_object(path)
    if content is None:
        return None
    checksum = content.pop(_CHECKSUM, None)
    try:
        intact = checksum == text_sha256(canonical_json(content))
    except ConfigError:  # an altered byte can make a number infinite or a string invalid
        return None
    return content if intact else None


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, JSON]:
    """Return the SHA-256 of each of the files `names` in `folder`, to be stored in a sealed file."""
    return {name: {"sha256": file_sha256(folder / name)} for name in names}


def first_damaged(folder: Path, expected: JSON) -> str | None:
    """Return the name of the first file in `folder` whose SHA-256 is not the expected one; None if there is none."""
    if not isinstance(expected, Mapping) or not expected:
        return "the list of files"
    for name, fingerprint in expected.items():
        try:
            if fingerprints(folder, [name])[name] != fingerprint:
                return name
        except StoreError as error:
            if isinstance(error.__cause__, ABSENT):
                return name
            raise
    return None
