"""End to end: the recipe that compares length methods resumes, and its results become tables and a picture."""

from __future__ import annotations

import json
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from helpers.models import save_speller
from wherewhat.caches.plan import Plan
from wherewhat.plans.planner import make_plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A tiny model, three documents, and a plan made on the last."""
    folder = tmp_path_factory.mktemp("recipe")
    model = save_speller(folder / "speller")
    for number, name in enumerate(("first", "second", "third")):
        words = (f"{(7 * i * (number + 2)) % 89} cats sat on mat {i % 13}." for i in range(120))
        (folder / f"{name}.txt").write_text(" ".join(words))
    options = {"tokens": 200, "window": 20, "choose": 1, "documents": 0, "unit": "head", "selector": "ranks"}
    make_plan(str(model), files=(str(folder / "third.txt"),), out=folder, **options).save(folder / "plan.json")
    return folder


def run(script, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.syspath_prepend(ROOT / Path(script).parent)
    return runpy.run_path(str(ROOT / script))["main"]()


def measured(prepared, monkeypatch, *arguments, texts=("first", "second")):
    files = [prepared / f"{name}.txt" for name in texts]
    fixed = (prepared / "speller", "--trained", 480, "--lengths", 1.5, "--documents", len(files), "--text", *files)
    return run("benchmarks/lengths.py", *fixed, *arguments, monkeypatch=monkeypatch)


def test_comparison_of_length_methods(prepared, monkeypatch, capsys):
    out, plan = prepared / "result.json", prepared / "plan.json"
    assert measured(prepared, monkeypatch, "--methods", "none", "near-far", "--json", out) == 0
    first = json.loads(out.read_text())
    assert [*first["lengths"]["1.5"]] == ["first", "second"]
    document = first["lengths"]["1.5"]["first"]
    assert [*document["methods"]] == ["none", "near-far"]
    assert document["controls"]["answers_distance"] < 480  # so short a text has no place for them farther away
    probes = {"loss_rise", "found_beyond", "second_copy", "passkey", "keys", "entropy"}
    assert probes <= document["methods"]["none"].keys()
    assert len(document["positions"]) == len(document["methods"]["none"]["rises"])
    capsys.readouterr()
    assert measured(prepared, monkeypatch, "--methods", "near-far", "--plan", plan, "--json", out) == 0
    printed = capsys.readouterr().out
    assert printed.count("near-far-plan: ") == 2 + 1  # two documents, one verdict
    assert "  near-far: " not in printed  # not measured again
    second = json.loads(out.read_text())
    assert second["plan"]["share"] == Plan.load(plan).share
    kept = second["lengths"]["1.5"]["first"]["methods"]
    assert kept["none"] == document["methods"]["none"]
    assert kept["near-far-plan"]["loss_rise"] != kept["near-far"]["loss_rise"]

    varied = ("near-far:window=240", "near-far-plan:window=30,top=2")
    other = prepared / "varied.json"
    options = ("--methods", "--variants", *varied, "--plan", plan, "--json", other)
    assert measured(prepared, monkeypatch, *options) == 0
    same, changed = json.loads(other.read_text())["lengths"]["1.5"]["first"]["methods"].values()
    assert same["loss_rise"] == kept["near-far"]["loss_rise"]  # half of the trained length is the default
    assert changed["loss_rise"] != kept["near-far-plan"]["loss_rise"]
    capsys.readouterr()

    run("studies/lengths/summary.py", "--picture", prepared / "picture.svg", out, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert "| method | rise, 1.5 × | found, 1.5 × |" in lines
    assert len([line for line in lines if line.startswith("| near-far-plan |")]) == 4  # not in the differences from it
    labels = ElementTree.parse(prepared / "picture.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    assert {"none", "near-far", "near-far-plan"} <= {label.text for label in labels}


def test_wrong_input(prepared, monkeypatch, capsys):
    plan, out = prepared / "plan.json", prepared / "other.json"
    out.write_text(json.dumps({"model": "another", "lengths": {}}))
    assert measured(prepared, monkeypatch, "--methods", "none", "--json", out) == 1
    assert "was measured with another model (another): give another file" in capsys.readouterr().out
    assert measured(prepared, monkeypatch, "--methods", "near-far", "--plan", plan, texts=("first", "third")) == 1
    assert "the plan was made on third, which would be measured here" in capsys.readouterr().out
    assert measured(prepared, monkeypatch, "--methods", "--variants", "near-far-plan:top=2") == 1
    assert "'near-far-plan:top=2' needs a plan" in capsys.readouterr().out
    assert measured(prepared, monkeypatch, "--methods", "none", "--lengths", 100) == 1
    assert "48000 were asked for: use a longer text" in capsys.readouterr().out


def test_command_measures_the_same(prepared, cli, tmp_path):
    options = {
        "methods": "none,near-far",
        "retrieval": "true",
        "trained": 480,
        "plan": prepared / "plan.json",
        "top": 4,
    }
    given = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    texts = ("--text", prepared / "first.txt", "--tokens", 720, "--beyond", "--out", tmp_path)
    outcome = cli("extend", prepared / "speller", *texts, *given)
    assert outcome.code == 0, outcome.err
    assert "Pass key and codes are mean log-probabilities per token" in " ".join(outcome.out.split())
