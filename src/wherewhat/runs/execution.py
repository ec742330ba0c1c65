"""Run requests: load the model, measure each document, store; with control models."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import CaptureError, LoadError, MeasureError, TooLargeError, WherewhatError
from wherewhat.files import JSON
from wherewhat.measures.measurement import Text, find_measurement
from wherewhat.models.loaded import LoadedModel, evaluation
from wherewhat.numerics import new_process_settings, one_thread, weight_dtypes
from wherewhat.options import build_config
from wherewhat.progress import Progress, Silent
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.identity import (
    Controlled,
    KnownRuns,
    inputs_identity,
    loaded_model,
    model_files,
    reused_line,
    run_identity,
)
from wherewhat.runs.jobs import Batch, Job, Prepared, Share, batches_of
from wherewhat.runs.request import DEFAULT_TOKENS, MemoryModel, ModelRequest, Request, model_inputs, read_texts
from wherewhat.runs.subject import ModelSubject, load_model
from wherewhat.text.documents import Document

if TYPE_CHECKING:
    from wherewhat.models.source import Weights


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

        A control model has the tokenizer of the kept model, and its texts, if their files are the same.
        """
        if not self.holds(request):
            source, tokenizer, texts = _source(request), None, dict[tuple[Document, int], Text]()
            if self._loaded is not None and source is not None and source == self._source:
                tokenizer, texts = self._loaded.tokenizer, {**self.texts}
            self.forget()  # first, since memory may not suffice for both
            if say is not None:
                say(f"loading {request.model} ({request.weights})")
            self._loaded = load_model(request, say=say, tokenizer=tokenizer)
            self._request, self._source = request, source
            self.texts |= texts
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
    by_path = {item.directory.path: Job(item, share, each) for item, each in zip(prepared, seconds, strict=True)}
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
        # A GPU leaves little to the CPU: more threads would only wait, and slow down those that launch and hash.
        on_gpu = all(device.startswith("cuda") for device in loaded.device.split("+"))
        threads = one_thread if on_gpu else nullcontext
        batches = batches_of(jobs)
        for batch in progress.track(batches, Batch.label, [batch.seconds for batch in batches]):
            with threads():
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


def _ended(waiting: dict[int, Job]) -> Iterator[tuple[int, RunDirectory | WherewhatError]]:
    """Remove the jobs that ended, and yield their outcomes."""
    for index, job in [*waiting.items()]:
        if job.outcome is not None:
            del waiting[index]
            yield index, job.outcome


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
