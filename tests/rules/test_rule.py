"""Known answers: outcomes of tests; identity: all sentences about numbers are statements of one type of rule."""

from __future__ import annotations

import pytest

from wherewhat.measures.statistics import Interval
from wherewhat.rules.captions import CAPTIONS
from wherewhat.rules.claims.registry import CLAIMS
from wherewhat.rules.findings import FINDINGS
from wherewhat.rules.length_methods import NOTES, VERDICTS
from wherewhat.rules.rule import (
    Judged,
    Number,
    Rule,
    Statement,
    at_least,
    at_most,
    both,
    choose,
    clear,
    differ_by_ratio,
    either,
    less_than,
)
from wherewhat_lab.multihop.claims import TRAINED_CLAIMS

TABLES = {
    "findings": FINDINGS.values(),
    "captions": CAPTIONS.values(),
    "claims": [claim.rule for claim in CLAIMS if claim.rule is not None],
    "length methods": [*VERDICTS.values(), NOTES],
    "multi-hop claims": [claim.rule for claim in TRAINED_CLAIMS],
}


def near(mean, reach=0.01, n=40):
    return Interval(mean, mean - reach, mean + reach, n)


def test_bounds_and_their_combinations():
    for bound, outcomes in (
        (at_least, [True, False, None]),
        (at_most, [False, True, None]),
        (less_than, [False, True, None]),
    ):
        assert [bound(near(x), 1.0).outcome for x in (1.02, 0.98, 1.005)] == outcomes
        assert bound(Interval(5.0, None, None, 1), 1.0).outcome is None
        assert bound(None, 1.0).outcome is None
    assert [at_least(near(1.02, n=n), 1.0).outcome for n in (2, 3)] == [None, True]
    exact = Interval(1.0, 1.0, 1.0, 3)
    assert [bound(exact, 1.0).outcome for bound in (at_least, at_most, less_than)] == [True, True, False]
    assert f"it is {at_least(None, 0.75):.0%}, and {at_most(None, -0.3)}" == "it is at least 75%, and at most -0.3"
    assert [both(), both(True, True), both(True, None), both(None, False)] == [True, True, None, False]
    assert [either(True, None), either(False, None), either(False, False)] == [True, None, False]
    assert both(at_least(near(1.02), 1.0), at_most(near(1.02), 1.0)) is False
    assert choose(Statement("a", False), Statement("b", None), Statement("c"), Statement("d")).text == "c"


def test_evidence_for_a_difference():
    for side, outcomes in (
        ("apart from", [True, True, None]),
        ("above", [True, False, None]),
        ("below", [False, True, None]),
    ):
        assert [clear(near(x), side).outcome for x in (0.02, -0.02, 0.005)] == outcomes
    assert clear(near(0.02), least=0.02).outcome
    assert clear(near(0.02), least=0.03).outcome is None  # too small
    assert clear(near(0.02, n=2)).outcome is None  # two documents
    assert clear(near(0.02, 0.0)).outcome is None  # equal documents
    assert clear(near(0.5, 0.1), reference=0.3).strength == pytest.approx(2)
    sentences = [Statement("a", clear(near(0.05))), Statement("b", at_least(near(1), 0)), Statement("c", strength=3)]
    assert [sentence.strength for sentence in sentences] == [pytest.approx(5), 0, 3]
    assert differ_by_ratio(near(0.2), near(0.4), 2.0)
    assert not differ_by_ratio(near(0.2), near(0.39), 2.0)


def test_a_sentence_in_full_and_in_brief():
    value = near(0.5)
    whole = Statement(lambda words: f"it is {words(value)}", beside="40 documents")
    assert (whole.text, whole.short) == ("it is 0.500 ± 0.010 (40 documents).", "it is 0.50.")
    assert Statement(lambda words: "it is").text == "it is."
    assert Statement("It is so.").short == "It is so."


class Known(dict):
    """Runs by name and weights."""

    def find(self, name, weights=None):
        return self.get((name, weights))


def test_rule_needs_runs_and_their_control():
    def judge(known):
        yield Number("n", near(1.0))
        yield Statement("it holds", True)
        yield Statement("it is open", None)
        yield "a note"

    rule = Rule(judge, ("axes", "heads"), control="random")
    known = Known({("axes", None): 1, ("axes", "random"): 1, ("heads", None): 1})
    assert rule.missing(known) == "heads"
    assert rule.held(known) == []
    known["heads", "random"] = 1
    assert rule.missing(known) is None
    assert [statement.text for statement in rule.held(known)] == ["it holds"]
    judged = rule.judged(known)
    assert isinstance(judged, Judged)
    assert [len(part) for part in (judged.numbers, judged.statements, judged.notes)] == [1, 2, 1]


@pytest.mark.parametrize("table", TABLES)
def test_one_type_of_rule_is_behind_all_sentences(table):
    for rule in TABLES[table]:
        assert type(rule) is Rule
        assert rule.needs  # each says what it reads
