"""Runs everything a report is made of; what is finished already is found and not computed again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wherewhat.errors import MeasureError
from wherewhat.pipeline.estimate import duration
from wherewhat.pipeline.progress import Progress
from wherewhat.pipeline.request import Request
from wherewhat.pipeline.running import run
from wherewhat.report.plan import Planned
from wherewhat.store import RunDirectory


@dataclass(frozen=True)
class Runs:
    """Finished runs of one report.

    Attributes:
        finished: Request and run directory of each.
        left_out: One line for each measurement that the model does not allow, such as planes without rotation.
    """

    finished: list[tuple[Request, RunDirectory]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def first(self) -> tuple[Request, RunDirectory]:
        """The decomposition of the trained model."""
        return self.finished[0]

    def find(self, measurement: str, weights: str = "trained") -> RunDirectory | None:
        """The run of a measurement on the model or one of its twins, if there is one."""
        wanted = (measurement, weights)
        return next((run for r, run in self.finished if (r.measurement, r.model.weights) == wanted), None)

    def weights(self, measurement: str) -> list[str]:
        """What a measurement was made on: the model, then its twins."""
        return [r.model.weights for r, _ in self.finished if r.measurement == measurement]


def measure(planned: Sequence[Planned], *, out: Path, progress: Progress) -> Runs:
    """Make every run of a plan.

    Args:
        planned: The runs; the first must succeed, others are left out where the model has no such thing.
        out: Folder that holds run directories.
        progress: Where to tell how far it is and how much time is left.

    Raises:
        WherewhatError: If the first run fails, or another for a reason other than what the model is.
    """
    runs = Runs()
    progress.say(f"{len(planned)} measurements; those finished earlier are not repeated")
    left = sum(item.cost for item in planned)
    spent = done = 0.0
    for number, item in enumerate(planned, 1):
        request = item.request
        progress.say(f"{number} of {len(planned)}: {request.measurement} ({request.model.weights})")
        before = time.perf_counter()
        try:
            runs.finished.append((request, run(request, out=out, progress=progress)))
        except MeasureError as error:
            if not runs.finished:
                raise
            runs.left_out.append(f"{request.measurement} ({request.model.weights}): {error}")
        left -= item.cost
        spent, done = spent + time.perf_counter() - before, done + item.cost
        if left > 0:
            progress.say(f"about {duration(spent / done * left)} left")
    return runs
