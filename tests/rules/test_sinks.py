"""Known answers: the sentence about labels counts sinks apart, names both versions, and needs support."""

from __future__ import annotations

import pytest

from wherewhat.measures.swaps import LABELS, SCORE_LABELS
from wherewhat.rules.findings import FINDINGS
from wherewhat.runs.collection import Runs
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.scores import UNBOUNDED


class Labelled:
    """A run of heads with given numbers of labels in each document, and over all of them together."""

    def __init__(self, documents, together, all_keys):
        self.documents, self.total = documents, sum(together.values())
        self._together = {"label_no_sink": together, "label": all_keys}

    def labels(self, metric):
        counts = self._together[metric]
        codes = [LABELS.index(name) for name in counts for _ in range(counts[name])]
        return {(0, head): code for head, code in enumerate(codes)}

    def document_means(self, metric):
        names = {f"heads_{name}_no_sink": name for name in SCORE_LABELS} | {"heads_sink": "sink"}
        return {str(i): counts.get(names[metric], 0) / self.total for i, counts in enumerate(self.documents)}

    def range_of(self, metric):
        return UNBOUNDED


def held(name, runs):
    """The finding of a rule; None if the numbers do not support it."""
    return next(iter(FINDINGS[name].held(runs)), None)


def runs_of(own, untrained=None):
    request = Request("heads", model=ModelRequest(model="model"))
    control = [] if untrained is None else [(request.with_weights("random"), untrained)]
    return Runs([(request, own), *control])


TRAINED = {"sink": 130, "positional": 14, "symbolic": 43, "mixed": 83}
ALL_KEYS = {"positional": 9, "symbolic": 138, "mixed": 123}
NEAR = [TRAINED | {"symbolic": 43 + more, "mixed": 83 - more} for more in (-2, 0, 1, 1)]
UNTRAINED = Labelled([{"mixed": 270}] * 4, {"mixed": 270}, {"mixed": 270})


def test_sentence_has_both_versions():
    found = held("pure heads", runs_of(Labelled(NEAR, TRAINED, ALL_KEYS), UNTRAINED))
    assert found.text == (
        "Of 270 heads, 130 are attention sinks; of the others, 14 follow positions alone, 43 contents alone (in single "
        "documents 14 and 41 to 44; over all keys, with sinks, 9 and 138; in one untrained model 0 and 0; 4 documents)."
    )
    assert found.link == "heads?label=positional,symbolic"


def test_without_sinks_the_versions_agree():
    counts = {"positional": 100, "mixed": 170}
    found = held("pure heads", runs_of(Labelled([counts] * 3, counts, counts), UNTRAINED))
    assert found.text.endswith(
        "100 follow positions alone (in single documents 100; in one untrained model 0; 3 documents)."
    )


@pytest.mark.parametrize(
    ("documents", "untrained"),
    [
        (NEAR[:1], None),  # one document
        (NEAR[:2], UNTRAINED),  # two
        (
            [{"mixed": 270}, {"mixed": 270}, {"symbolic": 200, "positional": 70}, {"mixed": 270}],
            UNTRAINED,
        ),  # one of four
        (NEAR, Labelled(NEAR, TRAINED, ALL_KEYS)),  # as many in an untrained model
    ],
)
def test_counts_without_support_are_no_finding(documents, untrained):
    """A count needs its interval over documents, not only one over heads."""
    assert held("pure heads", runs_of(Labelled(documents, TRAINED, ALL_KEYS), untrained)) is None


def test_uniform_heads_are_no_sinks():
    counts = {"sink": 200, "uniform": 70}
    found = held("uniform heads", runs_of(Labelled([counts] * 3, counts, {"symbolic": 200, "uniform": 70}), UNTRAINED))
    assert found.text.startswith("70 of 270 heads attend uniformly")
