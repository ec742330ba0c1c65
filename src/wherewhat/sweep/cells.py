"""Expansion of a sweep file into cells: one request each, checked before the first one runs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from wherewhat.boundary import user_path
from wherewhat.errors import ConfigError, LoadError
from wherewhat.files import HASH_DIGITS, JSON, canonical_json, slug, text_sha256
from wherewhat.measures.measurement import (
    ChoicesMeasurement,
    DocumentsMeasurement,
    Measurement,
    QuestionMeasurement,
)
from wherewhat.models.loaded import check_device_map, resolve_dtype
from wherewhat.models.source import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EMBEDDED,
    HUB_ID,
    adapter_base,
    is_adapter,
    resolve,
    weight_files,
)
from wherewhat.options import build_config
from wherewhat.runs.code import code_identity
from wherewhat.runs.identity import attention_settings, versions
from wherewhat.runs.request import DEFAULT_DOCUMENTS, ModelRequest, Request, read_texts
from wherewhat.sweep.file import (
    EMBEDDED_TEXT,
    ON_MODELS,
    ON_TEXTS,
    Axes,
    MeasurementEntry,
    ModelEntry,
    SweepFile,
    TextEntry,
    axes_of,
    check_keys,
    listed,
    measurement_entries,
    model_entry,
    names_of,
    text_entries,
    typed,
)
from wherewhat.text.documents import Document, text_hash
from wherewhat.text.questions import read_items

_MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(ModelRequest))
_REQUEST_FIELDS = tuple(f.name for f in dataclasses.fields(Request) if f.name not in ("model", "files", "texts"))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement of one model on one text.

    Attributes:
        request: The request; paths are as in the file.
        text: Display name of the text; None where the measurement makes its own or is measured on items.
        checkpoint: Revision or checkpoint folder; None where there is only one.
        inputs: Hashes of texts or items, state of a local model's files, code of the measurement and versions, so that
            a changed one is another cell.
        documents: Number of documents, prompts or items that are measured separately; 1 if they are measured together.
    """

    request: Request
    text: str | None = None
    checkpoint: str | None = None
    inputs: Mapping[str, JSON] = field(default_factory=dict)
    documents: int = 1

    @cached_property
    def id(self) -> str:
        """Name of the cell's record: a readable part, then a hash of everything it depends on."""
        key = request_json(self.request)
        del key["text"]  # a text is identified by its content, not its path
        key["items"] = None  # so are items; the key stays, since names of other cells depend on it
        digest = text_sha256(canonical_json({"request": key, "inputs": self.inputs}))
        model = Path(str(self.request.model.model)).name
        readable = slug(f"{self.request.measurement}-{model}-{self.request.model.weights}", fallback="cell")
        return f"{readable}-{digest[:HASH_DIGITS]}"

    @property
    def model(self) -> ModelRequest:
        """The model, which is named by a file."""
        assert isinstance(self.request.model, ModelRequest)
        return self.request.model

    @property
    def described(self) -> str:
        """The cell in a few words."""
        model = self.model
        at = "" if self.checkpoint is None else f" at {self.checkpoint}"
        seed = f", seed {model.seed}" if model.weights != "trained" or model.seed else ""
        on = "" if self.text is None else f" on {self.text}"
        return f"{self.request.measurement} of {Path(str(model.model)).name}{at} ({model.weights}{seed}){on}"

    def json(self) -> dict[str, Any]:
        """Return the cell for ``sweep.json``: the request's fields in one level, and its names on the axes."""
        return {
            **request_json(self.request),
            "text_name": self.text,
            "checkpoint": self.checkpoint,
            "inputs": dict(self.inputs),
            "described": self.described,
        }


def request_json(request: Request) -> dict[str, Any]:
    """Return a request as plain values, in one level."""
    values = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    values |= {name: getattr(request.model, name) for name in _MODEL_FIELDS}
    values["model"] = os.fspath(request.model.model)
    values["text"] = None if request.files is None else list(request.files)
    values["options"] = dict(request.options)
    return values


def request_from_json(values: Mapping[str, Any]) -> Request:
    """Return the request that :func:`request_json` wrote."""
    model = ModelRequest(**{name: values[name] for name in _MODEL_FIELDS})
    named = {name: values[name] for name in _REQUEST_FIELDS}
    files = None if values["text"] is None else tuple(values["text"])
    return Request(model=model, files=files, **named)


def located(request: Request) -> Request:
    """Return the request with absolute paths, for workers with another working directory."""
    model = os.fspath(request.model.model)
    path = model_path(model)
    if model != EMBEDDED and path.exists():
        model = str(path.absolute())
    files = request.files
    if files is not None:
        files = tuple(str(user_path(name, name="text").absolute()) for name in files)
    items = request.items
    if items is not None and user_path(items, name="items").is_file():
        items = str(user_path(items, name="items").absolute())
    located_model = dataclasses.replace(request.model, model=model)
    return dataclasses.replace(request, model=located_model, files=files, items=items)


def model_path(model: str) -> Path:
    """Return the path of a model that is a folder or a file."""
    return user_path(model, name="the model", error=LoadError)


@dataclass(frozen=True)
class Variant:
    """One model with its weights, seed and checkpoint.

    Attributes:
        request: How to load it.
        checkpoint: Its revision or checkpoint folder; None where there is only one.
        files: Size and time of a local model's files, so that a model that was saved again is another one; None for
            a model that is not local.
        first_seed: Whether its seed is the first of its list.
    """

    request: ModelRequest
    checkpoint: str | None
    files: JSON
    first_seed: bool


def variants(entry: ModelEntry, shared: dict[str, Any], where: str) -> Iterator[Variant]:
    """Return the variants of one entry of ``models``; ``shared`` are the options of all models."""
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
    """Return model, revision and checkpoint name of each checkpoint."""
    model, axes = entry.model, entry.axes
    from_hub = model != EMBEDDED and not model_path(model).exists() and HUB_ID.fullmatch(model) is not None
    if axes.revisions is not None and not from_hub:
        raise ConfigError(
            f"{where}: '{model}' has no revisions, only Hugging Face models have: give checkpoints for a folder, or "
            "put revisions into the tables of the models that have them"
        )
    if axes.checkpoints is not None and (from_hub or not model_path(model).is_dir()):
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
        for folder in _folders(model_path(model), pattern, where):
            _check(str(folder))
            yield str(folder), None, folder.name


def _check(model: str) -> None:
    """Raise for a missing local model, before anything runs."""
    path = model_path(model)
    if is_adapter(path, model):  # its base model is downloaded when the cell runs
        adapter_base(path, model)
        return
    source = resolve(model)
    if source.folder is not None and not (source.folder / "config.json").is_file():
        raise LoadError(f"{model!r} has no config.json: is it a model folder?")


def _folders(folder: Path, pattern: str, where: str) -> list[Path]:
    """Return the checkpoint folders that match a name or a pattern such as ``step-*``, sorted by number."""
    try:
        folders = [path for path in folder.glob(pattern) if path.is_dir()]
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{where}: checkpoints '{pattern}' is no name or pattern: {error}") from error
    if not folders:
        raise LoadError(f"{where}: {str(folder)!r} has no checkpoint '{pattern}'")
    return sorted(folders, key=lambda path: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", path.name)])


def _files(model: str, weights: str) -> JSON:
    path = model_path(model)
    if model == EMBEDDED or not path.exists():
        return None
    if path.is_file():
        return {path.name: _state(path)}
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    files = [path / name for name in names if (path / name).is_file()]
    if weights != "random" and not is_adapter(path, model):
        files += weight_files(path, model)
    return {file.name: _state(file) for file in files}


def _state(path: Path) -> JSON:
    status = path.stat()
    # As text, since nanoseconds exceed the integers that every JSON reader can represent.
    return [status.st_size, str(status.st_mtime_ns)]


_MOST_CELLS = 100_000
_OWN_KEYS = ("store", "resources", "models", "texts", "measurements")


def expand(file: SweepFile) -> list[Cell]:
    """Return the cells of a sweep, in the order of the file: models outside, measurements inside.

    Seeds change control models and prompts. Trained weights on documents do not depend on them and are measured with
    the first one only; a measurement that makes its own prompts or uses items is not repeated for every text.
    """
    values, where = file.values, str(file.path)
    check_keys(values, [*_OWN_KEYS, *names_of(Axes), *names_of(ON_MODELS), *names_of(ON_TEXTS)], where)
    if "measurements" not in values:
        raise ConfigError(f"{where}: 'measurements' is missing: give at least one, such as measurements = ['axes']")
    axes = axes_of(values, where)
    models = [
        model_entry(value, f"{where}: models[{i}]", axes)
        for i, value in enumerate(listed(values.get("models", [EMBEDDED]), f"{where}: models"))
    ]
    texts = text_entries(values.get("texts", [EMBEDDED_TEXT]), f"{where}: texts")
    measurements = measurement_entries(values["measurements"], f"{where}: measurements")
    on_models, on_texts = typed(ON_MODELS, values, where), typed(ON_TEXTS, values, where)
    identify, software = _Texts(), _software(measurements)
    cells: dict[str, Cell] = {}
    for number, model in enumerate(models):
        for variant in variants(model, on_models, f"{where}: models[{number}]"):
            for cell in _cells(variant, texts, software, on_texts, identify):
                if cell.id in cells:
                    raise ConfigError(f"{where}: two cells are the same: {cell.described}; remove what is repeated")
                cells[cell.id] = cell
                if len(cells) > _MOST_CELLS:
                    raise ConfigError(f"{where} has more than {_MOST_CELLS:,} cells: split it into several sweeps")
    return list(cells.values())


def _software(measurements: Sequence[MeasurementEntry]) -> list[tuple[MeasurementEntry, dict[str, JSON]]]:
    """Return each measurement with what its cells depend on beside model and text: code, settings and versions."""
    shared = {**attention_settings(), "versions": versions()}
    configs = [build_config(entry.measurement.config, entry.options) for entry in measurements]
    codes = [code_identity(entry.measurement, config) for entry, config in zip(measurements, configs, strict=True)]
    return [(entry, {**code, **shared}) for entry, code in zip(measurements, codes, strict=True)]


def _cells(
    variant: Variant,
    texts: list[TextEntry],
    measurements: Sequence[tuple[MeasurementEntry, dict[str, JSON]]],
    on_texts: dict[str, Any],
    identify: _Texts,
) -> Iterator[Cell]:
    """Yield the cells of one variant of a model."""
    for entry, software in measurements:
        measurement = entry.measurement
        for text in _on(measurement, texts):
            makes_own = isinstance(measurement, QuestionMeasurement)
            drawn = variant.request.weights != "trained" or makes_own or (text is not None and text.prompts is not None)
            if not drawn and not variant.first_seed:
                continue
            # A number of texts for all measurements is not one of prompts.
            common = {name: value for name, value in on_texts.items() if not (makes_own and name == "documents")}
            request = Request(
                measurement=measurement.name,
                model=variant.request,
                files=text.files if text else None,
                prompts=text.prompts if text else None,
                options=entry.options,
                **{**common, **(text.shared if text else {}), **entry.shared},
            )
            sha256, count = identify(request, measurement)
            inputs: dict[str, JSON] = {"texts": sha256, "model": variant.files, **software}
            yield Cell(
                request=request,
                text=text.name if text else None,
                checkpoint=variant.checkpoint,
                inputs=inputs,
                documents=_separate(request, measurement, count),
            )


def _separate(request: Request, measurement: Measurement, count: int) -> int:
    """Return the number of inputs that are measured separately; ``count`` is that of documents or items."""
    if isinstance(measurement, DocumentsMeasurement):
        return 1
    if isinstance(measurement, QuestionMeasurement):
        config = build_config(measurement.config, request.options)
        return request.documents or sum(prompt_set.count for prompt_set in measurement.prompts(config))
    return count or request.documents or DEFAULT_DOCUMENTS


def _on(measurement: Measurement, texts: Sequence[TextEntry]) -> Sequence[TextEntry | None]:
    """Return the texts a measurement is repeated for; None where it makes its own, or items are given elsewhere."""
    if isinstance(measurement, ChoicesMeasurement):
        return [text for text in texts if "items" in text.shared] or [None]
    return [None] if isinstance(measurement, QuestionMeasurement) else texts


class _Texts:
    """Hashes texts and items, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[str | None, int]] = {}

    def __call__(self, request: Request, measurement: Measurement) -> tuple[str | None, int]:
        """Return hash and number of the documents or items of a request.

        They are None and 0 for prompts, which depend on the model.
        """
        named = (request.files, request.prompts, request.items, request.documents)
        on_items = isinstance(measurement, ChoicesMeasurement)
        key = (*named, measurement.least_documents, isinstance(measurement, QuestionMeasurement), on_items)
        if key not in self._known:
            texts = read_texts(request, measurement)
            if on_items and request.items is not None:
                items = read_items(request.items, count=request.documents)
                texts = [Document(item.name, item.text, item.source) for item in items]
            self._known[key] = text_hash(texts) if texts else None, len(texts)
        return self._known[key]
