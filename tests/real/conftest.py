"""Real models: downloaded once per machine, loaded once per worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_models import GEMMA, SMOLLM2, UnavailableError, fetch
from wherewhat.captures.proof import Proof
from wherewhat.models.loaded import LoadedModel
from wherewhat.report.result import Result
from wherewhat.runs.execution import LastModel, load_model, run
from wherewhat.runs.request import ModelRequest, Request


class Kept:
    """The last real model that a test asked for, with its proof and its runs."""

    def __init__(self, out: Path) -> None:
        self._models, self._out = LastModel(), out

    def loaded(self, model: str) -> LoadedModel:
        request = ModelRequest(model=model, device="cpu")
        return self._models.loaded(request, lambda: load_model(request))

    def proof(self, model: str) -> Proof:
        self.loaded(model)
        return self._models.proof()

    def run(self, model: str, measurement: str, *, tokens: int, **options) -> Result:
        """Measure the beginning of the embedded text."""
        request = ModelRequest(model=model, device="cpu")
        wanted = Request(measurement=measurement, model=request, documents=1, tokens=tokens, options=options)
        return Result.load(run(wanted, out=self._out, models=self._models).path)


@pytest.fixture(scope="session")
def kept(tmp_path_factory) -> Kept:
    return Kept(tmp_path_factory.mktemp("real"))


def _fetched(name: str) -> str:
    try:
        return fetch(name)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma() -> str:
    """Path of Gemma-3-270M as a GGUF file; tests of it are skipped where it cannot be downloaded."""
    return _fetched(GEMMA.name)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Name of the embedded model; tests of it are skipped where it is not installed."""
    return _fetched(SMOLLM2)
