"""End-to-end: several models, or a model and its control model, on one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from helpers.report import TOKENS
from wherewhat.cli.report import _numbers_table
from wherewhat.report.page import Profiled


@pytest.mark.slow
def test_each_model_is_what_it_is_alone(beside, made):
    report, _ = beside
    assert report.data["models"][0] == made.report.data["models"][0]
    names = [one["model"]["name"] for one in report.data["models"]]
    assert names == ["<b onclick=alert(3)>tiny", "<b onclick=alert(3)>tiny (random)", "other"]
    assert [len(one["records"]) for one in report.data["models"]] == [2, 2, 3]


def test_a_control_model_is_its_models_control(beside):
    """The random control model's own numbers are those shown beside the trained model's."""
    trained, random, _ = beside[0].data["models"]
    r = [next(m for m in one["metrics"] if m["id"] == "r") for one in (trained, random)]
    assert set(r[1]["values"]) == {"random"}
    assert r[0]["values"]["random"] == r[1]["values"]["random"]
    control = next(value for value in trained["numbers"][0]["controls"] if value["name"] == "one random control")
    assert control["mean"] == random["numbers"][0]["values"][0]["mean"]
    assert "one random control" not in [value["name"] for value in random["numbers"][0]["controls"]]


@pytest.mark.slow
def test_command_with_several_models(cli, made, hostile_model, beside):
    del beside  # what it measured is there already
    given = ("--text", made.text, "--tokens", TOKENS, "--out", made.out, "--device", "cpu")
    outcome = cli("report", hostile_model, "--weights", "trained", "--weights", "random", *given)
    assert outcome.code == 0, outcome.err
    path = outcome.out.splitlines()[-1]
    data = json.loads(Path(path).read_text("utf-8").split('id="data">')[1].split("</script>")[0])
    assert [one["model"]["weights"] for one in data["models"]] == ["trained", "random"]
    assert "--weights trained --weights random" in data["command"]


def test_names_in_the_terminal_are_no_markup(capsys):
    names = ["tiny[v2]", "tiny[/b]", r"tiny\[i]"]
    Console(width=200).print(_numbers_table([Profiled(name, [], []) for name in names]))
    shown = capsys.readouterr().out
    assert [name for name in names if name not in shown] == []
