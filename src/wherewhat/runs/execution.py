"""Run one request: load the model, measure each document, store; with control models and an estimate of time."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from wherewhat.captures.layer_proofs import layer_kinds
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import CaptureError, LoadError, MeasureError, TextError, TooLargeError, WherewhatError
from wherewhat.files import JSON
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
    find_measurement,
    measure_pass,
    measure_text,
)
from wherewhat.models.loaded import LoadedModel, evaluation
from wherewhat.numerics import computing_on, new_process_settings, weight_dtypes
from wherewhat.options import build_config
from wherewhat.progress import Progress, Silent, counted, duration
from wherewhat.runs.directory import NewPart, Provenance, RunDirectory, model_provenance
from wherewhat.runs.identity import (
    Controlled,
    KnownRuns,
    inputs_identity,
    loaded_model,
    model_files,
    reused_line,
    run_identity,
)
from wherewhat.runs.request import DEFAULT_TOKENS, Input, MemoryModel, ModelRequest, Request, model_inputs, read_texts
from wherewhat.runs.subject import ModelSubject, load_model, memory, texts_at_once
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
        texts: Documents in the tokens of the kept model, by their number.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.texts: dict[tuple[Document, int], Text] = {}
        self._request: ModelRequest | MemoryModel | None = None
        self._loaded: LoadedModel | None = None
        self._source: tuple[ModelRequest, JSON] | None = None
        self._proof: Proof | None = None

    def loaded(self, request: ModelRequest | MemoryModel, *, say: Callable[[str], None] | None = None) -> LoadedModel:
        """Return the model of a request: the kept one, or a newly loaded one.

        A control model has the tokenizer of the kept model if their files are the same.
        """
        if not self.holds(request):
            source, tokenizer = _source(request), None
            if self._loaded is not None and source is not None and source == self._source:
                tokenizer = self._loaded.tokenizer
            self.forget()  # first, since memory may not suffice for both
            if say is not None:
                say(f"loading {request.model} ({request.weights})")
            self._loaded = load_model(request, say=say, tokenizer=tokenizer)
            self._request, self._source = request, source
            self.loads += 1
        assert self._loaded is not None
        return self._loaded

    def holds(self, request: ModelRequest | MemoryModel) -> bool:
        """Return whether the model of a request is the kept one."""
        return self._loaded is not None and request == self._request

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
        model = weakref.ref(self._loaded.model)
        self._request = self._source = self._loaded = self._proof = None
        self.texts.clear()
        if model() is not None:  # a collection, which takes 0.2 s, is needed only for a cycle of references
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _source(request: ModelRequest | MemoryModel) -> tuple[ModelRequest, JSON] | None:
    """Return the request of the trained model and the state of its files; None for a model without files."""
    if not isinstance(request, ModelRequest):
        return None
    try:
        files = model_files(request)["files"]
    except (WherewhatError, OSError):  # which loading explains
        return None
    return dataclasses.replace(request, weights="trained", seed=0), files


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
    (outcome,) = run_together([request], out=out, progress=progress, models=models, again=again)
    if isinstance(outcome, WherewhatError):
        raise outcome
    return outcome


def run_together(
    requests: Sequence[Request],
    *,
    out: Path,
    progress: Progress | None = None,
    models: LastModel | None = None,
    again: bool = False,
    expected: Sequence[float] | None = None,
    ended: Callable[[int, RunDirectory | WherewhatError], None] = lambda _, __: None,
) -> list[RunDirectory | WherewhatError]:
    """Measure requests of one model as :func:`run` does; measurements of layers on the same texts share their passes.

    Args:
        requests: What to measure, all with the same model.
        out: Folder of run directories.
        progress: Progress callback.
        models: Keeps the model for further requests.
        again: Measure anew what is finished.
        expected: Seconds that each request will take; by default they are estimated, and shown.
        ended: Called with the index of each request and its outcome when it ends.

    Returns:
        The finished run of each request, or the error that it raised.
    """
    progress, models, known = progress or Silent(), models or LastModel(), KnownRuns(out)
    outcomes: dict[int, RunDirectory | WherewhatError] = {}
    prepared: dict[int, Prepared] = {}

    def end(index: int, outcome: RunDirectory | WherewhatError) -> None:
        outcomes[index] = outcome
        ended(index, outcome)

    for index, request in enumerate(requests):
        finished = None if again else known.find(request)
        if isinstance(finished, RunDirectory):
            progress.say(reused_line(finished.path, finished.config))
            end(index, finished)
            continue
        try:
            prepared[index] = prepare(request, out=out, progress=progress, models=models)
        except WherewhatError as error:
            end(index, error)
    paths = {index: known.path(requests[index]) for index in prepared}  # before measuring, while files may change

    indices = list(prepared)
    seconds = None if expected is None else [expected[index] for index in indices]
    for position, outcome in measure_together(
        list(prepared.values()), progress=progress, models=models, again=again, expected=seconds
    ):
        index = indices[position]
        if isinstance(outcome, RunDirectory):
            known.write(paths[index], outcome, command=requests[index].command())
        end(index, outcome)
    return [outcomes[index] for index in range(len(requests))]


@new_process_settings()
def prepare(request: Request, *, out: Path, progress: Progress, models: LastModel) -> Prepared:
    """Load the model, read the texts and find the run directory."""
    measurement = find_measurement(request.measurement)
    config = build_config(measurement.config, request.options)
    texts = read_texts(request, measurement)
    loaded = models.loaded(request.model, say=progress.say)
    listed = model_inputs(request, measurement, config, loaded, texts, known=models.texts)
    inputs = {item.document.name: item for item in listed}
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
    ((_, outcome),) = measure_together([prepared], progress=progress, models=models, again=again)
    if isinstance(outcome, WherewhatError):
        raise outcome
    return outcome


def measure_together(
    prepared: Sequence[Prepared],
    *,
    progress: Progress,
    models: LastModel,
    again: bool = False,
    share: Share | None = None,
    expected: Sequence[float] | None = None,
) -> Iterator[tuple[int, RunDirectory | WherewhatError]]:
    """Measure missing parts of several prepared runs of the model that was loaded last, or ``again`` all.

    Texts of one length go through the model in batches, and measurements of layers share the passes over batches that
    they have in common. Which texts are in a batch depends on the run alone, so that an interrupted run, or one whose
    shares different processes measure, gives the same bytes as one that was not.

    Args:
        prepared: The runs.
        progress: Progress callback.
        models: Keeps the model and its proof.
        again: Measure anew what is finished.
        share: Batches to measure, without finishing the runs; None for all. Several processes can measure shares of one
            run, since each holds its lock only while it saves a batch.
        expected: Seconds that each run will take; by default they are estimated, and shown.

    Yields:
        The index of each run when it ends, and its directory, finished unless there is a share, or the error that it
        raised. Its lock is released before.
    """
    # Requests of one run have one job: its directory can be locked only once.
    seconds = expected or [0.0] * len(prepared)
    by_path = {item.directory.path: _Job(item, share, each) for item, each in zip(prepared, seconds, strict=True)}
    waiting = {index: by_path[item.directory.path] for index, item in enumerate(prepared)}
    jobs = list(by_path.values())
    for job in jobs:
        if job.directory.is_complete and not again:
            progress.say(reused_line(job.directory.path, job.directory.config))
            job.end(job.directory)
    jobs = [job for job in jobs if not job.ended]
    yield from _ended(waiting)
    if not jobs:
        return
    loaded = jobs[0].prepared.loaded

    with ExitStack() as stack:
        stack.enter_context(_known_objects_kept())
        # Always in the same order: two processes that wait for each other's locks would wait for ever.
        for job in sorted(jobs, key=lambda job: job.directory.path):
            stack.enter_context(job.held(on_wait=progress.say))
        stack.enter_context(new_process_settings(weight_dtypes(loaded.model)))
        stack.enter_context(evaluation(loaded.model))
        proof = models.proof()
        for job in jobs:
            job.begin(ModelSubject(loaded, proof, chunk=job.request.chunk, offload=job.request.offload), again=again)
            if expected is None:
                progress.say(job.estimate(progress))
        batches = _batches(jobs)
        for batch in progress.track(batches, _Batch.label, [batch.seconds for batch in batches]):
            batch.measure()
            for job in [job for job in batch.jobs if not job.ended and not job.missing]:
                job.finish()
            yield from _ended(waiting)
        for job in jobs:  # those whose parts were all there
            if not job.ended:
                job.finish()
        yield from _ended(waiting)


@contextmanager
def _known_objects_kept() -> Iterator[None]:
    """Leave the objects that exist already, such as the model's, out of garbage collections inside the context.

    A collection would look through hundreds of thousands of objects of packages, which takes as long as a pass.
    """
    if gc.get_freeze_count():  # by the caller, whose objects stay as they are
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _ended(waiting: dict[int, _Job]) -> Iterator[tuple[int, RunDirectory | WherewhatError]]:
    """Remove the jobs that ended, and yield their outcomes."""
    for index, job in [*waiting.items()]:
        if job.outcome is not None:
            del waiting[index]
            yield index, job.outcome


class _Job:
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

    def save(self, key: str, scores: Scores, *, seconds: float) -> None:
        """Check and store the scores of a part."""
        document = None if key == _TOGETHER else key
        alone = document is not None or self.across
        checked = scores.checked(
            declared_metrics(self.measurement, self.config), of=self.measurement.name, controls=alone
        )
        # Scores of all documents together may need what was not stored, such as curves.
        if not checked.names and not (document is None and defines(self.measurement, "combine")):
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
                    self.save(_TOGETHER, scores, seconds=time.perf_counter() - started)
                texts = [item.document for item in self.inputs.values()]
                provenance = _provenance(self.subject, texts, self.request.model.revision)
                self.directory.finish(self._keys, provenance=provenance, parts=self._new)
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
class _Batch:
    """Inputs that are measured at once.

    Attributes:
        keys: Names of the inputs of each job.
        jobs: The runs that they are measured for; several only where all are of layers.
    """

    jobs: list[_Job]
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
                    for key, scores in zip([_TOGETHER] if job.across else keys, outcome, strict=True):
                        if key in job.missing:
                            job.save(key, scores, seconds=seconds)
            except WherewhatError as error:
                job.end(error)


def _measured(waiting: Sequence[tuple[_Job, list[str]]]) -> list[list[Scores] | WherewhatError]:
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
    measure: Callable[[Sequence[Text]], list[list[Scores] | WherewhatError]], texts: Sequence[Text], job: _Job
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


def _batches(jobs: Sequence[_Job]) -> list[_Batch]:
    """Return the batches of all jobs in order; measurements of layers share those with the same texts."""
    batches: list[_Batch] = []
    shared: dict[tuple[Any, ...], _Batch] = {}
    for job in jobs:
        for keys in job.split():
            if not job.missing or not (job.across or any(key in job.missing for key in keys)):
                continue
            texts = [job.inputs[key].text for key in keys]
            passes = (job.request.chunk, job.request.offload, *((text.prefix, *text.ids[0].tolist()) for text in texts))
            if not job.reads_layers:
                batches.append(_Batch([job], [keys]))
            elif passes in shared and job not in shared[passes].jobs:
                shared[passes].jobs.append(job)
                shared[passes].keys.append(keys)
            else:
                shared[passes] = _Batch([job], [keys])
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


def run_with_controls(
    requests: Sequence[Request],
    controls: Iterable[Weights],
    *,
    out: Path,
    progress: Progress | None = None,
    again: bool = False,
) -> list[Controlled]:
    """Measure a model, and as controls the same model with other weights, such as ``("random", "shuffled")``.

    All requests are of one model; measurements of layers on the same texts share their passes.
    """
    models = LastModel()
    runs: list[dict[str, RunDirectory]] = [{} for _ in requests]
    left_out: list[dict[str, str]] = [{} for _ in requests]
    outcomes = run_together(requests, out=out, progress=progress, models=models, again=again)
    for request, outcome, of_request in zip(requests, outcomes, runs, strict=True):
        if isinstance(outcome, WherewhatError):
            raise outcome
        of_request[str(request.model.weights)] = outcome
    for weights in controls:
        others = [request.with_weights(weights) for request in requests]
        control_outcomes = run_controls(others, out=out, progress=progress, models=models, again=again)
        for index, control in enumerate(control_outcomes):
            if isinstance(control, str):
                left_out[index][weights] = control
            else:
                runs[index][weights] = control
    return [Controlled(*pair) for pair in zip(runs, left_out, strict=True)]


def run_controls(
    requests: Sequence[Request],
    *,
    out: Path,
    progress: Progress | None = None,
    models: LastModel | None = None,
    again: bool = False,
    expected: Sequence[float] | None = None,
    ended: Callable[[int, RunDirectory | WherewhatError], None] = lambda _, __: None,
) -> list[RunDirectory | str]:
    """Return the finished runs of one control model, or in one line why there is none.

    Some models have no such control model: quantised weights, for example, cannot be permuted. The reason is stored, so
    that it is not tried again with the same model, options and versions, unless ``again`` is set. Arguments are those
    of :func:`run_together`.
    """
    known = KnownRuns(out)
    outcomes: dict[int, RunDirectory | str] = {}
    for index, request in enumerate(requests):
        reason = None if again else known.find(request)
        if isinstance(reason, str):
            outcomes[index] = reason
    left = [index for index in range(len(requests)) if index not in outcomes]
    paths = {index: known.path(requests[index]) for index in left}
    measured = run_together(
        [requests[index] for index in left],
        out=out,
        progress=progress,
        models=models,
        again=again,
        expected=None if expected is None else [expected[index] for index in left],
        ended=lambda position, outcome: ended(left[position], outcome),
    )
    for index, outcome in zip(left, measured, strict=True):
        if not isinstance(outcome, WherewhatError):
            outcomes[index] = outcome
            continue
        if not isinstance(outcome, LoadError | CaptureError | MeasureError):
            raise outcome
        if not isinstance(outcome, TooLargeError):
            known.write(paths[index], str(outcome), command=requests[index].command())
        outcomes[index] = str(outcome)
    return [outcomes[index] for index in range(len(requests))]
