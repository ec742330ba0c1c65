"""Known answers: findings of constructed heads are the right sentences and no others."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import wherewhat
from helpers.heads import constructed_model, constructed_texts
from wherewhat.measures.split.statistics import jackknife_error
from wherewhat.measures.statistics import Interval, around
from wherewhat.rules.findings import FINDINGS, _verb, find, summarise
from wherewhat.rules.numbers import jackknife_difference
from wherewhat.runs.collection import OtherRun, Runs
from wherewhat.runs.request import Request, model_request
from wherewhat.runs.results import MetricSummary
from wherewhat.scores import UNBOUNDED, Metric

WEIGHTS = ("trained", "random")


def held(name, runs):
    """The finding of a rule; None if the numbers do not support it."""
    return next(iter(FINDINGS[name].held(runs)), None)


@pytest.fixture
def measured(tmp_path):
    def measure(model, *, documents: int = 4, controls: tuple[str, ...] = (), weights: str = "trained") -> Runs:
        """Runs of axes and heads, as a report makes them."""
        ids = constructed_texts(model, documents)
        runs = Runs()
        for name in ("axes", "heads"):
            options = {"queries": 8} if name == "heads" else {}
            request = Request(name, model=model_request(model), texts=ids, options=options).with_weights(weights)
            result = wherewhat.run(request, controls=controls, out=tmp_path)
            runs.finished.append((request, result.stored))
            runs.finished.extend((request.with_weights(one), made.stored) for one, made in result.controls.items())
        return runs

    return measure


def test_the_sentence_about_a_single_head(measured):
    runs = measured(constructed_model("positional"), documents=1)
    assert summarise(runs).short.endswith("; of 1 head, 1 is positional.")


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (("positional",) * 8, "Of 8 heads, 8 follow positions alone"),
        (("symbolic",) * 8, "Of 8 heads, 8 follow contents alone"),
        (("uniform",) * 8, "8 of 8 heads attend uniformly, to no position and no content"),
        (
            ("positional",) * 8 + ("symbolic",) * 8,
            "Of 16 heads, 8 follow positions alone, 8 contents alone (in single documents 8 and 8; in one untrained "
            "model 0 and 0; 4 documents).",
        ),
    ],
    ids=str,
)
def test_constructed_heads(measured, kinds, sentence):
    rules = ("pure heads", "uniform heads")
    model = constructed_model(*kinds)
    (found,) = (one for rule, one in find(measured(model, controls=("random",))).items() if rule in rules)
    assert found.text.startswith(sentence)
    assert not find(measured(model)).keys() & {*rules}  # no control, no sentence


def test_a_model_beside_its_untrained_one(measured):
    model = constructed_model(*["symbolic"] * 8)
    found = find(measured(model, controls=("random",)))
    assert found["key"].text.startswith("Training ")
    assert all("4 documents)." in finding.text for finding in found.values())
    sizes = r"what only the key explains: 9[\d.]+ % \(9[\d.]+ to 100(\.0)? %\) .* against [\d.]+ ± [\d.]+ % in one"
    assert re.search(sizes, found["key"].text)  # Student's interval of 97 % ends above 100 %
    assert found["key"].link == "heads?metric=unique_c"
    assert found["pure heads"].text.endswith("in one untrained model 0; 4 documents).")
    assert "uniform heads" not in found


def test_one_document_has_no_interval(measured):
    found = find(measured(constructed_model("symbolic"), documents=1, controls=("random",)))
    assert found.keys() <= {"pure heads"}
    assert all("one document)." in finding.text for finding in found.values())


def test_an_untrained_model_has_no_learned_heads_alone_or_as_its_own_control(measured):
    """The same weights twice: no difference is a finding, and r is said to be no sign of training."""
    runs = measured(constructed_model("positional", "symbolic"), weights="random")
    assert find(runs).keys() <= {"uniform heads"}
    same = [(request.with_weights("trained"), run) for request, run in runs.finished]
    found = find(Runs([*same, *runs.finished]))
    assert found.keys() <= {"additivity"}
    assert all(finding.text.startswith("r is no sign of training") for finding in found.values())


def other_runs(measurement, values, *, control=None):
    """Runs with a measurement whose summaries are given by weights: metric, mean, low and high."""
    runs = {}
    for weights, (name, *bounds) in values.items():
        found = {name: MetricSummary(Metric(name, name, ""), Interval(*bounds, 50), {}, control)}
        runs[weights] = SimpleNamespace(measurement=SimpleNamespace(name=measurement), summary=found.get)
    first = (Request("axes"), SimpleNamespace())
    return Runs([first], others=[OtherRun(runs, 0, None)])


OTHERS = (
    (
        "prompts",
        {"trained": ("accuracy", 0.8, 0.67, 0.89)},
        0.25,
        "The model answers 80 % (67 to 89 %) of 50 prompts correctly; chance is 25 %.",
    ),
    ("prompts", {"trained": ("accuracy", 0.3, 0.2, 0.43)}, 0.25, None),
    ("prompts", {"trained": ("accuracy", 0.1, 0.05, 0.2)}, 0.25, None),
    ("prompts", {"trained": ("accuracy", 0.8, 0.67, 0.89)}, None, None),
    (
        "choices",
        {"trained": ("accuracy", 0.5, 0.4, 0.6)},
        0.25,
        "The model chooses the right alternative in 50 ± 10 % of 50 items; chance is 25 %.",
    ),
)


def test_other_measurements():
    for measurement, values, control, sentence in OTHERS:
        found = held(measurement, other_runs(measurement, values, control=control))
        assert (found and found.text) == sentence
        assert found is None or found.link == f"measured-{measurement}"


def split_run(estimate, without, *, names="abcd"):
    """A run of split: the share of position, and what it would be without each document."""
    about = around(estimate, float(jackknife_error(torch.tensor(without))), len(without))
    return SimpleNamespace(
        measurement=SimpleNamespace(name="split"),
        summary={"k_position": MetricSummary(Metric("k_position", "", ""), about, {}, None)}.get,
        without_each=lambda metric: dict(zip(names, without, strict=True)),
    )


def test_shares_of_position_are_compared_document_by_document():
    """The same documents raise and lower both shares: separate intervals would include each other's means."""
    shared = (-0.03, 0.03, 0.01, -0.01)
    trained = split_run(0.3, [0.3 + x for x in shared])
    untrained = split_run(0.2, [0.2 + 0.9 * x for x in shared])
    own, other = (run.summary("k_position").overall for run in (trained, untrained))
    assert own.low < other.mean
    assert other.high > own.mean
    change = jackknife_difference(trained, "k_position", untrained)
    assert (change.mean, change.reach, change.n) == (pytest.approx(0.1), pytest.approx(0.1 * own.reach), 4)

    def finding(*runs):
        both = dict(zip(WEIGHTS, runs, strict=False))
        return held("position", Runs([(Request("axes"), SimpleNamespace())], others=[OtherRun(both, 0, None)]))

    assert finding(trained, untrained).text == (
        "Position accounts for 30 ± 12 % of the keys' variance, against 20 ± 11 % in one untrained model (4 documents)."
    )
    assert finding(trained, untrained).link == "measured-split"
    for other in (
        split_run(0.27, [0.27 + 0.9 * x for x in shared]),  # a difference of 0.03
        split_run(0.2, [0.2 - x for x in shared]),  # the interval of the difference includes 0
        split_run(0.2, [0.2 + 0.9 * x for x in shared], names="efgh"),  # other documents
    ):
        assert finding(trained, other) is None
    assert finding(trained) is None


def test_shares_that_training_changed():
    """Paired by document: three or more, an interval without 0, a difference of 0.05 and a factor of 1.5."""
    for own, untrained, spread, sentence in (
        ([0.30, 0.31, 0.32], [0.10, 0.11, 0.10], 0.0, "Training tripled what only the key explains: 31.0 ± 2.5 % of"),
        ([0.10, 0.11, 0.10], [0.30, 0.31, 0.32], 0.0, "Training lowered what only the key explains: 10.3 ± 1.4 % of"),
        ([0.28, 0.29, 0.28], [0.20, 0.21, 0.20], 0.0, None),  # a factor of 1.4
        ([0.06, 0.06, 0.07], [0.02, 0.02, 0.03], 0.0, None),  # a difference of 0.04
        ([0.30, 0.31], [0.10, 0.11], 0.0, None),  # two documents
        ([0.50, 0.05, 0.30], [0.10, 0.11, 0.10], 0.0, None),  # the interval includes 0, below the mean
        ([0.10, 0.11, 0.10], [0.50, 0.05, 0.30], 0.0, None),  # above the mean
        ([0.30], [0.10], 0.0, None),
        ([0.30, 0.31, 0.32], [0.10, 0.11, 0.10], 0.15, None),  # heads of the untrained model differ as much
    ):
        named = {
            weights: dict(zip("abc", values, strict=False))
            for weights, values in zip(WEIGHTS, (own, untrained), strict=True)
        }
        runs = [
            (
                Request("axes").with_weights(weights),
                SimpleNamespace(
                    document_means=lambda metric, x=values: x,
                    head_documents=lambda metric, x=values, spread=spread: {
                        (0, head): {name: value + spread * (-1) ** head for name, value in x.items()}
                        for head in range(4)
                    },
                    range_of=lambda metric: (0.0, 1.0),
                ),
            )
            for weights, values in named.items()
        ]
        found = held("key", Runs(runs))
        assert (found is None) == (sentence is None), found
        assert found is None or found.text.startswith(sentence)


def test_cost_of_additive_logits():
    for rises, sentence in (
        (
            [0.4, 0.5, 0.6],
            "With exactly additive logits in all heads the loss rises from 3.00 to 3.50 nats, by 0.50 ± 0.25 (3 "
            "documents).",
        ),
        ([-0.1, 0.1, 0.2], None),
        ([0.5], None),
        ([], None),
    ):
        run = SimpleNamespace(
            measurement=SimpleNamespace(name="residual"),
            document_means=lambda name, x=rises: {i: 3.0 + rise * (name != "loss") for i, rise in enumerate(x)},
            range_of=lambda metric: UNBOUNDED,
        )
        found = held("residual", Runs([(Request("axes"), run)], others=[OtherRun({"trained": run}, 0, None)]))
        assert (found and found.text) == sentence


def test_verbs():
    for now, before, verb in (
        (3, 1, "tripled"),
        (2, 1, "doubled"),
        (1.2, 1, "raised"),
        (10, 1, "raised 10-fold"),
        (1, 2, "halved"),
        (1, 1.4, "lowered"),
        (1, 9, "lowered"),
        (2.4, 1, "raised 2.4-fold"),
        (1, 0, "raised"),
    ):
        assert _verb(now, before) == verb, (now, before)
