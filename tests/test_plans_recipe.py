"""The recipe of ready plans: end to end on a tiny model, and its tables by brute force and on the page."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

import pytest

from helpers.models import save_speller
from wherewhat.caches.plan import Plan
from wherewhat.captures.proof import prove
from wherewhat.measures.statistics import student
from wherewhat.models.loader import load
from wherewhat.plans import planner
from wherewhat.plans.costs import measure_plan

ROOT = Path(__file__).resolve().parents[1]
SHARES = (0.1, 0.25, 0.5)


def script(name):
    """A script of the study as a module."""
    spec = importlib.util.spec_from_file_location(f"plans_{name}", ROOT / "studies" / "plans" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def summary():
    return script("summary")


def outcome(document):
    """Outcomes of one document: ``output`` has the smallest rise, ``ranks`` finds most, ``auto`` takes ``ranks``."""
    one = {"loss": 3.0, "found": 2.0, "loss_none_0": 3.4, "found_none_0": 0.0}
    curves = {"ranks": (0.2, 0.5), "auto": (0.2, 0.5), "output": (0.1, 0.3), "random": (0.3, 0.0)}
    curves["interleaved"] = (0.4, 0.1)
    for selector, (rise, part) in curves.items():
        for share in SHARES:
            one[f"loss_{selector}_{share!r}"] = 3 + rise * (1 - share) * document
            one[f"found_{selector}_{share!r}"] = 2 * (part + share)
    return one


def stored(**changes):
    """A result of the study."""
    plan = {"share": 0.5, "units": 8, "selector": "ranks", "auto": [], "share_of_cache": 0.53, "context": 2048}
    plan["outcomes"] = {f"document-{number}": outcome(number) for number in (1, 2, 3)}
    one = {"dtype": "float32", "device": "GPU", "tokens": 512, "window": 64, "choosing": 4, "goal_missed": None}
    one |= {"goal": {"min_found": 0.95, "max_rise": 0.3}, "groups": plan, "curves": plan}
    one["layers"] = [plan | {"sinks": 0}]
    return one | {"seconds": {"auto": 15.0, "ranks": 6.0}} | changes


def cells(lines, start):
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {start} |")]


def test_areas_are_compared_with_the_best_selector_of_each(summary):
    lines = list(summary.section({"smollm2": stored()}))
    cost, rise, part = cells(lines, "SmolLM2-135M")[:3]
    x = (0, *SHARES, 1)

    def area(document, height):
        y = [0.4, *(height * (1 - share) * document for share in SHARES), 0]
        return sum((b - a) * (c + d) / 2 for a, b, c, d in zip(x, x[1:], y, y[1:], strict=False))

    more = [area(document, 0.2) - area(document, 0.1) for document in (1, 2, 3)]
    reach = student(3) * statistics.stdev(more) / math.sqrt(3)
    assert statistics.fmean(more) < reach  # so the interval includes no loss
    mean, half = (float(number) for number in rise[4].split(" ± "))
    assert (mean, half) == pytest.approx((statistics.fmean(more), reach), abs=5e-3)
    assert rise[1] == "rise, nats"
    assert rise[3].startswith("`output`, ")
    assert rise[5:] == ["0, the same choices", "no"]
    assert cost[1] == "rise plus lost retrieval, nats"
    assert cost[3].startswith("`ranks`, ")  # which finds more, and by more than its rise is larger
    assert cost[4:] == ["0, the same choices"] * 2 + ["no"]
    assert part[3].startswith("`ranks`, ")
    assert part[4:] == ["0, the same choices"] * 2 + ["no"]
    # The curves of the plan whose share is given.
    other = stored(curves=stored()["groups"])
    for document in other["groups"]["outcomes"].values():
        document |= {f"loss_auto_{share!r}": 5.0 for share in SHARES}
    assert cells(summary.section({"smollm2": other}), "SmolLM2-135M")[:3] == [cost, rise, part]


def test_a_clear_loss_is_said(summary):
    assert summary.is_worse("rise", {"low": 0.01, "high": 0.02})
    assert summary.is_worse("cost", {"low": 0.01, "high": 0.02})
    assert summary.is_worse("part", {"low": -0.02, "high": -0.01})
    one = stored()
    for number, document in enumerate(one["groups"]["outcomes"].values()):
        for share in SHARES:
            document[f"loss_auto_{share!r}"] = 5.0 + 0.01 * number
    lines = list(summary.section({"smollm2": one}))
    assert cells(lines, "SmolLM2-135M")[0][-1] == "**than the best**, **than `ranks`**"


def test_ready_plans_and_layers(summary):
    lines = list(summary.section({"smollm2": stored(), "other": stored(goal_missed="no plan", seconds=None)}))
    (own,) = cells(lines, "[SmolLM2-135M](plans/smollm2.json)")
    # The rise of 0.2 (1 - share), twice that on average, is below 0.3; 95 % are found from 50 % on.
    assert own[1:3] == ["4 of 8, 50 %", "`ranks`"]
    assert own[5:] == ["4 of 8, 50 %", "0.53 of 2,048 tokens", "15.0 and 6.0 (ratio 2.5)"]
    assert cells(lines, "other")[0][1] == "none reaches the goal"
    layer = cells(lines, "SmolLM2-135M")[3]
    assert layer[1:4] == ["4 of 8, 50 %", "0", "`ranks`"]
    # Minus interleaved: (0.2 - 0.4) × 0.5 × document, and 0.4 of the gain, in all documents.
    assert layer[6].split(" ± ")[0] == "-0.20"
    assert layer[7].startswith("40.0")


def test_the_page_has_the_stored_plans(summary):
    page, found = summary.PAGE.read_text("utf-8"), summary.results()
    assert summary.filled(page, found) == page, "run python studies/plans/summary.py --write"
    for name, one in found.items():
        file = summary.PAGE.parent / "plans" / f"{name}.json"
        assert file.exists() == (one["goal_missed"] is None)
        if file.exists():
            plan = Plan.load(file)
            assert plan.provenance["weights_hash"] == one["weights_hash"]
            assert plan.provenance["share"] == one["groups"]["share"]
    assert sum(path.stat().st_size for path in summary.FOLDER.iterdir() if path.is_file()) < 10e6
    twice = summary.filled(summary.filled(page, {"smollm2": stored()}), {"smollm2": stored()})
    assert twice == summary.filled(page, {"smollm2": stored()}) != page
    assert summary.filled(twice, found) == page


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The recipe of a tiny model, and its result."""
    make = script("make")
    model = save_speller(tmp_path / "speller")
    options = ["--device", "cpu", "--tokens", "200", "--documents", "2", "--out", tmp_path / "runs", "--root", tmp_path]
    monkeypatch.setattr(sys, "argv", ["make.py", str(model), *map(str, options)])

    def run():
        make.main()
        return json.loads((tmp_path / "studies/plans/speller.json").read_text("utf-8"))

    return make, run


@pytest.mark.slow
def test_a_model_that_retrieves_nothing_has_no_ready_plan(recipe, summary, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(planner, "measure_plan", lambda *a, **kw: calls.append(a) or measure_plan(*a, **kw))
    make, run = recipe
    monkeypatch.setattr(make, "LAYERS", ((0.5, 0),))
    one = run()
    assert "there is no retrieval to keep a part of" in one["goal_missed"]
    assert not (tmp_path / "docs/plans/speller.json").exists()
    assert [(plan["share"], plan["sinks"]) for plan in one["layers"]] == [(0.5, 0)]
    assert all(len(plan["outcomes"]) == 2 for plan in (one["groups"], *one["layers"]))
    assert one["seconds"].keys() == {"ranks", "auto"}
    assert str(tmp_path) not in json.dumps(one)
    lines = list(summary.section(summary.results(tmp_path / "studies/plans")))
    assert len(cells(lines, "speller")) == 1 + 2 + 1  # of areas not that of the part found
    first = len(calls)
    again = run()  # measures for the times alone
    assert 0 < len(calls) - first < first / 2
    assert (again["groups"], again["layers"]) == (one["groups"], one["layers"])


@pytest.mark.slow
def test_ready_plan(recipe, tmp_path, monkeypatch):
    make, run = recipe
    monkeypatch.setattr(make, "GOAL", {"max_rise": 5.0})
    monkeypatch.setattr(make, "LAYERS", ())
    one = run()
    plan, loaded = Plan.load(tmp_path / "docs/plans/speller.json"), load(str(tmp_path / "speller"))
    plan.check(loaded.model, prove(loaded.model))
    assert plan.provenance["share"] == one["groups"]["share"] == 0
    assert one["curves"]["share"] == 0.25
    assert len(one["curves"]["auto"]) == 6  # chosen by the cost
    assert plan.provenance["weights_hash"] == one["weights_hash"] == loaded.weights_hash
    assert one["goal_missed"] is None
