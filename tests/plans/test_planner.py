"""End to end on tiny models: plans are made, resumed and applied, and wrong requests are refused in one line."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.capture import tiny, tokens
from wherewhat.caches.limited_cache import planned
from wherewhat.caches.plan import Plan
from wherewhat.captures.proof import prove
from wherewhat.errors import ConfigError, MeasureError, TextError
from wherewhat.plans import planner
from wherewhat.plans.costs import PlanOutcome, measure_plan
from wherewhat.plans.planner import make_plan, rank_selectors
from wherewhat.plans.request import PlanRequest
from wherewhat.plans.selectors import CANDIDATES, PLACED, SELECTORS
from wherewhat.plans.sentences import better_selector

TEXTS = [tokens(200, seed=seed)[0].tolist() for seed in range(5)]
SMALL = {"tokens": 200, "window": 20, "sinks": 3, "beyond": True}
RANKS = {"selector": "ranks", **SMALL}


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def test_plan_of_a_budget(model, tmp_path, monkeypatch):
    plan = make_plan(model, budget=0.25, texts=TEXTS, out=tmp_path, **RANKS)
    assert plan.share == 0.25
    assert sum(map(len, plan.full.values())) == 2
    assert plan.provenance["chosen_on"] == ["ids-1", "ids-2"]
    assert plan.provenance["evaluated_on"] == ["ids-3", "ids-4", "ids-5"]
    cells = {(row["selector"], row["share"]) for row in plan.provenance["curve"]}
    shares = {("ranks", 0.125), ("ranks", 0.25), ("ranks", 0.5)}
    assert cells == {("all", 1.0), ("none", 0.0), ("mass", 0.25), ("random", 0.25), *shares}
    assert "not used for choosing" in plan.provenance["sentence"]
    assert Plan.load(plan.save(tmp_path / "plan.json")).full == plan.full
    with torch.no_grad(), planned(model, plan):
        model.generate(tokens(30), max_new_tokens=3, do_sample=False)
    # Nothing is measured again.
    monkeypatch.setattr(planner, "measure_plan", None)
    monkeypatch.setattr(planner, "document_scores", None)
    again = make_plan(model, budget=0.25, texts=TEXTS, out=tmp_path, **RANKS)
    assert again.full == plan.full
    assert again.provenance["curve"] == plan.provenance["curve"]


def test_equal_choices_are_measured_once(model, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(planner, "measure_plan", lambda *a, **kw: calls.append(a) or measure_plan(*a, **kw))
    plan = make_plan(model, budget=0.03, texts=TEXTS[:3], out=tmp_path, documents=1, **RANKS)  # of 8 groups
    assert len(calls) == 2  # all groups and none
    rises = {row["selector"]: row["rise"] for row in plan.provenance["curve"] if row["share"] < 0.1}
    assert rises["ranks"] == rises["mass"] == rises["random"] == rises["none"]


@pytest.mark.slow
def test_any_budget_selector_and_family(model, tmp_path):
    for budget, kept in ((0.0, 0), (1 / 3, 3), (1.0, 8)):
        plan = make_plan(model, budget=budget, texts=TEXTS, out=tmp_path, compare=(), **RANKS)
        assert sum(map(len, plan.full.values())) == kept
        assert plan.provenance["outcome"]["share"] == budget
    assert make_plan(model, budget=0.25, texts=TEXTS, out=tmp_path, selector="random", **SMALL).share == 0.25
    assert make_plan(tiny("bloom"), budget=0.25, texts=TEXTS, out=tmp_path, **RANKS).share == 0.25


def _row(selector, part, rise, share=0.5, half=0.05):
    around = {"low": part - half, "mean": part, "high": part + half}
    return {"selector": selector, "share": share, "part": around, "rise": {"mean": rise}}


def test_a_clearly_better_selector_is_named():
    own = _row("ranks", 0.02, 0.06)
    others = [_row("costs", 1.0, 0.01), _row("mass", 1.0, 0.01), _row("distance", 0.5, 0.01)]
    assert better_selector([own, *others], own)["selector"] == "mass"  # needs no measured costs
    for row in (
        _row("random", 1.0, 0.01),
        _row("mass", 1.0, 0.07),  # a larger rise
        _row("mass", 0.1, 0.01),  # the intervals overlap
        _row("mass", 1.0, 0.01, share=0.75),
        _row("mass", 1.0, 0.01) | {"part": None},
    ):
        assert better_selector([own, row], own) is None


@pytest.mark.slow
def test_a_plan_names_the_better_selector(model, tmp_path, monkeypatch):
    other = _row("mass", 1.0, 0.01)
    other["rise"] |= {"low": 0.0, "high": 0.02}
    monkeypatch.setattr(planner, "better_selector", lambda *_: other)
    plan = make_plan(model, budget=0.5, texts=TEXTS[:3], out=tmp_path, documents=1, compare=(), **RANKS)
    advice = "mass finds 100 ± 5 % at this share, and the loss rises by 0.010 ± 0.010: use --selector mass."
    assert plan.provenance["sentence"].endswith(f"The selector {advice}")


def test_auto_takes_the_selector_that_costs_least_on_other_documents(model, tmp_path, monkeypatch):
    """Costs are those of a loop over documents, each with the scores of the others."""
    options = {"texts": TEXTS[:4], "out": tmp_path, "documents": 1, "compare": (), "choose": 3, **SMALL}
    plan = make_plan(model, budget=0.25, **options)
    auto = plan.provenance["auto"]
    assert {row["selector"] for row in auto} == set(CANDIDATES)
    assert plan.provenance["selector"] == auto[0]["selector"]
    assert f"The selector is {auto[0]['selector']}: " in plan.provenance["sentence"]
    assert {row["selector"] for row in plan.provenance["curve"]} == {"auto", "all", "none"}
    proof, costs = prove(model), {name: [] for name in ("mass", "output")}
    for index in range(3):
        ids = torch.tensor(TEXTS[index])[None]
        others = [text for place, text in enumerate(TEXTS[:3]) if place != index]
        base = measure_plan(model, proof, ids, {}, window=20, sinks=3)
        for name in costs:
            chosen = make_plan(model, budget=0.25, texts=others, out=tmp_path, selector=name, documents=0, **SMALL)
            full = {layer: chosen.full_heads(layer) for layer in chosen.layers}
            own = measure_plan(model, proof, ids, full, window=20, sinks=3)
            costs[name].append(own.loss - base.loss + base.found - own.found)
    for name, expected in costs.items():
        cost = next(row["cost"]["mean"] for row in auto if row["selector"] == name)
        assert cost == pytest.approx(sum(expected) / 3, abs=1e-6)
    # Nothing is measured again, and the plan is that of its selector.
    monkeypatch.setattr(planner, "measure_plan", None)
    assert make_plan(model, budget=0.25, **options).provenance["auto"] == auto
    monkeypatch.undo()
    named = make_plan(model, budget=0.25, **options | {"selector": auto[0]["selector"]})
    assert named.full == plan.full


def test_auto_compares_nothing_where_all_or_no_units_are_kept(model, tmp_path):
    for budget in (0, 1):
        options = {"texts": TEXTS[:3], "out": tmp_path, "documents": 1, "choose": 2, **SMALL}
        plan = make_plan(model, budget=budget, **options)
        assert (plan.provenance["auto"], plan.provenance["selector"]) == ([], "ranks")
        assert "The selector is" not in plan.provenance["sentence"]


@pytest.mark.parametrize("family", ["bloom", "cohere2"])  # no rotation, and none in layers with full attention
def test_without_rotation_distance_is_left_out_unless_it_is_named(family, tmp_path):
    other = tiny(family)
    options = {"texts": TEXTS[:3], "out": tmp_path, "documents": 1, "choose": 2, **SMALL}
    plan = make_plan(other, curves=True, costs=True, **options)
    measured = {row["selector"] for row in plan.provenance["curve"]}
    assert {"ranks", "auto", "combined"} <= measured
    assert "distance" not in measured
    assert {row["selector"] for row in plan.provenance["auto"]} == {*CANDIDATES} - {"distance"}
    with pytest.raises(MeasureError, match="there is no distance curve"):
        make_plan(other, compare=("distance",), **options)


def test_ties_go_to_ranks():
    ranks = [1.0, 2.0, 3.0]
    for others, first in (
        ({"mass": [1.0, 2.0, 3.0]}, "ranks"),  # equal
        ({"mass": [0.9, 1.7, 2.9], "output": [0.95, 2.0, 3.0]}, "mass"),
        ({"mass": [-3.0, 2.0, 3.9]}, "ranks"),  # better in one document alone
        ({"mass": [1.1, 2.1, 3.1]}, "ranks"),
    ):
        rows = rank_selectors({"ranks": ranks, **others})
        assert rows[0]["selector"] == first
        means = [row["cost"]["mean"] for row in rows[1:]]
        assert means == sorted(means)


def test_plan_of_layers(model, tmp_path):
    options = {"texts": TEXTS[:3], "out": tmp_path, "unit": "layer", "documents": 1, **RANKS}
    plan = make_plan(model, budget=0.5, **options)
    assert sorted(plan.full.values()) == [(), (), (0,), (0,)]
    assert all(len(set(plan.full_heads(layer))) == 1 for layer in plan.layers)
    assert {"interleaved", "ends"} <= {row["selector"] for row in plan.provenance["curve"]}
    assert plan.cache_share(200) == pytest.approx((2 * 200 + 2 * 23) / 800)
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert (loaded.full, loaded.unit) == (plan.full, "layer")
    assert [tuple(x > 0.5 for x in row) for row in plan.pattern()] == [plan.full_heads(x)[::2] for x in range(4)]
    ends = make_plan(model, budget=0.5, **options | {"selector": "ends"})
    assert (ends.full, ends.scores) == ({0: (0,), 1: (), 2: (), 3: (0,)}, {})


def test_exports_are_refused_before_measuring_and_written_with_the_plan(model, tmp_path, monkeypatch):
    options = {"texts": TEXTS[:2], "out": tmp_path / "runs", "unit": "layer", "documents": 0, **RANKS, "sinks": 0}
    plan = make_plan(model, exports={"vllm": tmp_path / "vllm.json"}, context=100, memory="1GB", **options)
    assert plan.provenance["cache"]["context"] == 100
    assert plan.provenance["cache"]["memory"] == 10**9
    types = json.loads((tmp_path / "vllm.json").read_text())["layer_types"]
    assert [x == "full_attention" for x in types] == [bool(plan.full[layer]) for layer in range(4)]
    monkeypatch.setattr(planner, "document_scores", lambda *_, **__: pytest.fail("something was measured"))
    with pytest.raises(MeasureError, match="LlamaForCausalLM ignores layer_types"):
        make_plan(model, exports={"transformers": tmp_path / "x"}, **options | {"out": tmp_path / "new"})
    with pytest.raises(ConfigError, match="vllm limits whole layers"):
        make_plan(model, exports={"vllm": tmp_path / "x"}, **options | {"unit": "group"})
    assert not (tmp_path / "x").exists()


def test_plan_without_measuring_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "measure_plan", None)
    plan = make_plan(model, budget=0.5, texts=TEXTS[:2], out=tmp_path, unit="head", documents=0, **RANKS)
    assert sum(map(len, plan.full.values())) == 8
    assert (plan.provenance["outcome"], plan.provenance["curve"], plan.provenance["evaluated_on"]) == (None, [], [])
    assert plan.provenance["sentence"].endswith("keys; what this costs was not measured and is unknown.")
    assert Plan.load(plan.save(tmp_path / "plan.json")).full == plan.full


@pytest.mark.slow
def test_interrupted_plans_are_resumed(model, tmp_path, monkeypatch):
    measured = []
    measure = planner.measure_plan

    def interrupted(*args, **options):
        measured.append(1)
        if len(measured) == 10:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(planner, "measure_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_plan(model, budget=0.5, texts=TEXTS, out=tmp_path, **RANKS)
    make_plan(model, budget=0.5, texts=TEXTS, out=tmp_path, **RANKS)
    per_document = 2 + 2 + 2  # unchanged, none; two shares of the selector below 1; two others
    assert len(measured) == 10 + 2 * per_document


@pytest.mark.slow
def test_all_selectors_with_costs_by_head(model, tmp_path):
    measured = {"costs": True, "greedy": True, "curves": True}
    plan = make_plan(model, budget=0.25, texts=TEXTS, out=tmp_path, unit="head", selector="costs", **measured, **SMALL)
    assert plan.unit == "head"
    assert {row["selector"] for row in plan.provenance["curve"]} == {"all", "none", *SELECTORS} - {*PLACED}
    assert {row["selector"] for row in plan.provenance["areas"]["rows"]} == set(SELECTORS) - {*PLACED}
    assert plan.provenance["areas"]["reference"] == "greedy"
    assert plan.provenance["areas"]["shares"] == [0.1, 0.125, 0.25, 0.5]


def test_greedy_choices_are_resumed_and_equal_whole_passes(model, tmp_path, monkeypatch):
    """A slow loop that runs the whole plan for each candidate chooses the same units; in float64, without ties."""
    model = tiny("llama", dtype=torch.float64)
    measured = []
    measure = planner.measure_additions

    def interrupted(*args, **options):
        measured.append(1)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(planner, "measure_additions", interrupted)
    texts = [text[:160] for text in TEXTS[:2]]
    options = {"texts": texts, "out": tmp_path, "selector": "greedy", "greedy": True, "documents": 0}
    options |= SMALL | {"tokens": 160}
    with pytest.raises(KeyboardInterrupt):
        make_plan(model, budget=0.5, **options)
    plan = make_plan(model, budget=0.5, **options)
    rounds = (1, 2, 3, 4, 6)  # groups after which is measured again, of 8
    assert len(measured) == 1 + 2 * len(rounds)
    proof, groups = prove(model), [(layer, group) for layer in plan.layers for group in (0, 1)]

    def cost(chosen):
        full = {layer: tuple((layer, head // 2) in chosen for head in range(4)) for layer in plan.layers}
        found = [measure_plan(model, proof, torch.tensor([text]), full, window=20, sinks=3) for text in texts]
        return sum(x.loss - x.found for x in found)

    order = []
    for count in rounds:
        costs = {group: cost([*order, group]) for group in groups if group not in order}
        order += sorted(costs, key=costs.get)[: count - len(order)]
    order += [group for group in sorted(costs, key=costs.get) if group not in order]
    assert plan.full == {layer: tuple(x for x in (0, 1) if (layer, x) in order[:4]) for layer in plan.layers}
    assert plan.scores == {layer: tuple(8 - order.index((layer, x)) for x in (0, 1)) for layer in plan.layers}


@pytest.mark.slow
def test_goals(model, tmp_path, monkeypatch):
    plan = make_plan(model, max_rise=5.0, texts=TEXTS, out=tmp_path, **RANKS)
    assert plan.share == pytest.approx(0.05, abs=0.1)
    assert "On the documents for choosing the goal is met: a rise of" in plan.provenance["sentence"]

    def poor(*args, **_):
        return PlanOutcome(3.0, 0.4) if args[3] else PlanOutcome(2.0, 0.8)

    monkeypatch.setattr(planner, "measure_plan", poor)
    nearest = "the nearest keeps 88%, with a rise of 1.000 nats and 50% of the retrieval"
    with pytest.raises(MeasureError, match=nearest):
        make_plan(model, max_rise=0.5, texts=TEXTS, out=tmp_path / "rise", **RANKS)
    with pytest.raises(MeasureError, match=nearest):
        make_plan(model, min_found=0.9, texts=TEXTS, out=tmp_path / "found", **RANKS)

    monkeypatch.setattr(planner, "measure_plan", lambda *args, **_: PlanOutcome(2.0, -0.001))
    plan = make_plan(model, max_rise=0.5, texts=TEXTS, out=tmp_path / "none", **RANKS)
    numbers = "met: a rise of 0.000 nats"
    goal = f"On the documents for choosing the goal is {numbers}; on those for measuring it is {numbers}."
    assert plan.provenance["sentence"].endswith(goal)
    with pytest.raises(MeasureError, match=r"gains -0\.001 nats from planted sequences .* leave --min-found out"):
        make_plan(model, min_found=0.9, texts=TEXTS, out=tmp_path / "none", **RANKS)


def test_wrong_requests(subtests):
    for options, message in (
        ({"budget": 1.5}, "--budget is 1.5: a share is from 0 to 1"),
        ({"budget": -0.1}, "--budget is -0.1"),
        ({"budget": 0.2, "max_rise": 0.1}, "--budget and --max-rise were both given"),
        ({"max_rise": 0.0}, "--max-rise is 0"),
        ({"min_found": 2.0}, "--min-found is 2"),
        ({"window": 600}, "texts of 512 tokens are within the window of 600 keys and 4 first ones"),
        ({"selector": "symbolc"}, "there is no selector 'symbolc': did you mean 'symbolic'"),
        ({"selector": "costs"}, "need the costs of single heads: add --costs"),
        ({"selector": "greedy"}, "needs measured costs of each choice: add --greedy"),
        ({"documents": -1}, "--documents is -1"),
        ({"context": 0}, "--context is 0: at least 1 is needed"),
        ({"memory": "80 apples"}, "--memory is '80 apples': give a size such as 80GB or 24GiB"),
        ({"documents": 0, "curves": True}, "--curves measures selectors, but --documents is 0"),
        ({"unit": "layers"}, "choose group, layer or head"),
        ({"selector": "ends"}, "the selector ends chooses whole layers: add --unit layer"),
        ({"choose": 1}, "but --choose is 1: give 2 or more, or name a --selector"),
        ({"choose": 1, "selector": "mass", "compare": ("auto",)}, "but --choose is 1: give 2 or more"),
    ):
        with subtests.test(options=options), pytest.raises(ConfigError, match=message):
            PlanRequest(**options)


def test_wrong_inputs(model, tmp_path):
    with pytest.raises(TextError, match="2 documents for choosing and 3 others for measuring, but there are 4"):
        make_plan(model, texts=TEXTS[:4], out=tmp_path, **RANKS)
    with pytest.raises(ConfigError, match="there is no option 'budge' of a plan: did you mean 'budget'"):
        make_plan(model, texts=TEXTS, out=tmp_path, budge=0.2)
    with pytest.raises(MeasureError, match="has no layer with full attention: there is nothing to plan"):
        make_plan(tiny("mistral"), texts=TEXTS, out=tmp_path, **RANKS)
    with pytest.raises(MeasureError, match="there is no distance curve"):
        make_plan(tiny("bloom"), texts=TEXTS, out=tmp_path, selector="distance", **SMALL)
