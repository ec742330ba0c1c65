"""End-to-end: a control that cannot be made is named with its reason, and everything else is delivered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import wherewhat.models.loader
from wherewhat.errors import LoadError, TooLargeError
from wherewhat.models.controls import shuffle_query_key
from wherewhat.report.report import make_report
from wherewhat.runs.execution import run_controls, run_with_controls
from wherewhat.runs.identity import KnownRuns
from wherewhat.runs.request import ModelRequest, Request

REASON = "cannot shuffle model.layers.0.self_attn: its weights are quantised or offloaded; load it without either"


@pytest.fixture(autouse=True)
def quantised(monkeypatch):
    """Models whose queries are whole numbers, as those of a quantised model are, when they are to be shuffled."""

    def shuffle(model, *, seed):
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.uint8), requires_grad=False)
        shuffle_query_key(model, seed=seed)

    monkeypatch.setattr(wherewhat.models.loader, "shuffle_query_key", shuffle)


def test_a_measuring_command_goes_on_without_a_control_but_not_without_the_model(cli, model, text):
    shown = cli("axes", model, "--text", text, "--tokens", 24)
    assert shown.code == 0, shown.err
    assert "Traceback" not in shown.err
    assert f"No shuffled control: {REASON}" in " ".join(shown.out.split())
    weights = [json.loads((Path(line) / "config.json").read_text())["weights"] for line in shown.out.splitlines()[-2:]]
    assert weights == ["trained", "random"]
    shown = cli("axes", model, "--text", text, "--tokens", 24, "--weights", "shuffled")
    assert (shown.code, shown.out) == (2, "")
    assert REASON in shown.err


def test_report_command(cli, model, text):
    given = ("--text", text, "--tokens", 24, "--device", "cpu")
    shown = cli("report", model, *given)
    assert shown.code == 0, shown.err
    assert f"left out of tiny: axes (shuffled): {REASON}" in " ".join(shown.out.split())
    page = Path(shown.out.splitlines()[-1]).read_text("utf-8")
    assert f"axes (shuffled): {REASON}" in page


def test_python(model, text, tmp_path):
    request = Request(measurement="axes", model=ModelRequest(model=model), files=(str(text),), tokens=24)
    made = run_with_controls([request], ("random", "shuffled"), out=tmp_path)[0]
    assert list(made.runs) == ["trained", "random"]
    assert made.left_out == {"shuffled": REASON}
    with pytest.raises(LoadError, match="quantised"):
        run_with_controls([request.with_weights("shuffled")], ("random",), out=tmp_path)


def refuse_to_load(*_, **__):
    raise AssertionError("the model is not needed")


def test_a_control_that_cannot_be_made_is_not_tried_again(model, text, tmp_path, monkeypatch):
    request = Request(measurement="axes", model=ModelRequest(model=model), files=(str(text),), tokens=24)
    made = run_with_controls([request], ("random", "shuffled"), out=tmp_path)[0]
    monkeypatch.setattr("wherewhat.runs.execution.load_model", refuse_to_load)
    again = run_with_controls([request], ("random", "shuffled"), out=tmp_path)[0]
    known = KnownRuns(tmp_path).find_all(request, ("random", "shuffled"))
    for other in (again, known):
        assert other.left_out == made.left_out == {"shuffled": REASON}
        assert {name: run.path for name, run in other.runs.items()} == {name: x.path for name, x in made.runs.items()}


def test_a_control_that_was_too_large_is_tried_again(model, text, tmp_path, monkeypatch):
    def too_large(*_, **__):
        raise TooLargeError("more than main memory")

    request = Request(measurement="axes", model=ModelRequest(model=model), files=(str(text),), tokens=24)
    with monkeypatch.context() as patch:
        patch.setattr("wherewhat.runs.execution.load_model", too_large)
        assert run_controls([request.with_weights("random")], out=tmp_path)[0] == "more than main memory"
    assert not isinstance(run_controls([request.with_weights("random")], out=tmp_path)[0], str)


@pytest.mark.slow
def test_report_in_python_keeps_the_reason(model, text, tmp_path, monkeypatch):
    def made():
        return make_report(ModelRequest(model=model, device="cpu"), out=tmp_path, files=[str(text)], tokens=24)

    first = made()
    assert f"axes (shuffled): {REASON}" in first.data["models"][0]["left_out"]
    monkeypatch.setattr(wherewhat.models.loader, "shuffle_query_key", shuffle_query_key)
    assert made().data["models"][0]["left_out"] == first.data["models"][0]["left_out"]
