"""Hashes that name things: configurations, files and texts.

A configuration is hashed through its canonical JSON, so that two processes that resolved the same options
in another order meet in the same run directory.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from wherewhat.errors import ConfigError, StoreError
from wherewhat.store.atomic import explain

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None

_CHUNK = 1 << 20


def plain_json(value: JSON, *, at: str = "config") -> JSON:
    """Copies `value` into plain dicts and lists and checks that JSON can carry it without loss.

    Args:
        value: Anything made of mappings with string keys, sequences, strings, numbers, booleans and None.
        at: What to call the value in an error, extended by the path to the offending entry.

    Returns:
        The same value made of `dict`, `list` and scalars only.

    Raises:
        ConfigError: A key is not a string, a number is not finite, a string is not valid Unicode, or a value
            has another type.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{at} is {value!r}: give a finite number, or null for none")
        return value
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
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
    """Writes `value` in the one form that is hashed: sorted keys, no spaces, floats by `repr`, no NaN."""
    return json.dumps(plain_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def readable_json(value: JSON) -> bytes:
    """Writes `value` for people: sorted keys, two spaces of indent, a final newline, UTF-8."""
    text = json.dumps(plain_json(value), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def parse_object(data: bytes) -> dict[str, JSON] | None:
    """Reads a JSON object from bytes; None when the bytes are anything else (truncated, damaged, a list)."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, JSON]", value) if isinstance(value, dict) else None


def config_hash(config: Mapping[str, JSON]) -> str:
    """The sha256 of a configuration's canonical JSON, as 64 hexadecimal digits."""
    return text_sha256(canonical_json(config))


def text_sha256(text: str) -> str:
    """The sha256 of a text's UTF-8 bytes, nothing normalised."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The sha256 of a file's content, read in pieces.

    Raises:
        StoreError: The file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error
    return digest.hexdigest()
