"""The runs of a report: its texts, the schedule, and the runs themselves, of which finished ones are found."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from wherewhat.boundary import read_user_file
from wherewhat.caches.plan import Plan
from wherewhat.errors import CaptureError, ConfigError, MeasureError, StoreError, WherewhatError
from wherewhat.files import make_folder, parse_object, write_file
from wherewhat.measures.measurement import Control, measurements
from wherewhat.progress import Work, counted, duration
from wherewhat.report.views import Capacity, ReportRun, view_of
from wherewhat.runs.collection import DRAWN, OtherRun, Runs
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, run_controls, run_together
from wherewhat.runs.identity import KnownRuns, reused_line, unnoticed
from wherewhat.runs.request import MemoryModel, ModelRequest, Request
from wherewhat.runs.results import StoredRun
from wherewhat.text.documents import Document, check_count, read_documents

T = TypeVar("T")

DOCUMENTS, TOKENS = 4, 512
"""Documents and tokens of each by default."""

CONTROL_MODELS: tuple[Control, ...] = ("random", "shuffled")
"""Weights of the control models of a report."""

_FIRST = ("axes", "heads")
_STANDARD_INPUT = "-"


@dataclass(frozen=True)
class GivenText:
    """The texts of a report.

    Attributes:
        sources: Files and folders to read it from; None for the embedded text.
        documents: The documents.
        kept: The file for the content of standard input, and that content; None if it was not given.
        texts: The documents if they are only in memory.
    """

    sources: tuple[str, ...] | None
    documents: list[Document]
    kept: tuple[Path, bytes] | None = None
    texts: tuple[Document, ...] | None = None

    def keep(self) -> None:
        """Write the content of standard input to its file, so that it can be read again."""
        if self.kept is None:
            return
        path, data = self.kept
        if not path.is_file() or path.read_bytes() != data:
            make_folder(path.parent)
            write_file(path, data)


class _RecordedStream:
    """A stream that records what is read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.data = bytearray()

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self.data += chunk
        return chunk

    def isatty(self) -> bool:
        return self._stream.isatty()


def given_text(
    files: Sequence[str] | None,
    *,
    documents: int | None,
    out: Path,
    texts: tuple[Document, ...] | None = None,
    default: int = DOCUMENTS,
) -> GivenText:
    """Read the texts of a report: files, folders or ``-``, documents in memory instead, or the embedded text.

    Without a number of documents, these are the first ``default``. The content of standard input is kept in ``out``.
    """
    if texts is not None:
        if files:
            raise ConfigError("files and texts were both given: give one of them")
        check_count(documents, len(texts))
        chosen = texts[: documents or default]
        return GivenText(None, list(chosen), texts=chosen)
    sources = tuple(files) if files else None
    if sources is None:
        return GivenText(None, read_documents(None, count=documents or default))
    piped = getattr(sys.stdin, "buffer", None) if _STANDARD_INPUT in sources else None
    recorded = None if piped is None else _RecordedStream(piped)
    passages = read_documents(sources, stdin=cast("BinaryIO | None", recorded), count=documents)
    if documents is None:
        passages = passages[:default]
    if recorded is None:
        return GivenText(sources, passages)
    data = bytes(recorded.data)
    # The file has the name of the document, so that the runs are those of `--text -` in other commands.
    path = out / f"stdin-{hashlib.sha256(data).hexdigest()[:12]}" / "stdin.txt"
    return GivenText(tuple(str(path) if s == _STANDARD_INPUT else s for s in sources), passages, (path, data))


@dataclass(frozen=True)
class ScheduledRun:
    """One run of a report, and its cost in tokens of a plain pass."""

    request: Request
    cost: float


def schedule(
    model: ModelRequest | MemoryModel,
    capacity: Capacity,
    *,
    files: Sequence[str] | None = None,
    texts: tuple[Document, ...] | None = None,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
    controls: Sequence[Control] = CONTROL_MODELS,
) -> tuple[list[ScheduledRun], list[str]]:
    """Return the runs of a report, in order, and one line for each measurement that is left out.

    The first run is the decomposition of the model, on all documents and tokens; the others use fewer, except a length
    curve beyond the trained length. Next are the scores of heads, since a page has its map of heads from these two. A
    trained model is measured together with those of its control models that are in ``controls``.
    """
    wanted, left_out = [], []
    for measurement in sorted(measurements().values(), key=lambda measurement: measurement.name not in _FIRST):
        run = view_of(measurement).report_run(capacity, tokens=tokens)
        if run is None:
            continue
        if isinstance(run, str):
            left_out.append(f"{measurement.name}: {run}")
            continue
        run = replace(run, controls=tuple(weights for weights in run.controls if weights in controls))
        count, length = min(run.documents or documents, documents), run_length(run, tokens)
        request = Request(
            measurement=measurement.name,
            model=model,
            files=tuple(files) if files else None,
            texts=texts,
            documents=count,
            tokens=length,
            beyond=run.beyond,
            options=run.options,
        )
        wanted.append((ScheduledRun(request, run.passes * count * length), run))
    return with_controls(wanted), left_out


def run_length(run: ReportRun, tokens: int) -> int:
    """Return the tokens of each document of a run: at most ``tokens``, except beyond the trained length."""
    return run.tokens or tokens if run.beyond else min(run.tokens or tokens, tokens)


def with_controls(wanted: Sequence[tuple[ScheduledRun, ReportRun]]) -> list[ScheduledRun]:
    """Return runs of a model and then, if it is trained, those of its control models."""
    controls = [
        ScheduledRun(item.request.with_weights(weights), item.cost)
        for item, run in wanted
        if item.request.model.weights == "trained"
        for weights in run.controls
    ]
    # Sorted by weights, because a model is kept only until another one is requested.
    return [*(item for item, _ in wanted), *sorted(controls, key=lambda control: str(control.request.model.weights))]


@dataclass(frozen=True)
class Pace:
    """Speed of a model on this machine.

    Attributes:
        start: Seconds to load and prove the model, or a control model.
        token: Seconds per token of a plain pass.
    """

    start: float
    token: float


@dataclass(frozen=True)
class Coming:
    """A run that is not made yet.

    Attributes:
        request: The run.
        seconds: Time until it is made, by the estimate and the time taken so far.
    """

    request: Request
    seconds: float


Partial = Callable[[Callable[[], Runs], list[Coming], int], None]
"""Called when a run ends, with a function that returns the finished runs, the runs to come, and the number of all."""


def measure(
    scheduled: Sequence[ScheduledRun],
    *,
    out: Path,
    pace: Pace,
    work: Work,
    models: LastModel,
    tolerated: tuple[type[WherewhatError], ...] = (MeasureError, CaptureError),
    again: bool = False,
    others: int = 0,
    partial: Partial | None = None,
) -> Runs:
    """Make every scheduled run that is not finished, or ``again`` all of them.

    The first must succeed; others are left out where they raise a ``tolerated`` error, and control models where they
    cannot be made. Measurements of layers on the same texts share their passes.

    Args:
        scheduled: The runs.
        out: Folder of run directories.
        pace: Speed of the model, from which times are estimated.
        work: Progress of the whole.
        models: Keeps the model.
        tolerated: Errors of runs that are left out.
        again: Measure anew what is finished.
        others: Models that are measured afterwards, for which the same time is expected.
        partial: Called when a run ends and others follow, once the first is finished.
    """
    earlier = KnownRuns(out)
    known = {number: None if again else earlier.find(item.request) for number, item in enumerate(scheduled)}
    missing = [number for number, outcome in known.items() if outcome is None]
    groups = _by_model(scheduled, missing)
    expected = {number: scheduled[number].cost * pace.token for number in missing}
    held = [models.holds(scheduled[numbers[0]].request.model) for numbers in groups]
    starts = {numbers[0]: pace.start for numbers, loaded in zip(groups, held, strict=True) if not loaded}
    total = sum(expected.values()) + sum(starts.values())
    work.after = (1 + others) * total
    work.say(_beginning(len(scheduled), len(scheduled) - len(missing), total, others))
    for outcome in known.values():
        if isinstance(outcome, RunDirectory) and unnoticed(outcome.config):
            work.say(reused_line(outcome.path, outcome.config))

    def ended(numbers: Sequence[int], index: int, outcome: RunDirectory | WherewhatError) -> None:
        number, result = numbers[index], "left out"
        if not isinstance(outcome, WherewhatError):
            known[number] = outcome
            result = f"ended after {duration(float(cast('Any', outcome.provenance()['seconds'])))}"
        missing.remove(number)
        request = scheduled[number].request
        place = f"{len(scheduled) - len(missing)} of {len(scheduled)}"
        line = f"{place}: {request.measurement} ({request.model.weights}) {result}"
        work.say("; ".join(filter(None, [line, work.words])))
        if partial is not None and missing and isinstance(known[0], RunDirectory):
            sums = itertools.accumulate(expected[other] + starts.get(other, 0.0) for other in missing)
            coming = [
                Coming(scheduled[other].request, work.until(each)) for other, each in zip(missing, sums, strict=True)
            ]
            partial(lambda: _collected(scheduled, known, earlier), coming, len(scheduled))

    for numbers in groups:
        load = starts.get(numbers[0], 0.0)
        requests = [scheduled[number].request for number in numbers]
        seconds = [expected[number] for number in numbers]
        work.after -= load + sum(seconds)
        model = requests[0].model
        work.begin(f"loading {model.model} ({model.weights})" if load else "reading texts", load, sum(seconds))
        options: dict[str, Any] = {"out": out, "progress": work, "models": models, "again": again}
        options |= {"expected": seconds, "ended": functools.partial(ended, numbers)}
        if model != scheduled[0].request.model:  # run_controls keeps why there is none
            known |= zip(numbers, run_controls(requests, **options), strict=True)
            continue
        for number, request, result in zip(numbers, requests, run_together(requests, **options), strict=True):
            if not isinstance(result, WherewhatError):
                known[number] = result
                continue
            if number == 0 or not isinstance(result, tolerated):
                raise result
            known[number] = str(result)
            earlier.keep(request, str(result))
    return _collected(scheduled, known, earlier)


def _collected(
    scheduled: Sequence[ScheduledRun], known: Mapping[int, RunDirectory | str | None], earlier: KnownRuns
) -> Runs:
    """Return the finished runs, with what else is known of the model in the folder of run directories."""
    runs = Runs()
    for number, item in enumerate(scheduled):
        request, outcome = item.request, known[number]
        if isinstance(outcome, str):
            runs.missing.append((request, outcome))
            runs.left_out.append(f"{request.measurement} ({request.model.weights}): {outcome}")
        elif outcome is not None:
            runs.finished.append((request, StoredRun(outcome)))
    model, missing = scheduled[0].request.model, [item.request for n, item in enumerate(scheduled) if known[n] is None]
    to_come = {request.measurement for request in missing if request.model == model}
    runs.others.extend(other for other in other_runs(runs, earlier) if other.name not in to_come)
    weights_hash = str(runs.first[1].directory.config["weights_hash"])
    runs.plans.extend(_plans(earlier.out, weights_hash))
    runs.claims.extend(_claims(earlier.out, weights_hash))
    return runs


def other_runs(runs: Runs, known: KnownRuns) -> list[OtherRun]:
    """Return finished runs of the same model and weights that have no part of the page yet, without measuring.

    A measurement is shown by its run on the most documents: of several by the report's own, else by the newest.
    """
    _, first = runs.first
    same = {name: first.directory.config[name] for name in ("weights", "weights_hash", "tokenizer_hash")}
    # A control model is known by the hash that it has in the report, since another model may have the same name.
    controls = {run.directory.config["weights"]: run.directory.config["weights_hash"] for _, run in runs.finished}
    finished = known.finished()
    documents = {path: len(cast("list[Any]", config["documents"])) for path, config in finished}
    paths: dict[str, list[Path]] = {}
    for path, config in finished:
        if same.items() <= config.items():
            paths.setdefault(str(config["measurement"]), []).append(path)
    others = []
    for name in measurements():
        own = runs.weights(name)
        if name not in paths or (name in DRAWN and runs.own in own):
            continue
        # Sorting is stable: of as many documents, the report's own run is the first, then the newest.
        first_paths = [own[runs.own].directory.path] if runs.own in own else []
        listed = [*first_paths, *(path for path in paths[name] if path not in first_paths)]
        shown = _newest(sorted(listed, key=lambda path: -documents.get(path, 0)), runs.own)
        if not shown:
            continue
        if shown[runs.own].directory.path in first_paths:
            shown = own
        settings = shown[runs.own].directory.config
        # The report's own runs have the control models of the schedule, whatever else is in the folder.
        for weights, weights_hash in () if shown is own else controls.items():
            wanted = {**settings, "weights": weights, "weights_hash": weights_hash}
            matching = [path for path, other in finished if other == wanted and weights not in shown]
            shown |= _newest(matching, str(weights))
        others.append(OtherRun(shown, len(paths[name]) - 1, known.command(shown[runs.own].directory)))
    return others


def _newest(paths: Sequence[Path], weights: str) -> dict[str, StoredRun]:
    """Return the first run that is not damaged, under its weights; none if all are."""
    for path in paths:
        with suppress(StoreError):
            return {weights: StoredRun(RunDirectory.load(path))}
    return {}


def _plans(out: Path, weights_hash: str) -> list[Plan]:
    """Return the readable plans of a model with these weights in a folder, newest first."""
    plans = _readable(out, "plan-*.json", Plan.load)
    return [plan for plan in plans if plan.provenance.get("weights_hash") == weights_hash]


def _claims(out: Path, weights_hash: str) -> list[dict[str, Any]]:
    """Return the contents of the files of judged claims of a model with these weights in a folder, newest first."""
    contents = _readable(out, "claims-*.json", lambda file: parse_object(read_user_file(file, name="the claims")) or {})
    same = [dict(content) for content in contents if content.get("weights_hash") == weights_hash]
    return [content for content in same if isinstance(content.get("claims"), list)]


def _readable(out: Path, pattern: str, read: Callable[[Path], T]) -> list[T]:
    """Return the contents of the files in a folder that can be read, newest first."""
    contents = []
    for file in sorted(out.glob(pattern), key=lambda file: (-file.stat().st_mtime_ns, file.name)):
        with suppress(ConfigError):
            contents.append(read(file))
    return contents


def _beginning(count: int, finished: int, seconds: float, others: int) -> str:
    if finished == count:
        return f"all {count} measurements were finished earlier"
    earlier = f", {finished} of them finished earlier" if finished else ""
    more = f", and {duration(others * seconds)} for {counted(others, 'other model')} if they take as long" * (
        others > 0
    )
    return (
        f"{count} measurements{earlier}: about {duration(seconds)}{more}; estimated from the time of one pass of the "
        "model and the number of passes of each measurement"
    )


def _by_model(scheduled: Sequence[ScheduledRun], numbers: Sequence[int]) -> list[list[int]]:
    """Return consecutive runs of one model together."""
    models = [scheduled[number].request.model for number in numbers]
    starts = [i for i, model in enumerate(models) if i == 0 or model != models[i - 1]]
    return [list(numbers[i:j]) for i, j in itertools.pairwise([*starts, len(numbers)])]
