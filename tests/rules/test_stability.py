"""Known answers and brute force: verdicts under resampling of documents and of control models."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product
from statistics import fmean, stdev

import pytest

from helpers.runs import finished
from wherewhat.rules.claims.claim import (
    Claim,
    Evidence,
    claim,
    deciding_words,
    stability_words,
    verdict_json,
    verdict_words,
)
from wherewhat.rules.claims.stability import MOST_CHANGED, draws, judge_stably, strata
from wherewhat.rules.numbers import mean
from wherewhat.rules.rule import Statement, at_least
from wherewhat.runs.collection import Runs
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.results import StoredRun

STUDENT = 3.182446
"""97.5 % quantile of Student's distribution with three degrees of freedom."""


def stored(folder, values, **options):
    """A run on documents with these values of r."""
    named = {f"d{i}": value for i, value in enumerate(values)}
    config = {"documents": [{"name": name} for name in named], "options": {}}
    return StoredRun(finished(folder, named, config=config, **options))


def evidence(run, *controls):
    request = Request(measurement="axes", model=ModelRequest(model="m"))
    drawn = [(request.with_weights("random", draw=draw), control) for draw, control in enumerate(controls)]
    return Evidence(Runs([(request, run), *drawn]), {"axes": request}, controls=max(1, len(controls)))


def about(threshold: float) -> Claim:
    @claim(1, "axes", title="A threshold", source="s", change="c")
    def judged(evidence):
        """The mean is high."""
        yield Statement("r is high", at_least(mean(evidence.run("axes"), "r"), threshold))

    return judged


@claim(2, "axes", title="Another model is lower", source="s", change="c", drawn=True)
def lower(evidence):
    """The control is lower."""
    yield Statement(
        "r is higher", at_least(mean(evidence.run("axes"), "r"), mean(evidence.find("axes", "random"), "r").mean)
    )


def slow_verdict(values, threshold):
    """The verdict by the formula of Student's interval."""
    middle, reach = fmean(values), STUDENT * stdev(values) / math.sqrt(len(values))
    low, high = max(middle - reach, -1e9), min(middle + reach, 1.0)  # r is at most 1
    return "holds" if low >= threshold else "does not hold" if high < threshold else "cannot be told"


VALUES = (0.51, 0.54, 0.55, 0.56)


def test_a_stable_verdict_stands(tmp_path):
    (made,) = judge_stably([about(0.3)], evidence(stored(tmp_path, VALUES)))
    assert (made.verdict, made.stability.changed) == ("holds", 0.0)
    assert stability_words(verdict_json(made)) == "no other verdict in 500 resamples of 4 documents"


def test_an_unstable_verdict_cannot_be_told(tmp_path):
    run = stored(tmp_path, VALUES)
    middle = mean(run, "r")
    (made,) = judge_stably([about(middle.low - 1e-6)], evidence(run))
    changed = made.stability.changed
    assert changed > MOST_CHANGED
    assert made.stability.verdict == "holds"
    words = verdict_words(verdict_json(made))
    expected = f"{100 * changed:.0f} % of 500 resamples of 4 documents give another verdict"
    assert words == f"cannot be told: holds by the rule, but {expected}"
    (open_one,) = judge_stably([about(middle.mean)], evidence(run))
    assert (open_one.verdict, open_one.condition) == ("cannot be told", "")  # by its rule, whatever the resamples say


@pytest.mark.parametrize("threshold", [0.49, 0.5, 0.505, 0.52, 0.54, 0.56, 0.6])
def test_shares_are_those_of_a_slow_computation(tmp_path, threshold):
    (made,) = judge_stably([about(threshold)], evidence(stored(tmp_path, VALUES)), seed=3)
    generator, same = random.Random(3), Counter()
    for _ in range(500):
        same[slow_verdict(generator.choices(VALUES, k=4), threshold)] += 1
        generator.random()  # one of one control model
    assert made.stability.verdicts == {verdict: count / 500 for verdict, count in same.items()}
    every = Counter(slow_verdict(values, threshold) for values in product(VALUES, repeat=4))
    exact = 1 - every[slow_verdict(VALUES, threshold)] / 256
    assert made.stability.changed == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 500) + 1e-12)


def test_resamples_depend_on_the_seed_alone(tmp_path):
    run, rule = stored(tmp_path, VALUES), about(0.5)
    first, again, other = (judge_stably([rule], evidence(run), seed=seed)[0].stability for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_control_models_are_drawn_too(tmp_path):
    run = stored(tmp_path, VALUES)
    low, high = (stored(tmp_path, [value] * 4, weights="random", seed=seed) for seed, value in enumerate((0.2, 0.8)))
    (one,) = judge_stably([lower], evidence(run, low))
    assert (one.verdict, one.stability.changed) == ("holds", 0.0)
    assert one.stability.over == "4 documents with one random control model"
    (two,) = judge_stably([lower], evidence(run, low, high))
    assert two.stability.over == "4 documents and 2 random control models"
    assert two.stability.changed == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(500))
    assert two.verdict == "cannot be told"


def test_too_few_documents_are_not_resampled(tmp_path):
    (made,) = judge_stably([about(0.3)], evidence(stored(tmp_path, VALUES[:2])))
    assert made.stability.changed is None
    assert stability_words(verdict_json(made)) == "not resampled: 2 documents, and at least 3 are needed"


def test_each_run_keeps_its_number_of_documents(tmp_path):
    short, long = stored(tmp_path / "a", VALUES[:3]), stored(tmp_path / "b", VALUES)
    groups = strata([short, long])
    assert groups == [["d0", "d1", "d2"], ["d3"]]
    for (counts, draw), times in draws(groups, 1, seed=0, resamples=50).items():
        assert sum(count for name, count in counts if name != "d3") == 3
        assert dict(counts)["d3"] == 1
        assert (draw, times > 0) == (0, True)


def test_titles_are_short():
    with pytest.raises(ValueError, match="give 1 to 40 characters"):
        Claim(1, "x" * 41, "statement", "source")


def bound(mean, threshold, outcome):
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 4, "side": "at least"} | {
        "threshold": threshold,
        "outcome": outcome,
    }


def test_two_numbers_decide_a_verdict():
    holds, clearly = bound(0.7, 0.5, True), bound(0.9, 0.5, True)
    fails, far = bound(0.3, 0.5, False), bound(0.1, 0.5, False)
    unsure, near = bound(0.58, 0.5, None), bound(0.52, 0.5, None)

    def words(*bounds, numbers=()):
        return deciding_words({"parts": [{"bounds": [one]} for one in bounds], "numbers": list(numbers)})

    assert words(clearly, holds) == "0.70 (≥ 0.5)"  # all hold: the one nearest to its threshold
    assert words(holds, fails, far) == "0.10 (≥ 0.5)"  # the clearest contradiction
    assert words(holds, unsure, near) == "0.52 (≥ 0.5)"  # the least certain one
    assert words({**holds, "mean": None}) == ""
    number = {"mean": 0.123, "low": None, "high": None, "n": 1, "control": 0.25}
    assert words(numbers=[number]) == "0.12 (vs 0.25)"
    assert stability_words({}) == "not resampled: the result is of a version without resampling"
