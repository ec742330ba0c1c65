"""Claims about heads and frequencies, and the claims that are not judged on a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import mode

from wherewhat.measures.statistics import interval, wilson
from wherewhat.measures.swaps import LABELS
from wherewhat.report.claims.claim import (
    CLEAR,
    COSTLY,
    FEWEST_HEADS,
    MOST,
    URRUTIA,
    Claim,
    ClaimNumber,
    ClaimPart,
    Evidence,
    Judged,
    at_least,
    at_most,
    both,
    claim,
    control_mean,
    document_difference,
    document_mean,
    head_means,
    model_mean,
)
from wherewhat.report.data import head_labels
from wherewhat.runs.results import StoredRun
from wherewhat.scores import SHARE

SLASH = 0.1
"""Smallest mean attention at one distance of a slash-dominant head."""
TOP = 0.1
"""Share of all heads that are called retrieval heads."""

VERSIONS = {"without the sink": "_no_sink", "over all keys": ""}
"""Endings of the names of scores: of the keys after the sink, and of all keys, as in the papers."""

_AS_USUAL = f"at least {MOST:.0%}, or 0.1 less than on two documents of text"
_LABORATORY = {
    11: "Successful learning comes with pure heads; purity precedes or coincides with accuracy.",
    12: "Number needs positional and symbolic heads, letter only symbolic ones.",
    13: "Hops are learned in order for number, together for letter.",
    14: "Heads implement Index, Retrieval and Reflexive; Reflexive is symbolic.",
    15: "One RoPE layer realises Index and Retrieval; discrepancy bounds.",
}
"""Claims of arXiv 2605.31558 about trained small models."""


@claim(
    17,
    source=URRUTIA,
    change="other bands, scores of planes weighted by their logits",
    needs=("frequencies",),
    rotary=True,
)
def frequency_roles(evidence: Evidence) -> Judged:
    """Slow frequencies are symbolic, fast ones positional; masking them moves heads accordingly."""
    run = evidence.run("frequencies")
    slow = int(run.config.bands)
    numbers, parts = [], []
    for version, ending in VERSIONS.items():
        s_pos, s_sym = f"s_pos{ending}", f"s_sym{ending}"
        positional = model_mean(run, f"{s_pos}_band_1", less=f"{s_pos}_band_{slow}")
        symbolic = model_mean(run, f"{s_sym}_band_{slow}", less=f"{s_sym}_band_1")
        without_fast = model_mean(run, f"{s_pos}_change_without_band_1")
        without_slow = model_mean(run, f"{s_sym}_change_without_band_{slow}")
        titles = {
            f"positional score of planes, band 1 minus band {slow}": positional,
            f"symbolic score of planes, band {slow} minus band 1": symbolic,
            "change of the positional score without band 1": without_fast,
            f"change of the symbolic score without band {slow}": without_slow,
        }
        numbers += [ClaimNumber(f"{title}, {version}", value, 0.0, "no difference") for title, value in titles.items()]
        parts += [
            ClaimPart(
                f"{version}: scores of single planes differ by at least {CLEAR} in the stated direction",
                both(at_least(positional, CLEAR), at_least(symbolic, CLEAR)),
                f"single planes are meant, scored {version}",
            ),
            ClaimPart(
                f"{version}: without the fastest band s_pos falls by at least 0.01, and without the slowest one s_sym "
                "does",
                both(at_most(without_fast, -0.01), at_most(without_slow, -0.01)),
                f"heads with masked bands are meant, scored {version}",
            ),
        ]
    return Judged(numbers, parts, ["Band 1 is the fastest."])


@claim(
    18,
    source=URRUTIA,
    change="another temperature or block size of swaps, frequency IDs with linear weights",
    needs=("heads",),
)
def anticorrelation(evidence: Evidence) -> Judged:
    """s_pos and s_sym are anticorrelated over heads, and both correlate with the mean frequency."""
    run, random = evidence.run("heads"), evidence.find("heads", "random")
    titles = {
        "corr_pos_sym": "correlation of s_pos and s_sym over heads",
        "corr_pos_frequency_softmax": "correlation of s_pos and mean frequency ID",
        "corr_sym_frequency_softmax": "correlation of s_sym and mean frequency ID",
    }
    numbers, parts, rotated = [], [], False
    for version, ending in VERSIONS.items():
        found = {name: model_mean(run, f"{name}{ending}") for name in titles if run.values(f"{name}{ending}")}
        numbers += [
            ClaimNumber(f"{titles[name]}, {version}", value, control_mean(random, f"{name}{ending}"), "random model")
            for name, value in found.items()
        ]
        parts.append(
            ClaimPart(
                f"{version}: s_pos and s_sym correlate by at most -0.3",
                at_most(found.get("corr_pos_sym"), -0.3),
                f"only the two scores {version} are meant",
            )
        )
        if "corr_pos_frequency_softmax" not in found:
            continue
        rotated = True
        outcome = both(
            at_most(found["corr_pos_frequency_softmax"], -0.3), at_least(found.get("corr_sym_frequency_softmax"), 0.3)
        )
        statement = (
            f"{version}: mean frequency ID (1 is the fastest), at most -0.3 with s_pos and at least 0.3 with s_sym"
        )
        parts.append(ClaimPart(statement, outcome, f"only the frequencies are meant, with scores {version}"))
    notes = [] if rotated else ["No layer rotates: there are no frequencies to correlate with."]
    return Judged(numbers, parts, notes)


@claim(
    20,
    source="ICLR 2026, PR1PPxvG9Q",
    change="another trained length than the stated one, longer texts, the band of each layer instead of their mean",
    needs=("frequencies",),
    rotary=True,
)
def unrotated_planes(evidence: Evidence) -> Judged:
    """One band of planes has a high norm, at d/2 · log_base(L / 3.657); un-rotating the slower ones is harmless."""
    run = evidence.run("frequencies")
    peak, gap = document_mean(run, "band_peak"), document_difference(run, "band_peak", run, "band_predicted")
    if gap is None:
        return Judged([], [], ["The model does not state its trained length, from which the band is predicted."])
    predicted = control_mean(run, "band_predicted")
    limit = 0.1 * evidence.planes
    losses = ("loss_unrotated_slow", "loss_unrotated_slow_random", "loss_without_slow")
    rise, random, masked = (model_mean(run, name, less="loss") for name in losses)
    numbers = [
        ClaimNumber("plane of the largest norm, mean over layers, 0 the fastest", peak, predicted, "predicted"),
        ClaimNumber("rise of the loss with slower planes un-rotated", rise, random.mean, "random planes un-rotated"),
        ClaimNumber("rise of the loss with slower planes un-rotated", rise, masked.mean, "slower planes masked"),
    ]
    parts = [
        ClaimPart(
            "the plane of the largest norm is at most a tenth of the planes away from the predicted one",
            both(at_least(gap, -limit), at_most(gap, limit)),
            "only the index of the band is meant",
        ),
        ClaimPart(
            f"un-rotating the planes slower than the predicted one costs at most {COSTLY} nats",
            at_most(rise, COSTLY),
            "only un-rotating is meant",
        ),
    ]
    return Judged(numbers, parts, ["The predicted index follows from the trained length of the configuration."])


@claim(
    22, source="arXiv 2601.08297", change="another threshold of a slash, longer texts", needs=("heads", "random tokens")
)
def random_tokens(evidence: Evidence) -> Judged:
    """Slash-dominant heads are the same on random tokens."""
    text, random = evidence.run("heads"), evidence.run("random tokens")
    sizes = [head_means(run, "slash_max") for run in (text, random)]
    lags = [{place: mode(x.values()) for place, x in run.head_documents("slash_lag").items()} for run in (text, random)]
    slashes = [place for place, size in sizes[0].items() if size >= SLASH and place in sizes[1]]
    numbers, parts = [], []
    if len(slashes) >= FEWEST_HEADS:
        kept = wilson([float(sizes[1][x] >= SLASH and lags[0][x] == lags[1][x]) for x in slashes])
        usual = _agreement(text, slashes, "slash_lag")
        numbers.append(
            ClaimNumber("slash-dominant heads with the same slash on random tokens", kept, usual, "two documents")
        )
        statement = f"of {len(slashes)} slash-dominant heads (at least {SLASH}), share with the same: {_AS_USUAL}"
        parts.append(ClaimPart(statement, at_least(kept, min(MOST, usual - 0.1)), "slash-dominant heads are meant"))
    labels = [head_labels(run) for run in (text, random)]
    places = [place for place in labels[0] if place in labels[1]]
    if places:
        equal = wilson([float(labels[0][place] == labels[1][place]) for place in places])
        usual = _agreement(text, places, "label_no_sink")
        numbers.append(ClaimNumber("heads with the same label on random tokens", equal, usual, "two documents"))
        parts.append(
            ClaimPart(
                f"share of heads with the same label: {_AS_USUAL}",
                at_least(equal, min(MOST, usual - 0.1)),
                "labels of heads are meant",
            )
        )
    return Judged(numbers, parts, [] if parts else ["No head has a label or a slash on both kinds of text."])


@claim(
    23,
    source="arXiv 2502.01563",
    change="facts of other kinds (wherewhat choices), other retrieval than copying, values replaced in single layers",
    needs=("massive",),
    rotary=True,
)
def massive_values(evidence: Evidence) -> Judged:
    """Massive values of q and k in slow planes matter for reading context, not for what is remembered."""
    run = evidence.run("massive")
    heads, slow = document_mean(run, "massive_heads"), document_mean(run, "massive_slow")
    context, facts = (model_mean(run, f"{name}_lost_massive") for name in ("planted", "facts"))
    numbers = [
        ClaimNumber("share of heads with massive values", heads, control_mean(run, "massive_heads_v"), "of v"),
        ClaimNumber("share of them in slow planes", slow, control_mean(run, "massive_slow_even"), "all dimensions"),
    ]
    for control, title in (("random", "random dimensions"), ("later", "first token unchanged")):
        numbers += [
            ClaimNumber(f"lost share of the gain from {what}", value, control_mean(run, f"{name}_{control}"), title)
            for what, value, name in (
                ("planted runs", context, "planted_lost_massive"),
                ("remembered facts", facts, "facts_lost_massive"),
            )
        ]
    above = document_difference(run, "massive_slow", run, "massive_slow_even")
    reads = at_least(document_difference(run, "planted_lost_massive", run, "planted_lost_massive_random"), CLEAR)
    lost = [run.document_means(f"{name}_lost_massive") for name in ("planted", "facts")]
    excess = [lost[1][name] - 0.5 * share for name, share in lost[0].items() if name in lost[1]]
    fewer = at_most(interval(excess), 0.0) if excess else None
    parts = [
        ClaimPart(
            f"at least half of the heads have massive values; at least {MOST:.0%} of these are in slow planes, and at "
            f"least {CLEAR} more than of all dimensions",
            both(at_least(heads, 0.5), at_least(slow, MOST), at_least(above, CLEAR)),
            "only their place is meant",
        ),
        ClaimPart(
            f"without them at least {CLEAR} more of the gain from planted runs is lost than without random dimensions",
            reads,
            "only reading context is meant",
        ),
        ClaimPart(
            "the lost share of the gain from remembered facts is at most half of that from planted runs",
            None if fewer and not reads else fewer,  # half of nothing is no comparison
            "only the comparison with remembered facts is meant",
        ),
    ]
    notes = [
        f"The unchanged model gains {gain.mean:.2f} nats from {what}."
        for what, gain in (("planted runs", model_mean(run, "planted")), ("facts", model_mean(run, "facts")))
        if gain.n
    ]
    if not facts.n:
        notes.append("The model does not know the facts, or has no tokenizer for them.")
    return Judged(numbers, parts, notes)


@claim(
    24,
    source="arXiv 2410.10819 and 2511.11579",
    change="an intervention instead of attention scores: wherewhat plan --compare symbolic --compare random",
    needs=("heads",),
)
def retrieval_heads(evidence: Evidence) -> Judged:
    """Retrieval heads are the symbolic ones."""
    run = evidence.run("heads")
    numbers, parts = [], []
    for version, ending in VERSIONS.items():
        for metric, what in (("retrieval", "attention to the next token"), ("induction", "induction")):
            areas = ranked_higher(run, metric, ending)
            if not areas:
                continue
            area = interval(areas).within(SHARE)
            title = (
                f"probability that one of the {TOP:.0%} of heads with most {what} is more symbolic than another head, "
                f"scored {version}"
            )
            numbers.append(ClaimNumber(title, area, 0.5, "chance"))
            statement = f"{version}: it is at least {MOST}, {what}"
            condition = f"retrieval heads are those with most {what}, and scores are {version}"
            parts.append(ClaimPart(statement, at_least(area, MOST), condition))
    if not parts:
        return Judged(numbers, parts, ["Too few heads have scores."])
    symbolic = LABELS.index("symbolic")
    no_sink, all_keys = (list(head_labels(run, all_keys=every).values()) for every in (False, True))
    note = (
        f"Attention sinks: {no_sink.count(LABELS.index('sink'))} of {len(no_sink)} heads; pure symbolic heads among "
        f"the others: {no_sink.count(symbolic)}; over all keys, with sinks: {all_keys.count(symbolic)}."
    )
    return Judged(numbers, parts, [note])


def _agreement(run: StoredRun, places: Sequence[tuple[int, int]], metric: str) -> float:
    """Return the share of heads with the same value on two documents, over all pairs; 1 for a single document."""
    found = run.head_documents(metric)
    equal = [one == two for place in places for one, two in combinations(found[place].values(), 2)]
    return sum(equal) / len(equal) if equal else 1.0


def ranked_higher(run: StoredRun, metric: str, ending: str) -> list[float]:
    """Return for each document how often a head with a high value of a metric is more symbolic than another head.

    That is the area under the ROC curve of ``s_sym - s_pos`` for the share ``TOP`` of heads with the highest values:
    0.5 if they are unrelated, 1 if they are the most symbolic heads. ``ending`` is that of the scores' names.
    """
    scores, s_pos, s_sym = (run.head_documents(name) for name in (metric, f"s_pos{ending}", f"s_sym{ending}"))
    areas = []
    for document in run.documents:
        both_scores = [
            (values[document], s_sym[place][document] - s_pos[place][document])
            for place, values in scores.items()
            if all(document in found.get(place, {}) for found in (scores, s_pos, s_sym))
        ]
        ranked = [symbolic for _, symbolic in sorted(both_scores, key=lambda one: -one[0])]
        count = max(FEWEST_HEADS, round(TOP * len(ranked)))
        top, rest = ranked[:count], ranked[count:]
        if rest:
            wins = sum((one > two) + 0.5 * (one == two) for one in top for two in rest)
            areas.append(wins / len(top) / len(rest))
    return areas


CLAIMS = (
    frequency_roles,
    anticorrelation,
    unrotated_planes,
    random_tokens,
    massive_values,
    retrieval_heads,
    *(
        Claim(number, statement, "arXiv 2605.31558", reason="about trained small models: see wherewhat multihop")
        for number, statement in _LABORATORY.items()
    ),
)
