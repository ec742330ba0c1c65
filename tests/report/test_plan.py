"""End-to-end: what a report runs, and that it goes on where it was interrupted."""

from __future__ import annotations

import pytest

from report.conftest import TOKENS
from wherewhat.errors import MeasureError
from wherewhat.pipeline.progress import Silent
from wherewhat.pipeline.request import ModelRequest
from wherewhat.report import measuring
from wherewhat.report.plan import plan


def sizes(planned):
    return [(p.request.measurement, p.request.model.weights, p.request.documents, p.request.tokens) for p in planned]


def test_sizes_by_default():
    assert sizes(plan(ModelRequest())) == [
        ("axes", "trained", 4, 512),
        ("axes", "random", 4, 512),
        ("axes", "shuffled", 4, 512),
        ("heads", "trained", 4, 256),
        ("heads", "random", 4, 256),
        ("planes", "trained", 1, 256),
        ("distance", "trained", 1, 256),
    ]


def test_fewer_when_there_is_less(made):
    planned = plan(ModelRequest(), text=[str(made.text)], tokens=TOKENS)
    assert {(documents, tokens) for _, _, documents, tokens in sizes(planned)} == {(2, TOKENS), (1, TOKENS)}
    assert sizes(plan(ModelRequest(), documents=9, tokens=1024))[0] == ("axes", "trained", 9, 1024)


class Told(Silent):
    """Keeps what is told."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_an_interrupted_report_goes_on(made, model, tmp_path, monkeypatch):
    planned = plan(ModelRequest(model=model, device="cpu"), text=[str(made.text)], tokens=TOKENS)
    real, calls = measuring.run, []

    def interrupted(request, **options):
        calls.append(request)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(request, **options)

    monkeypatch.setattr(measuring, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(planned, out=tmp_path, progress=Silent())
    monkeypatch.setattr(measuring, "run", real)
    told = Told()
    runs = measuring.measure(planned, out=tmp_path, progress=told)
    assert sum(line.startswith("already measured") for line in told.lines) == 2
    assert sum(line.endswith(" left") for line in told.lines) == len(planned) - 1
    for _, directory in runs.finished:
        whole = made.out / directory.path.name / "scores.parquet"
        assert (directory.path / "scores.parquet").read_bytes() == whole.read_bytes()


def test_the_first_measurement_must_succeed(made, model, tmp_path, monkeypatch):
    def refuse(request, **options):
        raise MeasureError("no such thing")

    monkeypatch.setattr(measuring, "run", refuse)
    planned = plan(ModelRequest(model=model), text=[str(made.text)], tokens=TOKENS)
    with pytest.raises(MeasureError):
        measuring.measure(planned, out=tmp_path, progress=Silent())
