"""Claims about heads and frequencies, and the claims that are not judged on a pretrained model."""

from __future__ import annotations

from itertools import pairwise
from statistics import mode

from wherewhat.measures.statistics import wilson
from wherewhat.measures.swaps import LABELS
from wherewhat.report.claims.claim import (
    CLEAR,
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
    head_means,
    model_mean,
)
from wherewhat.report.data import head_labels
from wherewhat.runs.results import StoredRun

SLASH = 0.1
"""Smallest mean attention at one distance of a slash-dominant head."""
TOP = 0.1
"""Share of all heads that are called retrieval heads."""

_LABORATORY = "about trained small models: see wherewhat multihop"


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
    positional = model_mean(run, "s_pos_band_1", less=f"s_pos_band_{slow}")
    symbolic = model_mean(run, f"s_sym_band_{slow}", less="s_sym_band_1")
    without_fast = model_mean(run, "s_pos_change_without_band_1")
    without_slow = model_mean(run, f"s_sym_change_without_band_{slow}")
    titles = {
        f"positional score of planes, band 1 minus band {slow}": positional,
        f"symbolic score of planes, band {slow} minus band 1": symbolic,
        "change of the positional score without band 1": without_fast,
        f"change of the symbolic score without band {slow}": without_slow,
    }
    numbers = [ClaimNumber(title, value, 0.0, "no difference") for title, value in titles.items()]
    parts = [
        ClaimPart(
            f"scores of single planes differ by at least {CLEAR} in the stated direction",
            both(at_least(positional, CLEAR), at_least(symbolic, CLEAR)),
            "single planes are meant",
        ),
        ClaimPart(
            "without the fastest band s_pos falls by at least 0.01, and without the slowest one s_sym does",
            both(at_most(without_fast, -0.01), at_most(without_slow, -0.01)),
            "heads with masked bands are meant",
        ),
    ]
    return Judged(numbers, parts, ["Frequency IDs are linear means; band 1 is the fastest."])


@claim(
    18,
    source=URRUTIA,
    change="another temperature or block size of swaps, frequency IDs with softmax weights",
    needs=("heads",),
)
def anticorrelation(evidence: Evidence) -> Judged:
    """s_pos and s_sym are anticorrelated over heads, and both correlate with the mean frequency."""
    run, random = evidence.run("heads"), evidence.find("heads", "random")
    titles = {
        "corr_pos_sym": "correlation of s_pos and s_sym over heads",
        "corr_pos_frequency": "correlation of s_pos and mean frequency ID",
        "corr_sym_frequency": "correlation of s_sym and mean frequency ID",
    }
    found = {name: model_mean(run, name) for name in titles if run.values(name)}
    numbers = [ClaimNumber(titles[x], value, control_mean(random, x), "random model") for x, value in found.items()]
    parts = [
        ClaimPart(
            "s_pos and s_sym correlate by at most -0.3",
            at_most(found.get("corr_pos_sym"), -0.3),
            "only the two scores are meant",
        )
    ]
    if "corr_pos_frequency" in found:
        outcome = both(at_most(found["corr_pos_frequency"], -0.3), at_least(found.get("corr_sym_frequency"), 0.3))
        statement = "mean frequency ID (1 is the fastest): at most -0.3 with s_pos and at least 0.3 with s_sym"
        return Judged(numbers, [*parts, ClaimPart(statement, outcome, "only the frequencies are meant")])
    return Judged(numbers, parts, ["No layer rotates: there are no frequencies to correlate with."])


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
        kept = wilson([float(sizes[1][place] >= SLASH and lags[0][place] == lags[1][place]) for place in slashes])
        base = sum(size >= SLASH for size in sizes[1].values()) / len(sizes[1])
        numbers.append(
            ClaimNumber("slash-dominant heads with the same slash on random tokens", kept, base, "share of all heads")
        )
        statement = f"most ({MOST:.0%}) of the {len(slashes)} slash-dominant heads (at least {SLASH}) are the same"
        parts.append(ClaimPart(statement, at_least(kept, MOST), "slash-dominant heads are meant"))
    labels = [head_labels(run) for run in (text, random)]
    places = [place for place in labels[0] if place in labels[1]]
    if places:
        equal = wilson([float(labels[0][place] == labels[1][place]) for place in places])
        numbers.append(
            ClaimNumber("heads with the same label on random tokens", equal, _agreement(text), "two documents")
        )
        statement = f"at least {MOST:.0%} of the heads have the same label"
        parts.append(ClaimPart(statement, at_least(equal, MOST), "labels of heads are meant"))
    return Judged(numbers, parts, [] if parts else ["No head has a label or a slash on both kinds of text."])


@claim(
    24,
    source="arXiv 2410.10819 and 2511.11579",
    change="an intervention instead of attention scores: wherewhat plan --compare symbolic --compare random",
    needs=("heads",),
)
def retrieval_heads(evidence: Evidence) -> Judged:
    """Retrieval heads are the symbolic ones."""
    run = evidence.run("heads")
    labels, symbolic = head_labels(run), LABELS.index("symbolic")
    if not labels:
        return Judged([], [], ["No head has a label."])
    base = sum(code == symbolic for code in labels.values()) / len(labels)
    numbers, parts = [], []
    for metric, what in (("retrieval", "attention to the next token"), ("induction", "induction")):
        scores = {place: value for place, value in head_means(run, metric).items() if place in labels}
        top = sorted(scores, key=lambda place: -scores[place])[: max(FEWEST_HEADS, round(TOP * len(scores)))]
        if len(top) < FEWEST_HEADS:
            continue
        share = wilson([float(labels[place] == symbolic) for place in top])
        numbers.append(
            ClaimNumber(f"symbolic among the {len(top)} heads with most {what}", share, base, "of all heads")
        )
        statement = f"the share is above that of all heads, and at least one half: {what}"
        parts.append(
            ClaimPart(statement, at_least(share, max(base, 0.5)), f"retrieval heads are those with most {what}")
        )
    return Judged(numbers, parts, [] if parts else ["No head has scores of retrieval or induction."])


def _agreement(run: StoredRun) -> float | None:
    """Return the share of heads with the same label on two documents, mean over pairs of successive ones."""
    found = []
    for values in run.head_documents("label").values():
        listed = list(values.values())
        found += [float(one == two) for one, two in pairwise(listed)]
    return sum(found) / len(found) if found else None


CLAIMS = (
    frequency_roles,
    anticorrelation,
    random_tokens,
    retrieval_heads,
    Claim(
        11,
        "Successful learning comes with pure heads; purity precedes or coincides with accuracy.",
        "arXiv 2605.31558",
        reason=_LABORATORY,
    ),
    Claim(
        12,
        "Number needs positional and symbolic heads, letter only symbolic ones.",
        "arXiv 2605.31558",
        reason=_LABORATORY,
    ),
    Claim(13, "Hops are learned in order for number, together for letter.", "arXiv 2605.31558", reason=_LABORATORY),
    Claim(
        14,
        "Heads implement Index, Retrieval and Reflexive; Reflexive is symbolic.",
        "arXiv 2605.31558",
        reason=_LABORATORY,
    ),
    Claim(
        15, "One RoPE layer realises Index and Retrieval; discrepancy bounds.", "arXiv 2605.31558", reason=_LABORATORY
    ),
    Claim(
        20,
        "Un-rotating the planes slower than one band of high norm is harmless.",
        "ICLR 2026, PR1PPxvG9Q",
        reason="not measured yet: masking sets planes to zero, and un-rotating them is another intervention",
    ),
    Claim(
        23,
        "Massive values of q and k in slow planes matter for reading context, not for what is remembered.",
        "arXiv 2502.01563",
        reason="not measured yet: it needs masking of single dimensions, and questions about remembered facts",
    ),
)
