"""Identities that are the same on every machine: of files, of weights, of a tokenizer."""

import hashlib
import json
from pathlib import Path
from typing import Any

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
