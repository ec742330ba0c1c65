"""Trained models, loaded once per test process."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from wherewhat.captures.proof import Proof
from wherewhat.models.loaded import LoadedModel
from wherewhat.report.result import Result
from wherewhat.runs.execution import LastModel, load_model, run
from wherewhat.runs.request import ModelRequest, Request


class Kept:
    """The trained models that tests asked for, with their proofs and runs."""

    def __init__(self, out: Path) -> None:
        self._models: defaultdict[str, LastModel] = defaultdict(LastModel)
        self._out = out

    def loaded(self, model: str) -> LoadedModel:
        request = ModelRequest(model=model, device="cpu")
        return self._models[model].loaded(request, lambda: load_model(request))

    def proof(self, model: str) -> Proof:
        self.loaded(model)
        return self._models[model].proof()

    def run(self, model: str, measurement: str, *, tokens: int, **options) -> Result:
        """Measure the beginning of the embedded text."""
        request = ModelRequest(model=model, device="cpu")
        wanted = Request(measurement=measurement, model=request, documents=1, tokens=tokens, options=options)
        return Result.load(run(wanted, out=self._out, models=self._models[model]).path)
