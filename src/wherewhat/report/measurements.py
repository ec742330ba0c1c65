"""The runs of a report: those that are finished are found, the others are made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wherewhat.errors import MeasureError
from wherewhat.progress import Progress
from wherewhat.report.plan import Planned
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, duration, run, run_control
from wherewhat.runs.known import KnownRuns
from wherewhat.runs.request import Request
from wherewhat.runs.results import StoredRun


@dataclass(frozen=True)
class Runs:
    """Finished runs of one model's report.

    Attributes:
        finished: Request and run of each.
        left_out: One line for each measurement that the model does not allow, such as planes without rotation, and
            for each control model that cannot be made.
    """

    finished: list[tuple[Request, StoredRun]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def first(self) -> tuple[Request, StoredRun]:
        """The decomposition of the model itself."""
        return self.finished[0]

    @property
    def own(self) -> str:
        """The weights the report is about; others are control models."""
        return self.first[0].model.weights

    def find(self, measurement: str) -> StoredRun | None:
        """Return the run of a measurement on the model itself, if there is one."""
        found = self.request(measurement)
        return None if found is None else found[1]

    def request(self, measurement: str) -> tuple[Request, StoredRun] | None:
        """Return request and run of a measurement on the model itself, if there is one."""
        wanted = (measurement, self.own)
        return next(((r, run) for r, run in self.finished if (r.measurement, r.model.weights) == wanted), None)

    def weights(self, measurement: str) -> dict[str, StoredRun]:
        """Return the runs of a measurement by weights: the model, then its control models."""
        return {r.model.weights: run for r, run in self.finished if r.measurement == measurement}


@dataclass(frozen=True)
class Pace:
    """Speed of a model on this machine.

    Attributes:
        start: Seconds to load and prove the model, or a control model.
        token: Seconds per token of a plain pass.
    """

    start: float
    token: float

    def seconds(self, planned: Sequence[Planned]) -> list[float]:
        """Return the expected time of each run in sequence; consecutive runs with the same weights load them once."""
        loaded, found = None, []
        for item in planned:
            weights = item.request.model.weights
            found.append(item.cost * self.token + (0.0 if weights == loaded else self.start))
            loaded = weights
        return found


def measure(planned: Sequence[Planned], *, out: Path, pace: Pace, progress: Progress, models: LastModel) -> Runs:
    """Make every run of a plan that is not finished.

    Args:
        planned: The runs; the first must succeed, others are left out where the model cannot be measured so, and
            control models where they cannot be made.
        out: Folder of run directories.
        pace: Expected speed, for the first estimate; later estimates use the time taken so far.
        progress: Progress callback.
        models: Keeps a model from one run to the next.
    """
    runs, earlier = Runs(), KnownRuns(out)
    known = {number: earlier.find(item.request) for number, item in enumerate(planned)}
    missing = [number for number, outcome in known.items() if outcome is None]
    expected = dict(zip(missing, pace.seconds([planned[number] for number in missing]), strict=True))
    left = sum(expected.values())
    progress.say(_beginning(len(planned), len(planned) - len(missing), left))
    spent = done = 0.0
    for number, item in enumerate(planned):
        request, outcome = item.request, known[number]
        if outcome is None:
            progress.say(f"{number + 1} of {len(planned)}: {request.measurement} ({request.model.weights})")
            before = time.perf_counter()
            outcome = _outcome(request, out, progress, models, first=planned[0].request)
            # A control model may succeed the next time, such as with more memory.
            if isinstance(outcome, str) and request.model == planned[0].request.model:
                earlier.keep(request, outcome)
            left -= expected[number]
            spent, done = spent + time.perf_counter() - before, done + expected[number]
            if left > 0.5:
                progress.say(f"about {duration(spent / done * left)} left")
        if isinstance(outcome, str):
            runs.left_out.append(f"{request.measurement} ({request.model.weights}): {outcome}")
        else:
            runs.finished.append((request, StoredRun(outcome)))
    return runs


def _beginning(count: int, finished: int, seconds: float) -> str:
    if finished == count:
        return f"all {count} measurements were finished earlier"
    earlier = f", {finished} of them finished earlier" if finished else ""
    return (
        f"{count} measurements{earlier}: about {duration(seconds)}, estimated from the time of one pass of the model "
        "and the number of passes of each measurement"
    )


def _outcome(
    request: Request, out: Path, progress: Progress, models: LastModel, *, first: Request
) -> RunDirectory | str:
    """Return the finished run, or why the model has none."""
    if request.model != first.model:
        return run_control(request, out=out, progress=progress, models=models)
    try:
        return run(request, out=out, progress=progress, models=models)
    except MeasureError as error:
        if request == first:
            raise
        return str(error)
