"""Checks of paths and files that users name, before any library opens them: kind of file, size, and nesting of JSON."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError, WherewhatError, one_line, printable
from wherewhat.files import explain

MOST_CONFIG_BYTES = 16 << 20
"""Largest size of a file of settings."""

MOST_DEPTH = 64
"""Deepest nesting of lists and tables in a file of settings."""

_LONGEST_SHOWN = 120
# Paths of open streams, such as those that a shell makes for <(command): their writer has been started.
_STREAMS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def shown(value: str | os.PathLike[str]) -> str:
    """Return a path or name in quotes for a message: printable, and cut in the middle if it is long."""
    text = os.fspath(value)
    if len(text) > _LONGEST_SHOWN:
        text = f"{text[: _LONGEST_SHOWN // 2]}…{text[-_LONGEST_SHOWN // 2 :]}"
    return f"'{printable(text)}'"


def user_path(given: str | os.PathLike[str], *, name: str, error: type[WherewhatError] = ConfigError) -> Path:
    """Return a path that a user named, with ``~`` replaced, that the operating system accepts; it need not exist.

    Args:
        given: The path.
        name: What it is, for messages, such as ``--out`` or ``the model``.
        error: Class of the error.
    """
    text = os.fspath(given)
    where = f"{name} {shown(text)}"
    if not text.strip():
        raise error(f"{name} is empty: give a path")
    if "\0" in text:
        raise error(f"{where} contains a NUL character, which no path can: check it")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise error(f"{where} begins with the home folder of an unknown user: write the whole path") from None
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError) as reason:  # a name that is too long, a loop of links, a folder that may not be read
        raise error(f"{where} cannot be opened: {_reason(reason)}") from None
    if stat.S_ISDIR(status.st_mode) and not os.access(path, os.R_OK | os.X_OK):
        raise error(f"{where} cannot be opened: Permission denied")
    return path


def check_file(path: Path, *, name: str, most: int, error: type[WherewhatError] = ConfigError) -> int:
    """Return the size of a regular file; refuse folders, pipes and devices, which may never end, and large files.

    Args:
        path: The file.
        name: What it is, for messages, with its path.
        most: Largest size in bytes.
        error: Class of the error.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as reason:
        raise error(f"{name} cannot be read: {_reason(reason)}") from None
    kind = next((word for test, word in _KINDS if test(status.st_mode)), None)
    if kind is not None and not (stat.S_ISFIFO(status.st_mode) and str(path).startswith(_STREAMS)):
        raise error(f"{name} cannot be read: it is {kind}; give a file")
    if status.st_size > most:
        raise error(
            f"{name} cannot be read: it has {size_in_words(status.st_size)}, at most {size_in_words(most)} work"
        )
    return status.st_size


def read_file(path: Path, *, name: str, most: int, error: type[WherewhatError] = ConfigError) -> bytes:
    """Return the bytes of a file that :func:`check_file` accepts."""
    check_file(path, name=name, most=most, error=error)
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as reason:
        raise error(f"{name} cannot be read: {_reason(reason)}") from None
    if len(data) > most:  # a stream, or a file that grows
        raise error(f"{name} cannot be read: it has more than {size_in_words(most)}")
    return data


def read_json(
    path: Path, *, name: str, most: int = MOST_CONFIG_BYTES, error: type[WherewhatError] = ConfigError
) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_file(path, name=name, most=most, error=error), name=name, error=error)


def parse_json(data: bytes, *, name: str, error: type[WherewhatError] = ConfigError) -> Any:
    """Return the value in some bytes of JSON, nested at most :data:`MOST_DEPTH` deep."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
        check_depth(value)
    except UnicodeDecodeError:
        raise error(f"{name} cannot be read: it is not UTF-8 text") from None
    except RecursionError:
        raise error(f"{name} cannot be read: lists and tables in it are nested more than {MOST_DEPTH} deep") from None
    except ValueError as reason:
        raise error(f"{name} is not valid JSON: {one_line(reason)}") from None
    return value


def check_depth(value: Any) -> None:
    """Raise RecursionError for lists and tables that are nested more than :data:`MOST_DEPTH` deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise RecursionError


def size_in_words(count: int) -> str:
    """Return a number of bytes with a unit, such as ``8.0 TiB``."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _reason(error: OSError | ValueError) -> str:
    return explain(error) if isinstance(error, OSError) else one_line(error)
