"""Runs everything a report is made of; what is finished already is found and not computed again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wherewhat.errors import MeasureError
from wherewhat.progress import Progress
from wherewhat.report.notes import Notes
from wherewhat.report.plan import Planned
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, duration, run, run_control
from wherewhat.runs.request import Request
from wherewhat.runs.results import StoredRun


@dataclass(frozen=True)
class Runs:
    """Finished runs of one model's report.

    Attributes:
        finished: Request and run of each.
        left_out: One line for each measurement that the model does not allow, such as planes without rotation, and
            for each control that cannot be made.
    """

    finished: list[tuple[Request, StoredRun]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def first(self) -> tuple[Request, StoredRun]:
        """The decomposition of the model itself."""
        return self.finished[0]

    @property
    def own(self) -> str:
        """The weights the report is about; others are controls."""
        return self.first[0].model.weights

    def find(self, measurement: str) -> StoredRun | None:
        """The run of a measurement on the model itself, if there is one."""
        found = self.request(measurement)
        return None if found is None else found[1]

    def request(self, measurement: str) -> tuple[Request, StoredRun] | None:
        """What was asked for and its run, on the model itself."""
        wanted = (measurement, self.own)
        return next(((r, run) for r, run in self.finished if (r.measurement, r.model.weights) == wanted), None)

    def weights(self, measurement: str) -> dict[str, StoredRun]:
        """Runs of a measurement by weights: the model, then its control models."""
        return {r.model.weights: run for r, run in self.finished if r.measurement == measurement}


@dataclass(frozen=True)
class Pace:
    """How fast a machine is with a model.

    Attributes:
        start: Seconds to load and prove it, or a control model.
        token: Seconds that a plain pass takes for each token.
    """

    start: float
    token: float

    def seconds(self, planned: Sequence[Planned]) -> list[float]:
        """Time that each of some runs will take, one after the other; those of the same weights load them once."""
        loaded, found = None, []
        for item in planned:
            weights = item.request.model.weights
            found.append(item.cost * self.token + (0.0 if weights == loaded else self.start))
            loaded = weights
        return found


def measure(planned: Sequence[Planned], *, notes: Notes, pace: Pace, progress: Progress, models: LastModel) -> Runs:
    """Make every run of a plan that is not finished.

    Args:
        planned: The runs; the first must succeed, others are left out where the model has no such thing, and controls
            where they cannot be made.
        notes: What is known of the model, and the folder that holds run directories.
        pace: How fast the machine is, for an estimate before it starts; later the time that was really taken counts.
        progress: Where to tell how far it is and how much time is left.
        models: Keeps a model from one run to the next.
    """
    runs = Runs()
    known = {number: notes.finished(item.request) for number, item in enumerate(planned)}
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
            outcome = _outcome(request, notes.out, progress, models, first=planned[0].request)
            # What hinders a control, such as too little memory, may be gone the next time.
            if not isinstance(outcome, str) or request.model == planned[0].request.model:
                notes.keep(request, outcome)
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
        f"{count} measurements{earlier}: about {duration(seconds)}, judged by the time of one pass of the model and "
        "how many passes each measurement is worth"
    )


def _outcome(
    request: Request, out: Path, progress: Progress, models: LastModel, *, first: Request
) -> RunDirectory | str:
    """The finished run, or why the model has none."""
    if request.model != first.model:
        return run_control(request, out=out, progress=progress, models=models)
    try:
        return run(request, out=out, progress=progress, models=models)
    except MeasureError as error:
        if request == first:
            raise
        return str(error)
