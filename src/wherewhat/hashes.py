"""Canonical JSON, SHA-256 hashes, names derived from them, and checksummed JSON files."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, cast

from wherewhat.boundary import check_depth
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import ABSENT, check_written, explain, open_regular, read_regular, write_file

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
"""A value that JSON can store."""

HASH_DIGITS = 12
"""Digits of a hash in a folder name."""

_LONGEST_SLUG = 48
_CHECKSUM = "checksum"
# Smaller files are hashed every time (0.1 s per 100 MB), so that no outdated entry of the cache can be used.
_CACHED_FROM_BYTES = 1 << 30


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
    """Return the form of `value` that is hashed: sorted keys, no spaces, floats by `repr`, no NaN."""
    return json.dumps(plain_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def readable_json(value: JSON) -> bytes:
    """Return `value` as indented UTF-8 JSON with sorted keys and a final newline."""
    text = json.dumps(plain_json(value), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


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

    Digests of files above 1 GiB are stored in the folder `cache` by path, size and modification time; without one, the
    file is always read.
    """
    # The hub cache stores large files under their own SHA-256.
    name = path.resolve().name if path.is_symlink() else ""
    if re.fullmatch("[0-9a-f]{64}", name):
        return name
    stat = path.stat()
    if cache is None or stat.st_size < _CACHED_FROM_BYTES:
        return _digest(path)
    state = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    entry = cache / f"{ascii_json_sha256(state)}.sha256"
    with suppress(OSError):
        known = entry.read_text().strip()
        if len(known) == 64:
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
