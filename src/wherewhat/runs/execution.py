"""Run one request: load the model, measure each document, store; with control models and an estimate of time."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherewhat.captures.layer_proofs import layer_kinds
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import CaptureError, LoadError, MeasureError, TextError, TooLargeError, WherewhatError
from wherewhat.measures.measurement import (
    ChoicesMeasurement,
    DocumentsMeasurement,
    Measurement,
    QuestionMeasurement,
    Subject,
    Text,
    as_scores,
    declared_metrics,
    defines,
    find_measurement,
    measure_text,
)
from wherewhat.models.loaded import LoadedModel, evaluation
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import build_config
from wherewhat.progress import Progress, Silent, counted, duration
from wherewhat.runs.directory import Provenance, RunDirectory, model_provenance
from wherewhat.runs.identity import Controlled, KnownRuns, inputs_identity, loaded_model, reused_line, run_identity
from wherewhat.runs.request import DEFAULT_TOKENS, Input, MemoryModel, ModelRequest, Request, model_inputs, read_texts
from wherewhat.runs.subject import ModelSubject, load_model
from wherewhat.scores import Scores
from wherewhat.text.documents import Document

if TYPE_CHECKING:
    from wherewhat.models.source import Weights

_TOGETHER = "\n"
"""Key of the part with the scores of all documents together; no document has this name."""


class LastModel:
    """Keeps the model loaded last, with its proof, until another one is requested.

    Attributes:
        loads: Number of models loaded so far.
    """

    def __init__(self) -> None:
        self.loads = 0
        self._request: ModelRequest | MemoryModel | None = None
        self._loaded: LoadedModel | None = None
        self._proof: Proof | None = None

    def loaded(self, request: ModelRequest | MemoryModel, *, say: Callable[[str], None] | None = None) -> LoadedModel:
        """Return the model of a request: the kept one, or a newly loaded one."""
        if self._loaded is None or request != self._request:
            self.forget()  # first, since memory may not suffice for both
            self._loaded, self._request = load_model(request, say=say), request
            self.loads += 1
        return self._loaded

    def proof(self) -> Proof:
        """Return the proof of the kept model, made once."""
        assert self._loaded is not None, "nothing is loaded yet"
        if self._proof is None:
            with evaluation(self._loaded.model):
                self._proof = prove(self._loaded.model)
        return self._proof

    def forget(self) -> None:
        """Release the model and its memory on a GPU."""
        if self._loaded is None:
            return
        self._request = self._loaded = self._proof = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Prepared:
    """A request whose model is loaded and whose run directory is known; nothing is measured or written yet.

    ``config`` has the measurement's options, and ``inputs`` the documents or prompts by name.
    """

    request: Request
    measurement: Measurement
    config: Any
    loaded: LoadedModel
    inputs: Mapping[str, Input]
    directory: RunDirectory


def run(
    request: Request,
    *,
    out: Path,
    progress: Progress | None = None,
    models: LastModel | None = None,
    again: bool = False,
) -> RunDirectory:
    """Measure, store in a run directory in ``out``, and return it, finished.

    Finished parts are not computed again: an interrupted run continues with the next document, and a complete one is
    returned as it is; ``again`` removes them first. ``models`` keeps the model for the next request; by default it is
    released.
    """
    progress, models, known = progress or Silent(), models or LastModel(), KnownRuns(out)
    finished = None if again else known.find(request)
    if isinstance(finished, RunDirectory):
        progress.say(reused_line(finished.path, finished.config))
        return finished
    prepared = prepare(request, out=out, progress=progress, models=models)
    path = known.path(request)  # before measuring, while files may change
    directory = measure(prepared, progress=progress, models=models, again=again)
    known.write(path, directory, command=request.command())
    return directory


@new_process_settings()
def prepare(request: Request, *, out: Path, progress: Progress, models: LastModel) -> Prepared:
    """Load the model, read the texts and find the run directory."""
    measurement = find_measurement(request.measurement)
    config = build_config(measurement.config, request.options)
    texts = read_texts(request, measurement)
    progress.say(f"loading {request.model.model} ({request.model.weights})")
    loaded = models.loaded(request.model, say=progress.say)
    inputs = {item.document.name: item for item in model_inputs(request, measurement, config, loaded, texts)}
    if request.tokens is None:
        lengths = [item.text.ids.shape[1] for item in inputs.values()] if texts else [DEFAULT_TOKENS]
        request = dataclasses.replace(request, tokens=min(lengths))
    directory = RunDirectory.open(
        out,
        name=f"{measurement.name}-{loaded.name}-{loaded.weights}",
        config=run_identity(
            measurement,
            config,
            model=loaded_model(loaded),
            tokens=request.tokens,
            # Chunks change the numbers by rounding; where their queries are kept does not.
            chunk=request.chunk,
            **inputs_identity(inputs.values()),
        ),
    )
    return Prepared(request, measurement, config, loaded, inputs, directory)


def measure(prepared: Prepared, *, progress: Progress, models: LastModel, again: bool = False) -> RunDirectory:
    """Measure missing parts of what :func:`prepare` returned, or ``again`` all, and return the finished directory."""
    request, measurement, config = prepared.request, prepared.measurement, prepared.config
    loaded, inputs, directory = prepared.loaded, prepared.inputs, prepared.directory
    if directory.is_complete and not again:
        progress.say(reused_line(directory.path, directory.config))
        return directory

    def save(key: str, compute: Callable[[], Scores]) -> None:
        started = time.perf_counter()
        scores = _checked(prepared, key, compute)
        document = None if key == _TOGETHER else key
        directory.save(key, scores, document=document, seconds=time.perf_counter() - started)

    settings = new_process_settings(weight_dtypes(loaded.model))
    with directory.lock(on_wait=progress.say), settings, evaluation(loaded.model):
        if again:
            directory.clear()
        keys = _keys(measurement, list(inputs))
        missing = [key for key in keys if not directory.has(key)]
        across = isinstance(measurement, DocumentsMeasurement)
        with_model = missing if across else [key for key in missing if key != _TOGETHER]
        subject = ModelSubject(loaded, models.proof(), chunk=request.chunk, offload=request.offload)
        if with_model:
            # Short pieces are timed only where the estimate is shown, and only texts that can be cut.
            if progress.shown and not isinstance(measurement, QuestionMeasurement | ChoicesMeasurement):
                ahead = [item.text for name, item in inputs.items() if name in with_model or across]
                line = estimate(subject, measurement, config, ahead)
                size = memory(
                    loaded.model,
                    max(item.text.ids.shape[1] for item in inputs.values()),
                    together=across,
                    chunk=request.chunk,
                )
                progress.say(line and f"{line}, about {size / 2**30:.1f} GiB")
            for key in progress.track(with_model, f"{measurement.name} of {loaded.name} ({loaded.weights})"):
                save(key, partial(_found, measurement, subject, key, inputs, config))
        if _TOGETHER in missing and defines(measurement, "combine"):
            save(
                _TOGETHER,
                lambda: as_scores(measurement, measurement.combine([directory.part(name) for name in inputs], config)),
            )
        texts = [item.document for item in inputs.values()]
        directory.finish(keys, provenance=_provenance(subject, texts, request.model.revision))
    return directory


Share = tuple[int, int]
"""Number of a share of a run's documents, from 0, and the number of shares."""


def share_of(names: Iterable[str], share: Share) -> list[str]:
    """Return the names of the documents of a share: neighbours, nearly as many as in the other shares."""
    listed = list(names)
    start, end = (len(listed) * number // share[1] for number in (share[0], share[0] + 1))
    return listed[start:end]


def measure_share(prepared: Prepared, share: Share, *, models: LastModel) -> None:
    """Measure missing documents of one share of a run, without finishing it.

    Several processes can measure shares of one run, since each holds the lock only while it saves a part. What they
    leave out, :func:`measure` adds before it finishes the run.
    """
    measurement, config, loaded = prepared.measurement, prepared.config, prepared.loaded
    inputs, directory = prepared.inputs, prepared.directory
    assert not isinstance(measurement, DocumentsMeasurement), "documents that are measured together have no shares"
    missing = [name for name in share_of(inputs, share) if not directory.has(name)]
    subject = ModelSubject(loaded, models.proof(), chunk=prepared.request.chunk, offload=prepared.request.offload)
    with new_process_settings(weight_dtypes(loaded.model)), evaluation(loaded.model):
        for name in missing:
            started = time.perf_counter()
            scores = _checked(prepared, name, partial(_found, measurement, subject, name, inputs, config))
            seconds = time.perf_counter() - started
            with directory.lock():
                if not directory.has(name):
                    directory.save(name, scores, document=name, seconds=seconds)


def _checked(prepared: Prepared, key: str, compute: Callable[[], Scores]) -> Scores:
    """Return the scores of a document, or of all of them, checked against the declaration of the measurement."""
    measurement = prepared.measurement
    together = key == _TOGETHER
    alone = not together or isinstance(measurement, DocumentsMeasurement)
    metrics = declared_metrics(measurement, prepared.config)
    scores = compute().checked(metrics, of=measurement.name, controls=alone)
    # Scores of all documents together may need what was not stored, such as curves.
    if not scores.names and not (together and defines(measurement, "combine")):
        raise TextError(f"{'the documents together' if together else key} gave no scores")
    return scores


def _keys(measurement: Measurement, names: list[str]) -> list[str]:
    """Return the parts of a run: one per document, and one for all of them, where the measurement has scores there."""
    if isinstance(measurement, DocumentsMeasurement):
        return [_TOGETHER]
    return [*names, _TOGETHER] if defines(measurement, "combine") and len(names) > 1 else names


def _found(
    measurement: Measurement, subject: ModelSubject, key: str, inputs: Mapping[str, Input], config: Any
) -> Scores:
    """Measure one document, or all of them."""
    if isinstance(measurement, DocumentsMeasurement):
        return as_scores(measurement, measurement.measure(subject, [item.text for item in inputs.values()], config))
    item = inputs[key]
    if isinstance(measurement, QuestionMeasurement):
        assert item.question is not None
        return as_scores(measurement, measurement.measure(subject, item.question, config))
    if isinstance(measurement, ChoicesMeasurement):
        assert item.choices is not None
        return as_scores(measurement, measurement.measure(subject, item.choices, config))
    return measure_text(measurement, subject, item.text, config)


_SHORT, _LONG = 64, 256
_SHORTEST_ESTIMATE = 2.0
"""Seconds below which no estimate is shown."""


def estimate(subject: Subject, measurement: Measurement, config: Any, texts: Sequence[Text]) -> str:
    """Return the estimated time in one line; empty if it is short.

    Two short pieces of the first text are measured (of the first few, where documents are measured together), and a
    time of ``a n + b n²`` is extrapolated from them.
    """
    lengths = [text.ids.shape[1] for text in texts]
    if max(lengths) <= _LONG:
        return ""
    try:
        _seconds(subject, measurement, config, texts, _SHORT)  # warms up allocators and kernels
        short, long = (_seconds(subject, measurement, config, texts, n) for n in (_SHORT, _LONG))
    except WherewhatError:  # options for long texts need not suit short pieces
        return ""
    square = max(0.0, (long / _LONG - short / _SHORT) / (_LONG - _SHORT))
    linear = max(0.0, long / _LONG - square * _LONG)
    total = sum(linear * n + square * n**2 for n in lengths)
    if total < _SHORTEST_ESTIMATE:
        return ""
    return f"{counted(len(texts), 'document')} of {lengths[0]} tokens: about {duration(total)}"


def memory(model: Any, tokens: int, *, together: bool = False, chunk: int | None = None) -> float:
    """Return the approximate number of bytes of a forward pass: the weights and the activations of one block.

    No n × n matrix is stored, and only one layer's queries and keys unless the text is run in chunks, so memory grows
    linearly with the length of the text. Documents that are measured ``together`` need float64 sums of every layer's
    queries and keys; with texts in chunks, all layers' queries, keys, values and outputs are stored.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = next(model.parameters()).element_size()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    sums = config.num_hidden_layers * tokens * 4 * hidden * 8 if together else 0
    at_once = min(tokens, chunk or tokens)
    held = 0 if at_once == tokens else config.num_hidden_layers * tokens * 4 * hidden * size
    return float(weights + at_once * (6 * hidden + 3 * inner) * size + sums + held)


def _seconds(subject: Subject, measurement: Measurement, config: Any, texts: Sequence[Text], n: int) -> float:
    """Return the time to measure the first ``n`` tokens of one text."""
    pieces = [text.first(n) for text in texts[: measurement.least_documents]]
    started = time.perf_counter()
    if isinstance(measurement, DocumentsMeasurement):
        measurement.measure(subject, pieces, config)
        return (time.perf_counter() - started) / len(pieces)
    measure_text(measurement, subject, pieces[0], config)
    return time.perf_counter() - started


def _provenance(subject: ModelSubject, texts: list[Document], checkpoint: str | None) -> Provenance:
    loaded = subject.loaded
    extra: dict[str, Any] = {
        "spec": loaded.spec,
        "revision": loaded.revision,
        # The requested name, such as step1000; the revision is its commit.
        "checkpoint": checkpoint,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "encoding": subject.encoding,
        "layer_kinds": layer_kinds(subject.proof.layers),
    }
    if loaded.device.startswith("cuda"):
        extra["gpu"] = torch.cuda.get_device_name(loaded.device.split("+")[0])
    return model_provenance(loaded, texts, extra)


def run_with_controls(
    request: Request, controls: Iterable[Weights], *, out: Path, progress: Progress | None = None, again: bool = False
) -> Controlled:
    """Measure a model, and as controls the same model with other weights, such as ``("random", "shuffled")``."""
    runs = {str(request.model.weights): run(request, out=out, progress=progress, again=again)}
    left_out: dict[str, str] = {}
    for weights in controls:
        outcome = run_control(request.with_weights(weights), out=out, progress=progress, again=again)
        if isinstance(outcome, str):
            left_out[weights] = outcome
        else:
            runs[weights] = outcome
    return Controlled(runs, left_out)


def run_control(
    request: Request,
    *,
    out: Path,
    progress: Progress | None = None,
    models: LastModel | None = None,
    again: bool = False,
) -> RunDirectory | str:
    """Return the finished run of a control model, or in one line why there is none.

    Some models have no such control model: quantised weights, for example, cannot be permuted. The reason is stored, so
    that it is not tried again with the same model, options and versions, unless ``again`` is set.
    """
    known = KnownRuns(out)
    reason = None if again else known.find(request)
    if isinstance(reason, str):
        return reason
    path = known.path(request)
    try:
        return run(request, out=out, progress=progress, models=models, again=again)
    except (LoadError, CaptureError, MeasureError) as error:
        if not isinstance(error, TooLargeError):
            known.write(path, str(error), command=request.command())
        return str(error)
