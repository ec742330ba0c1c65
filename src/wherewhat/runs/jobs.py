"""Runs while they are measured: what is missing, inputs that are measured at once, and an estimate of time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from wherewhat.captures.layer_proofs import layer_kinds
from wherewhat.errors import TextError, WherewhatError
from wherewhat.measures.measurement import (
    ChoicesMeasurement,
    DocumentsMeasurement,
    LayerMeasurement,
    Measurement,
    QuestionMeasurement,
    Subject,
    Text,
    TextMeasurement,
    as_scores,
    declared_metrics,
    defines,
    measure_pass,
    measure_text,
)
from wherewhat.models.loaded import LoadedModel
from wherewhat.numerics import computing_on
from wherewhat.progress import Progress, counted, duration
from wherewhat.runs.directory import NewPart, Provenance, RunDirectory, model_provenance
from wherewhat.runs.request import Input, Request
from wherewhat.runs.subject import ModelSubject, memory, texts_at_once
from wherewhat.scores import Scores, checked_each
from wherewhat.text.documents import Document

_TOGETHER = "\n"
"""Key of the part with the scores of all documents together; no document has this name."""


Share = tuple[int, int]
"""Number of a share of a run's documents, from 0, and the number of shares."""


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


class Job:
    """One run, or a share of it, while it is measured.

    Attributes:
        seconds: The time that all of it will take; 0 if it is not known.
        missing: Keys of the parts that need the model and are not finished yet.
        outcome: The directory, or the error that it raised; None until it ends.
    """

    def __init__(self, prepared: Prepared, share: Share | None, seconds: float) -> None:
        self.seconds = seconds
        self.prepared, self.request, self.measurement = prepared, prepared.request, prepared.measurement
        self.directory, self.inputs, self.config = prepared.directory, prepared.inputs, prepared.config
        self.across = isinstance(self.measurement, DocumentsMeasurement)
        self.missing: list[str] = []
        self.outcome: RunDirectory | WherewhatError | None = None
        self._share, self._lock = share, ExitStack()
        self._at_once, self._new = False, dict[str, NewPart]()
        assert share is None or not self.across, "documents that are measured together have no shares"

    @property
    def ended(self) -> bool:
        """Whether it is finished or raised an error."""
        return self.outcome is not None

    def held(self, *, on_wait: Callable[[str], None]) -> ExitStack:
        """Lock the directory until the job ends; a share locks it only in :meth:`writing`."""
        if self._share is None:
            self._lock.enter_context(self.directory.lock(on_wait=on_wait))
        return self._lock

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which parts can be saved."""
        return nullcontext() if self._share is None else self.directory.lock()

    def begin(self, subject: ModelSubject, *, again: bool) -> None:
        """Find out what is missing."""
        self.subject = subject
        if again:
            self.directory.clear()
        self._keys = _keys(self.measurement, list(self.inputs))
        if self._share is not None:
            batches, (number, count) = self.split(), self._share
            start, end = (len(batches) * share // count for share in (number, number + 1))
            self._keys = [key for batch in batches[start:end] for key in batch]
        missing = [key for key in self._keys if not self.directory.has(key)]
        self.missing = missing if self.across else [key for key in missing if key != _TOGETHER]
        # All or nothing is measured: parts, which an interrupted run would continue from, need not be written.
        single = self._share is None and len(self.split()) == 1
        self._at_once = single and len(self._keys) > 1 and missing == self._keys

    def end(self, outcome: RunDirectory | WherewhatError) -> None:
        """Note the outcome and release the directory."""
        self.outcome = outcome
        self._lock.close()

    def checked(self, scores: Mapping[str, Scores]) -> Iterator[tuple[str, Scores]]:
        """Yield parts with their scores once these are checked; raise at the first that is refused."""
        alone = self.across or _TOGETHER not in scores
        metrics = declared_metrics(self.measurement, self.config)
        each = checked_each([*scores.values()], metrics, of=self.measurement.name, controls=alone)
        return zip(scores, each, strict=True)

    def save(self, key: str, checked: Scores, *, seconds: float) -> None:
        """Store the checked scores of a part."""
        document = None if key == _TOGETHER else key
        # Scores of all documents together may need what was not stored, such as curves.
        if not checked.metrics and not (document is None and defines(self.measurement, "combine")):
            raise TextError(f"{document or 'the documents together'} gave no scores")
        if self._at_once:
            self._new[key] = NewPart(checked, document, seconds)
        elif self._share is None or not self.directory.has(key):  # another process may have measured the same share
            self.directory.save(key, checked, document=document, seconds=seconds)
        if key in self.missing:
            self.missing.remove(key)

    def finish(self) -> None:
        """Add the scores of all documents together, and finish the run; a share only ends."""
        measurement = self.measurement
        try:
            if self._share is None:
                if _TOGETHER in self._keys and not self.directory.has(_TOGETHER):
                    started = time.perf_counter()
                    parts = [
                        self._new[name].scores if name in self._new else self.directory.part(name)
                        for name in self.inputs
                    ]
                    with computing_on(self.prepared.loaded.device):
                        scores = as_scores(measurement, measurement.combine(parts, self.config))
                    seconds = time.perf_counter() - started
                    for key, checked in self.checked({_TOGETHER: scores}):
                        self.save(key, checked, seconds=seconds)
                texts = [item.document for item in self.inputs.values()]
                provenance = _provenance(self.subject, texts, self.request.model.revision)
                self.directory.finish(self._keys, provenance=provenance, parts=self._new)
                self._new.clear()  # pinned memory, which the next measurement uses
        except WherewhatError as error:
            self.end(error)
        else:
            self.end(self.directory)

    @functools.cached_property
    def at_once(self) -> int:
        """Number of texts that go through the model together."""
        tokens = max(item.text.ids.shape[1] for item in self.inputs.values())
        chunk = self.request.chunk
        return 1 if chunk is not None and tokens > chunk else texts_at_once(self.prepared.loaded.model, tokens)

    @property
    def reads_layers(self) -> bool:
        """Whether it is measured in passes that other runs may share."""
        measurement = self.measurement
        if not isinstance(measurement, DocumentsMeasurement):
            return isinstance(measurement, LayerMeasurement)
        lengths = {item.text.ids.shape[1] for item in self.inputs.values()}
        defined = type(measurement).measure_layer is not DocumentsMeasurement.measure_layer
        return defined and len(lengths) == 1 and measurement.least_documents <= len(self.inputs) <= self.at_once

    def split(self) -> list[list[str]]:
        """Return the names of the inputs that are measured at once: all, or consecutive ones of one length."""
        names = list(self.inputs)
        if self.across:
            return [names]
        alone = isinstance(self.measurement, QuestionMeasurement | ChoicesMeasurement)
        lengths = {name: item.text.ids.shape[1] for name, item in self.inputs.items()}
        parts: list[list[str]] = []
        for name in names:
            if parts and not alone and len(parts[-1]) < self.at_once and lengths[parts[-1][0]] == lengths[name]:
                parts[-1].append(name)
            else:
                parts.append([name])
        return parts

    def estimate(self, progress: Progress) -> str:
        """Return time and memory in one line; empty where they are not shown, small, or not known beforehand."""
        # Short pieces are timed only where the estimate is shown, and only texts that can be cut.
        if not self.missing or not progress.shown:
            return ""
        if isinstance(self.measurement, QuestionMeasurement | ChoicesMeasurement):
            return ""
        ahead = [item.text for name, item in self.inputs.items() if name in self.missing or self.across]
        line = estimate(self.subject, self.measurement, self.config, ahead)
        tokens = max(item.text.ids.shape[1] for item in self.inputs.values())
        size = memory(self.prepared.loaded.model, tokens, together=self.across, chunk=self.request.chunk)
        return line and f"{line}, about {size / 2**30:.1f} GiB"


@dataclass(frozen=True)
class Batch:
    """Inputs that are measured at once.

    Attributes:
        keys: Names of the inputs of each job.
        jobs: The runs that they are measured for; several only where all are of layers.
    """

    jobs: list[Job]
    keys: list[list[str]]

    @property
    def seconds(self) -> float:
        """The time that it will take; 0 if it is not known."""
        return sum(job.seconds / len(job.split()) for job in self.jobs)

    def label(self) -> str:
        """Return what is measured: measurements, model, and which of its inputs."""
        job, keys = self.jobs[0], self.keys[0]
        names, loaded = ", ".join(job.measurement.name for job in self.jobs), job.prepared.loaded
        listed = list(job.inputs)
        first, last, count = listed.index(keys[0]) + 1, listed.index(keys[-1]) + 1, len(listed)
        which = "" if len(keys) == count else f", text {first if first == last else f'{first} to {last}'} of {count}"
        return f"measuring {names} of {loaded.name} ({loaded.weights}){which}"

    def measure(self) -> None:
        """Measure and store; jobs that raise an error end."""
        waiting = [(job, keys) for job, keys in zip(self.jobs, self.keys, strict=True) if not job.ended]
        if not waiting:
            return
        started = time.perf_counter()
        try:
            outcomes = _measured(waiting)
        except WherewhatError as error:
            for job, _ in waiting:
                job.end(error)
            return
        seconds = (time.perf_counter() - started) / len(waiting[0][1])
        for (job, keys), outcome in zip(waiting, outcomes, strict=True):
            try:
                if isinstance(outcome, WherewhatError):
                    raise outcome
                with job.writing():
                    scores = dict(zip([_TOGETHER] if job.across else keys, outcome, strict=True))
                    for key, checked in job.checked({key: scores[key] for key in scores if key in job.missing}):
                        job.save(key, checked, seconds=seconds)
            except WherewhatError as error:
                job.end(error)


def _measured(waiting: Sequence[tuple[Job, list[str]]]) -> list[list[Scores] | WherewhatError]:
    """Return the scores of the inputs of each job, or of all inputs together."""
    job, keys = waiting[0]
    items = [job.inputs[key] for key in keys]
    texts = [item.text for item in items]
    if job.reads_layers:
        wanted = [(cast("Any", job.measurement), job.config) for job, _ in waiting]
        return _unless_too_large(lambda some: measure_pass(job.subject, some, wanted), texts, job)
    measurement, subject, config = job.measurement, job.subject, job.config
    if isinstance(measurement, DocumentsMeasurement):
        return [[as_scores(measurement, measurement.measure(subject, texts, config))]]
    if isinstance(measurement, QuestionMeasurement | ChoicesMeasurement):
        asked: list[Any] = [item.question or item.choices for item in items]
        return [[as_scores(measurement, measurement.measure(subject, question, config)) for question in asked]]
    assert isinstance(measurement, TextMeasurement)
    return _unless_too_large(lambda some: [[*measurement.measure_texts(subject, some, config)]], texts, job)


def _unless_too_large(
    measure: Callable[[Sequence[Text]], list[list[Scores] | WherewhatError]], texts: Sequence[Text], job: Job
) -> list[list[Scores] | WherewhatError]:
    """Measure texts at once, or one after another if memory does not suffice."""
    try:
        return measure(texts)
    except torch.OutOfMemoryError:
        if len(texts) == 1 or job.across:
            raise
    torch.cuda.empty_cache()
    parts = [measure([text]) for text in texts]
    joined: list[list[Scores] | WherewhatError] = []
    for outcomes in zip(*parts, strict=True):
        error = next((outcome for outcome in outcomes if isinstance(outcome, WherewhatError)), None)
        joined.append(error or [scores for outcome in outcomes for scores in cast("list[Scores]", outcome)])
    return joined


def batches_of(jobs: Sequence[Job]) -> list[Batch]:
    """Return the batches of all jobs in order; measurements of layers share those with the same texts."""
    batches: list[Batch] = []
    shared: dict[tuple[Any, ...], Batch] = {}
    for job in jobs:
        for keys in job.split():
            if not job.missing or not (job.across or any(key in job.missing for key in keys)):
                continue
            texts = [job.inputs[key].text for key in keys]
            passes = (job.request.chunk, job.request.offload, *((text.prefix, *text.ids[0].tolist()) for text in texts))
            if not job.reads_layers:
                batches.append(Batch([job], [keys]))
            elif passes in shared and job not in shared[passes].jobs:
                shared[passes].jobs.append(job)
                shared[passes].keys.append(keys)
            else:
                shared[passes] = Batch([job], [keys])
                batches.append(shared[passes])
    return batches


def _keys(measurement: Measurement, names: list[str]) -> list[str]:
    """Return the parts of a run: one per document, and one for all of them, where the measurement has scores there."""
    if isinstance(measurement, DocumentsMeasurement):
        return [_TOGETHER]
    return [*names, _TOGETHER] if defines(measurement, "combine") and len(names) > 1 else names


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
