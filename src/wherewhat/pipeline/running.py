"""text + model → capture → measure → store: one request in, one finished run directory out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wherewhat.errors import TextError
from wherewhat.measure.base import DocumentScores, Measurement, Metric
from wherewhat.measure.options import build_config, config_values
from wherewhat.measure.registry import find
from wherewhat.models import LoadedModel, load
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.pipeline.estimate import estimate, memory
from wherewhat.pipeline.inputs import Input, model_inputs, read_texts
from wherewhat.pipeline.keeping import LastModel
from wherewhat.pipeline.kinds import layer_kinds
from wherewhat.pipeline.progress import Progress, Silent
from wherewhat.pipeline.request import ModelRequest, Request
from wherewhat.pipeline.stored import stored_document
from wherewhat.pipeline.subject import ModelSubject
from wherewhat.store import PartResult, Profile, Provenance, RunDirectory, ScoreSource, profile_name
from wherewhat.text import Document, text_hash

_TOGETHER = "\n"
"""Key of the part that holds what is measured over all documents together; no document has this name."""


@dataclass(frozen=True)
class Prepared:
    """A request whose model is loaded and whose run directory is known; nothing is measured or written yet.

    Attributes:
        request: What to measure.
        measurement: The measurement it names.
        config: The measurement's options.
        loaded: The model.
        inputs: The documents or prompts, by name.
        directory: Where the numbers go, or are already.
    """

    request: Request
    measurement: Measurement
    config: Any
    loaded: LoadedModel
    inputs: Mapping[str, Input]
    directory: RunDirectory


def run(
    request: Request, *, out: Path, progress: Progress | None = None, models: LastModel | None = None
) -> RunDirectory:
    """Measure, store, and return the finished run directory.

    What is finished is never computed again: an interrupted run goes on with the next document, a complete one
    is returned as it is.

    Args:
        request: What to measure.
        out: Folder that holds run directories.
        progress: Where to tell how far it is; silent by default.
        models: Keeps the model for the next request; by default it is let go.

    Raises:
        WherewhatError: If anything about the request, the model, the text or the disk is wrong.
    """
    progress, models = progress or Silent(), models or LastModel()
    return measure(prepare(request, out=out, progress=progress, models=models), progress=progress, models=models)


@new_process_settings()
def prepare(request: Request, *, out: Path, progress: Progress, models: LastModel) -> Prepared:
    """Load the model, read the texts and find the run directory.

    Raises:
        WherewhatError: If anything about the request, the model or the text is wrong.
    """
    measurement = find(request.measurement)
    config = build_config(measurement.config, request.options)
    texts = read_texts(request, measurement)
    progress.say(f"loading {request.model.model} ({request.model.weights})")
    loaded = models.loaded(request.model, lambda: load_model(request.model, say=progress.say))
    inputs = {made.document.name: made for made in model_inputs(request, measurement, config, loaded, texts)}
    directory = RunDirectory.open(
        out,
        name=f"{measurement.name}-{loaded.name}-{loaded.weights}",
        config=resolved(request, measurement, config, loaded, inputs.values()),
    )
    return Prepared(request, measurement, config, loaded, inputs, directory)


def measure(prepared: Prepared, *, progress: Progress, models: LastModel) -> RunDirectory:
    """Measure what is missing and return the finished run directory.

    Args:
        prepared: What to measure, as :func:`prepare` gave it.
        progress: Where to tell how far it is.
        models: Holds the model.

    Raises:
        WherewhatError: If the model cannot be captured or measured, or the disk cannot be written.
    """
    request, measurement, config = prepared.request, prepared.measurement, prepared.config
    loaded, inputs, directory = prepared.loaded, prepared.inputs, prepared.directory
    if directory.is_complete:
        progress.say(f"already measured: {directory.path}")
        return directory

    def source(key: str) -> ScoreSource:
        return ScoreSource(
            measurement=measurement.name,
            model=loaded.name,
            weights=loaded.weights,
            seed=loaded.seed,
            document=None if key == _TOGETHER else key,
        )

    with directory.lock(on_wait=progress.say), new_process_settings(weight_dtypes(loaded.model)):
        keys = _keys(measurement, list(inputs))
        missing = [key for key in keys if not directory.has(key)]
        with_model = missing if measurement.across is not None else [key for key in missing if key != _TOGETHER]
        subject = None
        if with_model:
            subject = ModelSubject(loaded, models.proof(), chunk=request.chunk, offload=request.offload)
            # Measuring short pieces to know how long it takes is for somebody who waits, and for what can be cut.
            if progress.shown and measurement.prompts is None and not (measurement.spans or measurement.items):
                ahead = [made.ids for name, made in inputs.items() if name in with_model or _TOGETHER in with_model]
                line = estimate(subject, measurement, config, ahead)
                size = memory(loaded.model, request.tokens, together=_TOGETHER in with_model, chunk=request.chunk)
                progress.say(line and f"{line}, about {size / 2**30:.1f} GiB")
            for key in progress.track(with_model, f"{measurement.name} of {loaded.name} ({loaded.weights})"):
                started = time.perf_counter()
                found = _found(measurement, subject, key, inputs, config)
                part = _part(measurement.words(config), source(key), found)
                directory.save(key, part, seconds=time.perf_counter() - started)
        if _TOGETHER in missing and measurement.combine is not None:
            started = time.perf_counter()
            found = measurement.combine([stored_document(*directory.part(name)) for name in inputs], config)
            part = _part(measurement.words(config), source(_TOGETHER), found)
            directory.save(_TOGETHER, part, seconds=time.perf_counter() - started)
        texts = [made.document for made in inputs.values()]
        subject = subject or ModelSubject(loaded, models.proof())
        directory.finish(keys, provenance=_provenance(subject, texts, request.model.revision))
    return directory


def load_model(model: ModelRequest, *, say: Callable[[str], None] | None = None) -> LoadedModel:
    """The model a request names, not yet proved."""
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return load(options.pop("model"), **options, progress=say)


def resolved(
    request: Request, measurement: Measurement, config: Any, loaded: LoadedModel, inputs: Iterable[Input]
) -> dict[str, Any]:
    """Everything the numbers depend on: what the run directory is keyed by."""
    # Chunks and other implementations give the same numbers but for rounding, not the same bytes: each has its key.
    given = {
        "chunk": request.chunk,
        "attn_implementation": request.model.attn_implementation,
        "revision": measurement.revision if measurement.revision > 1 else None,
    }
    return {
        **{name: value for name, value in given.items() if value is not None},
        "measurement": measurement.name,
        "options": config_values(config),
        "model": loaded.name,
        "weights": loaded.weights,
        "weights_hash": loaded.weights_hash,
        "tokenizer_hash": loaded.tokenizer_hash,
        "seed": loaded.seed,
        "dtype": loaded.dtype,
        "device": _device_kind(loaded.device),
        "tokens": request.tokens,
        "documents": [{"name": made.document.name, "sha256": made.document.sha256} for made in inputs],
    }


def _device_kind(device: str) -> str:
    """``cpu``, ``cuda`` or ``mps``; of a spread model that of the first layers that are not offloaded."""
    return torch.device(next((name for name in device.split("+") if name != "offloaded"), "cpu")).type


def _keys(measurement: Measurement, names: list[str]) -> list[str]:
    """Parts of a run: one per document, and one for all of them, as far as the measurement has numbers for them."""
    together = measurement.combine is not None or measurement.across is not None
    return [
        *(names if measurement.measure is not None else []),
        *([_TOGETHER] if together and len(names) > 1 else []),
    ]


def _found(
    measurement: Measurement, subject: ModelSubject, key: str, inputs: Mapping[str, Input], config: Any
) -> DocumentScores:
    """Run the model on one document, or on all of them."""
    if key == _TOGETHER:
        assert measurement.across is not None
        return measurement.across(subject, [made.ids for made in inputs.values()], config)
    assert measurement.measure is not None
    made = inputs[key]
    given = made.spanned if measurement.spans else made.question if measurement.prompts is not None else made.ids[None]
    return measurement.measure(subject, made.choices if measurement.items else given, config)


def _part(words: Sequence[Metric], source: ScoreSource, found: DocumentScores) -> PartResult:
    document = source.document
    units = {metric.name: metric.unit or None for metric in words}
    scores = []
    profiles = {}
    for name, value in found.whole.items():
        scores.append(source.score(name, value, unit=units.get(name)))
    for name, curve in found.curves.items():
        profiles[profile_name(document, None, name)] = Profile(curve.values, curve.axes)
    for layer in found.layers:
        for name, values in layer.heads.items():
            defined = [None if math.isnan(value) else value for value in values.tolist()]
            scores += source.heads(name, defined, layer=layer.layer, unit=units.get(name))
        for name, value in layer.whole.items():
            scores.append(source.score(name, value, layer=layer.layer, unit=units.get(name)))
        for name, curve in layer.curves.items():
            profiles[profile_name(document, layer.layer, name)] = Profile(curve.values, curve.axes)
    if not scores:
        raise TextError(f"{document or 'the documents together'} gave no scores")
    return PartResult(scores=scores, profiles=profiles)


def _provenance(subject: ModelSubject, texts: list[Document], checkpoint: str | None) -> Provenance:
    loaded = subject.loaded
    extra: dict[str, Any] = {
        "spec": loaded.spec,
        "revision": loaded.revision,
        # The name that was asked for, such as step1000; the revision is the commit it stood for.
        "checkpoint": checkpoint,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "encoding": subject.encoding,
        "layer_kinds": layer_kinds(subject.proof.layers),
    }
    if loaded.device.startswith("cuda"):
        extra["gpu"] = torch.cuda.get_device_name(loaded.device.split("+")[0])
    return Provenance(
        model_hash=loaded.weights_hash,
        tokenizer_hash=loaded.tokenizer_hash,
        text_hash=text_hash(texts),
        dtype=loaded.dtype,
        device=loaded.device,
        seed=loaded.seed,
        extra=extra,
    )
