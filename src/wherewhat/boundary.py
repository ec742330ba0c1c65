"""Checks of paths, files and numbers that users give, before anything uses them: kind of file, size, nesting."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from wherewhat.errors import ConfigError, StoreError, WherewhatError, one_line, printable
from wherewhat.files import MOST_DEPTH, check_depth, check_writable, explain, kind_of_file, nearest_folder, nested

MOST_CONFIG_BYTES = 16 << 20
"""Largest size of a file of settings."""

MOST_VALUES = 1_000_000
"""Largest number of values in a file of settings, with every YAML alias replaced by its values."""

MOST_TOKENS = 1 << 24
"""Largest number of tokens of a text, and largest distance in one; above the length of every known model."""

MOST_DOCUMENTS = 100_000
"""Largest number of documents, items or prompts."""

MOST_REPEATS = 10_000
"""Largest number of repetitions, sizes or parts that an option may ask for."""

LONGEST_NAME = 255
"""Largest number of bytes of the name of a file."""

MOST_LAYERS = 1000
"""Largest number of layers of a model; the deepest published ones have about 200."""

_LONGEST_SHOWN = 120
# Paths of open streams, such as those that a shell makes for <(command): their writer has been started.
_STREAMS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_OUTPUT_STREAMS = (*_STREAMS, "/dev/stdout", "/dev/stderr")


def shown(value: str | os.PathLike[str]) -> str:
    """Return a path or name in quotes for a message: printable, and cut in the middle if it is long."""
    text = os.fspath(value)
    if len(text) > _LONGEST_SHOWN:
        text = f"{text[: _LONGEST_SHOWN // 2]}…{text[-_LONGEST_SHOWN // 2 :]}"
    return f"'{printable(text)}'"


def user_path(path_like: str | os.PathLike[str], *, name: str, error: type[WherewhatError] = ConfigError) -> Path:
    """Return a path that a user named, with ``~`` replaced, that the operating system accepts; it need not exist.

    ``name`` says what it is in messages, such as ``--out`` or ``the model``.
    """
    text = os.fspath(path_like)
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
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):  # inside a folder that does not exist
            raise error(f"{where} cannot be opened: {os.strerror(errno.ENAMETOOLONG)}") from None
        return path
    except (OSError, ValueError) as reason:  # a name that is too long, a loop of links, a folder that may not be read
        raise error(f"{where} cannot be opened: {explain(reason)}") from None
    if stat.S_ISDIR(status.st_mode) and not os.access(path, os.R_OK | os.X_OK):
        raise error(f"{where} cannot be opened: Permission denied")
    return path


def output_file(file: str | os.PathLike[str], *, name: str) -> Path:
    """Return the path of a file to write, after checks that it can be: no other kind of file, in a writable folder."""
    path = user_path(file, name=name, error=StoreError)
    kind = kind_of_file(path)
    if kind is None and str(path).startswith(_OUTPUT_STREAMS):
        kind = "a stream"  # the file would be renamed to the name of the stream
    if kind is not None:
        raise StoreError(f"{name} {shown(path)} is {kind}: give the name of a file")
    output_folder(path.parent, name=f"the folder of {name}")
    return path


def output_folder(folder: str | os.PathLike[str], *, name: str, writable: bool = True) -> Path:
    """Return the path of a folder to write to, after checks that it is one or can be made.

    It need not be ``writable`` where finished runs can be read from it.
    """
    path = user_path(folder, name=name, error=StoreError)
    try:
        if writable:
            check_writable(path)
        else:
            nearest_folder(path)
    except StoreError as reason:
        raise StoreError(f"{name} {shown(path)} cannot be written: {reason}") from None
    return path


def check_file(path: Path, *, name: str, most: int, error: type[WherewhatError] = ConfigError) -> None:
    """Refuse folders, and pipes and devices, which may never end, and files of more than ``most`` bytes."""
    try:
        status = path.stat()
    except (OSError, ValueError) as reason:
        raise error(f"{name} cannot be read: {explain(reason)}") from None
    kind = kind_of_file(path)
    if kind is not None and not (stat.S_ISFIFO(status.st_mode) and str(path).startswith(_STREAMS)):
        raise error(f"{name} cannot be read: it is {kind}; give a file")
    if status.st_size > most:
        raise error(
            f"{name} cannot be read: it has {size_in_words(status.st_size)}, at most {size_in_words(most)} work"
        )


def read_file(path: Path, *, name: str, most: int, error: type[WherewhatError] = ConfigError) -> bytes:
    """Return the bytes of a file that :func:`check_file` accepts."""
    check_file(path, name=name, most=most, error=error)
    try:
        with path.open("rb") as file:
            return read_stream(file, name=name, most=most, error=error)
    except OSError as reason:
        raise error(f"{name} cannot be read: {explain(reason)}") from None


def read_user_file(
    file: str | os.PathLike[str],
    *,
    name: str,
    most: int = MOST_CONFIG_BYTES,
    error: type[WherewhatError] = ConfigError,
) -> bytes:
    """Return the bytes of a file that a user named; see :func:`user_path` and :func:`read_file`."""
    path = user_path(file, name=name, error=error)
    return read_file(path, name=f"{name} {shown(path)}", most=most, error=error)


def read_stream(stream: BinaryIO, *, name: str, most: int, error: type[WherewhatError] = ConfigError) -> bytes:
    """Return all bytes of a stream; the size of a pipe is unknown, so the limit is checked while reading."""
    chunks, total = [], 0
    while chunk := stream.read(1 << 20):
        total += len(chunk)
        if total > most:
            raise error(f"{name} cannot be read: it has more than {size_in_words(most)}")
        chunks.append(chunk)
    return b"".join(chunks)


def read_json(
    path: Path, *, name: str, most: int = MOST_CONFIG_BYTES, error: type[WherewhatError] = ConfigError
) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_file(path, name=name, most=most, error=error), name=name, error=error)


def parse_json(data: bytes, *, name: str, error: type[WherewhatError] = ConfigError) -> Any:
    """Return the value in some bytes of JSON, nested at most :data:`MOST_DEPTH` deep."""
    return parse_settings(data, json.loads, check_depth, name=name, kind="JSON", error=error)


def parse_settings(
    data: bytes,
    parse: Callable[[str], Any],
    check: Callable[[Any], None],
    *,
    name: str,
    kind: str,
    error: type[WherewhatError] = ConfigError,
) -> Any:
    """Return the value in the UTF-8 text of a file of settings.

    ``parse`` returns the value and ``check`` checks it; both raise ValueError, or RecursionError for deep nesting.
    ``name`` and ``kind`` are the file and its format in messages.
    """
    try:
        value = parse(data.decode("utf-8-sig"))
        check(value)
    except UnicodeDecodeError:
        raise error(f"{name} cannot be read: it is not UTF-8 text") from None
    except RecursionError:
        raise error(f"{name} cannot be read: lists and tables in it are nested more than {MOST_DEPTH} deep") from None
    except ValueError as reason:
        raise error(f"{name} is not valid {kind}: {one_line(reason)}") from None
    return value


def check_values(value: Any) -> None:
    """Raise RecursionError or ValueError for values of settings that are nested too deep, too many or too large."""
    check_depth(value)
    level, count = [value], 0
    while level:
        inside: list[Any] = []
        for outer in level:
            check_whole_number("a number", outer, error=ValueError)
            inside += nested(outer)
            if count + len(inside) > MOST_VALUES:
                raise ValueError(f"more than {MOST_VALUES:,} values")
        count += len(inside)
        level = inside


def check_whole_number(name: str, value: Any, *, error: type[Exception] = ConfigError) -> None:
    """Refuse a whole number that has more than 64 bits, or a sequence with one; other values pass."""
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            # Python refuses to write numbers of thousands of digits.
            text = str(number) if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"
            raise error(f"{name} is {text}: it must be from -2^63 to 2^63 - 1")


def check_at_most(most: int, **numbers: float | Sequence[float] | None) -> None:
    """Refuse numbers, or sequences with numbers, above ``most``: for them memory or time would not suffice."""
    for name, value in numbers.items():
        for number in value if isinstance(value, Sequence) else (value,):
            if number is not None and number > most:
                raise ConfigError(f"{name} is {number}: give at most {most:,}")


def check_distinct(name: str, entries: Sequence[object]) -> None:
    """Refuse an empty sequence, and one in which an entry occurs twice."""
    if not entries:
        raise ConfigError(f"{name} is empty: give at least one")
    seen: set[object] = set()
    for entry in entries:
        if entry in seen:
            raise ConfigError(f"{name} has {entry!r} twice: give each once")
        seen.add(entry)


def size_in_words(count: int) -> str:
    """Return a number of bytes with a unit, such as ``8.0 TiB``."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min((max(count, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{count} bytes" if power == 0 else f"{count / 1024**power:.1f} {units[power]}"


def size_in_bytes(text: str, *, name: str) -> int:
    """Return a size such as ``80GB`` or ``24 GiB`` as a number of bytes; ``name`` is the option it was given to."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMGTP])(i?))?[bB]?\s*", text)
    size = 0.0
    if match is not None and len(match[1]) <= 30:
        power = "kMGTP".find((match[2] or "").replace("K", "k")) + 1 if match[2] else 0
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not 1 <= size < 1 << 63:
        raise ConfigError(f"{name} is {shown(text)}: give a size such as 80GB or 24GiB")
    return int(size)
