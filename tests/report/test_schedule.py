"""End-to-end: what a report runs, and that it goes on where it was interrupted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from helpers.report import TOKENS
from wherewhat.errors import MeasureError
from wherewhat.progress import Silent
from wherewhat.report import measurements as measuring
from wherewhat.report.measurements import schedule
from wherewhat.report.report import make_report
from wherewhat.report.views import Capacity
from wherewhat.runs import execution as controls
from wherewhat.runs import jobs
from wherewhat.runs.request import ModelRequest

CAPACITY = Capacity(trained=8192, hard_limit=False, planes=32, shortest=2000)


def sizes(scheduled):
    return [(p.request.measurement, p.request.model.weights, p.request.documents, p.request.tokens) for p in scheduled]


def test_sizes_by_default():
    assert sizes(schedule(ModelRequest(), CAPACITY)[0]) == [
        ("axes", "trained", 4, 512),
        ("heads", "trained", 4, 256),
        ("distance", "trained", 1, 256),
        ("planes", "trained", 1, 256),
        ("residual", "trained", 1, 256),
        ("frequencies", "trained", 3, 128),
        ("perturb", "trained", 3, 256),
        ("axes", "random", 4, 512),
        ("heads", "random", 4, 256),
        ("axes", "shuffled", 4, 512),
    ]


def test_fewer_when_there_is_less_and_no_controls_of_a_control():
    scheduled, _ = schedule(ModelRequest(), CAPACITY, documents=2, tokens=TOKENS)
    assert {(documents, tokens) for _, _, documents, tokens in sizes(scheduled)} == {(2, TOKENS), (1, TOKENS)}
    assert sizes(schedule(ModelRequest(), CAPACITY, documents=9, tokens=1024)[0])[0] == ("axes", "trained", 9, 1024)
    assert {one[1] for one in sizes(schedule(ModelRequest(weights="random"), CAPACITY)[0])} == {"random"}


def test_lengths_are_beyond_the_trained_one_or_left_out_with_a_reason():
    for changes, tokens, methods in (
        ({"trained": 256}, 1024, ["none", "sliding-window", "streaming-llm", "lm-infinite", "yarn"]),
        ({"trained": 256, "shortest": 700}, 700, None),
        ({"trained": 256, "planes": 0}, 1024, ["none", "sliding-window"]),
    ):
        scheduled, left_out = schedule(ModelRequest(), replace(CAPACITY, **changes))
        request = next(p.request for p in scheduled if p.request.measurement == "extend")
        assert (request.tokens, request.beyond, left_out) == (tokens, True, []), changes
        assert methods is None or list(request.options["methods"]) == methods, changes
    for changes, reason in (
        ({}, "extend: the page's texts are too short to show what happens beyond the trained length of 8192 tokens"),
        ({"trained": None}, "extend: the model does not state its trained length"),
        ({"trained": 256, "hard_limit": True}, "extend: the model accepts no more than 256 tokens"),
    ):
        scheduled, left_out = schedule(ModelRequest(), replace(CAPACITY, **changes))
        assert "extend" not in [item.request.measurement for item in scheduled], changes
        assert [line.startswith(reason) for line in left_out] == [True], changes


class Told(Silent):
    """Keeps what is told."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.slow  # test_killed.py kills a report once
def test_an_interrupted_report_goes_on(made, hostile_model, tmp_path, monkeypatch):
    request = ModelRequest(model=hostile_model, device="cpu")
    real, calls = jobs._measured, []

    def interrupted(waiting):
        calls.append(waiting)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(waiting)

    monkeypatch.setattr(jobs, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_report(request, out=tmp_path, files=[str(made.text)], tokens=TOKENS)
    told = Told()
    again = make_report(request, out=tmp_path, files=[str(made.text)], tokens=TOKENS, progress=told)
    earlier = sum(len(waiting) for waiting in calls[:2])
    assert any(line.startswith(f"11 measurements, {earlier} of them finished earlier: about ") for line in told.lines)
    assert sum(len(waiting) for waiting in calls[3:]) == 11 - earlier
    for run in again.data["models"][0]["runs"]:
        assert (tmp_path / run["name"] / "scores.parquet").read_bytes() == (
            made.out / run["name"] / "scores.parquet"
        ).read_bytes()


def test_a_finished_report_is_made_again_without_the_model(made, hostile_model, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing is to be loaded or measured")

    monkeypatch.setattr(controls, "load_model", refuse)
    monkeypatch.setattr(measuring, "run_together", refuse)
    monkeypatch.setattr(controls, "run_together", refuse)
    told = Told()
    request = ModelRequest(model=hostile_model, device="cpu")
    again = make_report(request, out=made.out, files=[str(made.text)], tokens=TOKENS, progress=told)
    assert again.html() == made.report.html()
    assert "all 11 measurements were finished earlier" in told.lines


def test_the_first_measurement_must_succeed(made, hostile_model, tmp_path, monkeypatch):
    def refuse(requests, **options):
        return [MeasureError("no such thing") for _ in requests]

    monkeypatch.setattr(measuring, "run_together", refuse)
    with pytest.raises(MeasureError):
        make_report(ModelRequest(model=hostile_model), out=tmp_path, files=[str(made.text)], tokens=TOKENS)


def test_models_are_loaded_once_for_each_weights():
    """Runs of the same weights follow each other, so that the last model is the next one's."""
    weights = [weights for _, weights, _, _ in sizes(schedule(ModelRequest(), CAPACITY)[0])]
    assert sum(one != other for one, other in itertools.pairwise(weights)) == 2


def test_controls_are_chosen():
    for chosen in ((), ("random",), ("shuffled",)):
        scheduled, _ = schedule(ModelRequest(), CAPACITY, controls=chosen)
        assert {weights for _, weights, _, _ in sizes(scheduled)} == {"trained", *chosen}
