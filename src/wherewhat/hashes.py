"""Hashes of configurations, files, weights and texts, names derived from them, and checksummed JSON files."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import explain, write_file

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None

_CHUNK = 1 << 20


def plain_json(value: JSON, *, at: str = "config") -> JSON:
    """Copies `value` into plain dicts and lists and checks that JSON can carry it without loss.

    Args:
        value: Anything made of mappings with string keys, sequences, strings, numbers, booleans and None.
        at: What to call the value in an error, extended by the path to the offending entry.

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
    """The sha256 of a file's content, read in pieces."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error
    return digest.hexdigest()


# Below this size a file is hashed again every time (0.1 s per 100 MB), so that no stale memo can lie.
_MEMO_FROM_BYTES = 1 << 30


def sha256_text(text: str) -> str:
    """Hex digest of a string's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of a value's canonical JSON."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":")))


def sha256_file(path: Path, *, memo: Path | None = None) -> str:
    """Hex digest of a file's content.

    Args:
        path: The file.
        memo: Folder in which digests of files above 1 GiB are remembered by path, size and
            modification time; None to always read the file.
    """
    known = _blob_name(path)
    if known is not None:
        return known
    stat = path.stat()
    if memo is None or stat.st_size < _MEMO_FROM_BYTES:
        return _digest(path)
    state = {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    note = memo / f"{sha256_json(state)}.sha256"
    try:
        remembered = note.read_text().strip()
    except OSError:
        remembered = ""
    if len(remembered) == 64:
        return remembered
    digest = _digest(path)
    try:
        memo.mkdir(parents=True, exist_ok=True)
        note.write_text(digest)
    except OSError:
        # The memo only saves time: a read-only cache is no reason to fail.
        return digest
    return digest


def sha256_tokenizer(tokenizer: Any, prefix: tuple[int, ...]) -> str:
    """Identity of a tokenizer: its rules, or its vocabulary where it has none to write, and its prefix."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None and hasattr(backend, "to_str") else ""
    vocabulary = sorted(tokenizer.get_vocab().items()) if not rules else None
    return sha256_json({"rules": rules, "vocabulary": vocabulary, "prefix": list(prefix)})


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blob_name(path: Path) -> str | None:
    """The hub cache stores large files under their own SHA-256: no need to read gigabytes again."""
    if not path.is_symlink():
        return None
    name = path.resolve().name
    return name if len(name) == 64 and set(name) <= set("0123456789abcdef") else None


_LONGEST = 48
HASH_DIGITS = 12


def slug(name: str, *, fallback: str) -> str:
    """The readable part of a file name: ASCII letters, digits, `.`, `_` and `-`, at most 48 characters.

    It never starts with a dot and never holds a separator, so it cannot leave its folder. Different names may
    give the same slug; whoever needs them apart appends a hash.
    """
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_name)
    safe = re.sub(r"\.{2,}", ".", safe).strip("-.")[:_LONGEST].rstrip("-.")
    return safe or fallback


def part_folder_name(key: str) -> str:
    """The folder name of the part called `key`: its slug and a hash that keeps all keys apart."""
    try:
        digest = text_sha256(key)
    except UnicodeEncodeError as error:
        raise StoreError(f"the part name {key!r} is not valid Unicode: rename the document") from error
    return f"{slug(key, fallback='part')}-{digest[:HASH_DIGITS]}"


def run_folder_name(name: str, config_hash: str) -> str:
    """The folder name of a run: its slug and the first 12 digits of the configuration's hash."""
    return f"{slug(name, fallback='run')}-{config_hash[:HASH_DIGITS]}"


_SEAL = "checksum"


def write_sealed(path: Path, content: Mapping[str, JSON]) -> None:
    """Writes `content` atomically with an added `checksum`: the sha256 of its canonical JSON."""
    write_file(path, readable_json({**content, _SEAL: text_sha256(canonical_json(content))}))


def read_sealed(path: Path) -> dict[str, JSON] | None:
    """Reads what `write_sealed` wrote; None when the file is missing, truncated or altered."""
    try:
        content = parse_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explain(error)}") from error
    if content is None:
        return None
    seal = content.pop(_SEAL, None)
    try:
        intact = seal == text_sha256(canonical_json(content))
    except ConfigError:  # an altered byte can make a number infinite or a string invalid
        return None
    return content if intact else None


def fingerprints(folder: Path, names: Iterable[str]) -> dict[str, JSON]:
    """The sha256 of each of the files `names` in `folder`, for a sealed file to carry."""
    found: dict[str, JSON] = {}
    for name in names:
        path = folder / name
        found[name] = {"sha256": file_sha256(path)}
    return found


def first_damaged(folder: Path, expected: JSON) -> str | None:
    """The name of the first file in `folder` that does not have its expected sha256; None if all do."""
    if not isinstance(expected, Mapping) or not expected:
        return "the list of files"
    for name, fingerprint in expected.items():
        try:
            if fingerprints(folder, [name])[name] != fingerprint:
                return name
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                return name
            raise
    return None
