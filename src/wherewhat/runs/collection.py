"""Finished runs of one model and its control models, found by measurement and weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wherewhat.caches.plan import Plan
from wherewhat.models.source import Weights
from wherewhat.runs.request import Request
from wherewhat.runs.results import StoredRun

DRAWN = ("axes", "heads", "planes", "distance", "frequencies", "perturb", "extend")
"""Measurements with their own parts of the page."""


@dataclass(frozen=True)
class OtherRun:
    """A finished run of a measurement without its own part of the page.

    Attributes:
        runs: Its runs by weights: the model, then the control models that were measured with the same options.
        more: Number of further finished runs of the same measurement and model, with other options or texts.
        command: The command that made it; None if it is not known.
    """

    runs: dict[str, StoredRun]
    more: int
    command: str | None

    @property
    def name(self) -> str:
        """Name of the measurement."""
        return next(iter(self.runs.values())).measurement.name


@dataclass(frozen=True)
class Runs:
    """Finished runs of one model's report.

    Attributes:
        finished: Request and run of each.
        left_out: One line for each measurement that the model does not allow, such as planes without rotation, and
            for each control model that cannot be made.
        others: Finished runs of measurements without their own part of the page.
        plans: Plans of the model in the folder of run directories, newest first.
        claims: Contents of the files of judged claims of the model there, newest first.
        missing: Request and reason of each run that could not be made.
    """

    finished: list[tuple[Request, StoredRun]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: list[OtherRun] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    missing: list[tuple[Request, str]] = field(default_factory=list)

    @property
    def shown(self) -> list[StoredRun]:
        """Every run that the page shows, each once."""
        others = [run for other in self.others for run in other.runs.values()]
        return list({run.directory.path: run for run in [*(run for _, run in self.finished), *others]}.values())

    @property
    def first(self) -> tuple[Request, StoredRun]:
        """The decomposition of the model itself."""
        return self.finished[0]

    @property
    def own(self) -> str:
        """The weights the report is about; others are control models."""
        return self.first[0].model.weights

    @property
    def of_model(self) -> list[tuple[Request, StoredRun]]:
        """Request and run of each measurement on the model itself."""
        return [(request, run) for request, run in self.finished if request.model.weights == self.own]

    def find(self, measurement: str, weights: Weights | None = None) -> StoredRun | None:
        """Return the run of a measurement on the model itself, or on a control model; None if it is missing.

        A measurement with its own part of the page has the run that is shown there, and no other.
        """
        if weights == self.own:
            return None  # a model is no control of itself
        wanted = (measurement, weights or self.own)
        runs = (run for request, run in self.finished if (request.measurement, request.model.weights) == wanted)
        return next(runs, None if measurement in DRAWN else self.other(measurement, weights))

    def run(self, measurement: str, weights: Weights | None = None) -> StoredRun:
        """Return the run that :meth:`find` returns, which must exist."""
        run = self.find(measurement, weights)
        assert run is not None, measurement
        return run

    def request(self, measurement: str) -> tuple[Request, StoredRun] | None:
        """Return request and run of a measurement on the model itself, if there is one."""
        return next((pair for pair in self.of_model if pair[0].measurement == measurement), None)

    def other(self, measurement: str, weights: str | None = None) -> StoredRun | None:
        """Return the run of a measurement without its own part of the page, on the model itself by default."""
        runs = next((other.runs for other in self.others if other.name == measurement), {})
        return runs.get(weights or self.own)

    def weights(self, measurement: str) -> dict[str, StoredRun]:
        """Return the runs of a measurement by weights: the model, then its control models."""
        return {r.model.weights: run for r, run in self.finished if r.measurement == measurement}
