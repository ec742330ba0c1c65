"""Every form of a model in which a sweep wants it: checkpoint or revision × weights × seed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError, LoadError
from wherewhat.models.adapter import CONFIG, WEIGHTS, adapter_base, is_adapter
from wherewhat.models.folder import weight_files
from wherewhat.models.hub import HUB_ID
from wherewhat.models.placement import check_device_map, resolve_dtype
from wherewhat.models.source import EMBEDDED, resolve
from wherewhat.pipeline.request import ModelRequest
from wherewhat.store.hashing import JSON
from wherewhat.sweep.entries import ModelEntry


@dataclass(frozen=True)
class Variant:
    """One form of a model.

    Attributes:
        request: How to load it.
        checkpoint: Its revision or checkpoint folder; None where there is only one.
        files: Size and time of a local model's files, so that a model that was saved again is another one; None for
            a model that is not a local file.
        first_seed: Whether its seed is the first of its list.
    """

    request: ModelRequest
    checkpoint: str | None
    files: JSON
    first_seed: bool


def variants(entry: ModelEntry, shared: dict[str, Any], where: str) -> Iterator[Variant]:
    """The forms of one entry of ``models``.

    Args:
        entry: The model and its axes.
        shared: What the file says of all models.
        where: The place in the file, for messages.

    Raises:
        ConfigError: If revisions or checkpoints do not fit the kind of model, or a value is unknown.
        LoadError: If a local model is not there.
    """
    options = {**shared, **entry.shared}
    resolve_dtype(options.get("dtype", "float32"))
    check_device_map(options.get("device_map"), options.get("device", "auto"))
    for model, revision, checkpoint in _checkpoints(entry, offline=bool(options.get("offline")), where=where):
        for weights in entry.axes.weights:
            files = _files(model, weights)
            for number, seed in enumerate(entry.axes.seeds):
                request = ModelRequest(model=model, weights=weights, seed=seed, revision=revision, **options)
                yield Variant(request, checkpoint, files, number == 0)


def _checkpoints(entry: ModelEntry, *, offline: bool, where: str) -> Iterator[tuple[str, str | None, str | None]]:
    """Model, revision and the checkpoint's name."""
    model, axes = entry.model, entry.axes
    from_hub = model != EMBEDDED and not Path(model).expanduser().exists() and HUB_ID.fullmatch(model) is not None
    if axes.revisions is not None and not from_hub:
        raise ConfigError(
            f"{where}: '{model}' has no revisions, only Hugging Face models have: give checkpoints for a folder, or "
            "put revisions into the tables of the models that have them"
        )
    if axes.checkpoints is not None and (from_hub or not Path(model).expanduser().is_dir()):
        raise ConfigError(f"{where}: '{model}' is no folder with checkpoints: give revisions for a Hugging Face model")
    if from_hub:
        for revision in axes.revisions or (None,):
            if offline:
                resolve(model, offline=True, revision=revision)
            yield model, revision, revision
        return
    if axes.checkpoints is None:
        _check(model)
        yield model, None, None
        return
    for pattern in axes.checkpoints:
        for folder in _folders(Path(model).expanduser(), pattern, where):
            _check(str(folder))
            yield str(folder), None, folder.name


def _check(model: str) -> None:
    """Refuse a local model that is not there, before anything runs."""
    path = Path(model).expanduser()
    if is_adapter(path, model):  # the cell that runs it downloads its base model
        adapter_base(path, model)
        return
    source = resolve(model)
    if source.folder is not None and not (source.folder / "config.json").is_file():
        raise LoadError(f"{model!r} has no config.json: is it a model folder?")


def _folders(folder: Path, pattern: str, where: str) -> list[Path]:
    """Checkpoint folders that a name or a pattern such as ``step-*`` stands for, by number."""
    try:
        found = [path for path in folder.glob(pattern) if path.is_dir()]
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{where}: checkpoints '{pattern}' is no name or pattern: {error}") from error
    if not found:
        raise LoadError(f"{where}: {str(folder)!r} has no checkpoint '{pattern}'")
    return sorted(found, key=lambda path: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.name)])


def _files(model: str, weights: str) -> JSON:
    path = Path(model).expanduser()
    if model == EMBEDDED or not path.exists():
        return None
    if path.is_file():
        return {path.name: _state(path)}
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", CONFIG, WEIGHTS]
    files = [path / name for name in names if (path / name).is_file()]
    if weights != "random" and not is_adapter(path, model):
        files += weight_files(path, model)
    return {file.name: _state(file) for file in files}


def _state(path: Path) -> JSON:
    found = path.stat()
    # As text: nanoseconds are beyond the whole numbers that every JSON reader keeps.
    return [found.st_size, str(found.st_mtime_ns)]
