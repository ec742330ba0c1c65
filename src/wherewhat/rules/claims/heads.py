"""Claims about heads and frequencies, and the claims that are not judged on a pretrained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import mode

from wherewhat.measures.statistics import in_words, interval, wilson
from wherewhat.measures.swaps import LABELS
from wherewhat.rules.claims.claim import CLEAR, COSTLY, FEWEST_HEADS, MOST, URRUTIA, Claim, Evidence, claim
from wherewhat.rules.numbers import control_mean, head_labels, head_means, mean, over_documents
from wherewhat.rules.rule import Item, Number, Statement, at_least, at_most
from wherewhat.runs.results import StoredRun
from wherewhat.scores import SHARE

SLASH = 0.1
"""Smallest mean attention at one distance of a slash-dominant head."""
LITTLE = 0.1
"""Share of a gain whose loss counts as harmless."""
TOP = 0.1
"""Share of all heads that are called retrieval heads."""

VERSIONS = {"without the sink": "_no_sink", "over all keys": ""}
"""Endings of the names of scores: of the keys after the sink, and of all keys, as in the papers."""

_AS_USUAL = f"at least {MOST:.0%}, or 0.1 less than on two documents of text"
_LABORATORY = {
    11: (
        "Learning makes heads pure",
        "Successful learning comes with pure heads; purity precedes or coincides with accuracy.",
    ),
    12: ("Number needs both kinds", "Number needs positional and symbolic heads, letter only symbolic ones."),
    13: ("Hops are learned in order", "Hops are learned in order for number, together for letter."),
    14: ("Three functions of heads", "Heads implement Index, Retrieval and Reflexive; Reflexive is symbolic."),
    15: ("One layer is sufficient", "One RoPE layer realises Index and Retrieval; discrepancy bounds."),
}
"""Claims of arXiv 2605.31558 about trained small models: title and statement by number."""


@claim(
    17,
    "frequencies",
    title="Slow planes are symbolic",
    source=URRUTIA,
    change="other bands, scores of planes weighted by their logits",
    rotary=True,
)
def frequency_roles(evidence: Evidence) -> Iterator[Item]:
    """Slow frequencies are symbolic, fast ones positional; masking them moves heads accordingly."""
    run = evidence.run("frequencies")
    slow = int(run.config.bands)
    for version, ending in VERSIONS.items():
        s_pos, s_sym = f"s_pos{ending}", f"s_sym{ending}"
        positional = mean(run, f"{s_pos}_band_1", less=f"{s_pos}_band_{slow}")
        symbolic = mean(run, f"{s_sym}_band_{slow}", less=f"{s_sym}_band_1")
        without_fast = mean(run, f"{s_pos}_change_without_band_1")
        without_slow = mean(run, f"{s_sym}_change_without_band_{slow}")
        for title, value in (
            (f"positional score of planes, band 1 minus band {slow}", positional),
            (f"symbolic score of planes, band {slow} minus band 1", symbolic),
            ("change of the positional score without band 1", without_fast),
            (f"change of the symbolic score without band {slow}", without_slow),
        ):
            yield Number(f"{title}, {version}", value, 0.0, "no difference")
        fast, slow_planes = at_least(positional, CLEAR), at_least(symbolic, CLEAR)
        statement = f"{version}: scores of single planes differ by {fast} in the stated direction"
        yield Statement(statement, fast, slow_planes, condition=f"single planes are meant, scored {version}")
        yield Statement(
            f"{version}: without the fastest band s_pos falls by at least 0.01, and without the slowest one s_sym does",
            at_most(without_fast, -0.01),
            at_most(without_slow, -0.01),
            condition=f"heads with masked bands are meant, scored {version}",
        )
    yield "Band 1 is the fastest."


@claim(
    18,
    "heads",
    title="Scores are anticorrelated",
    source=URRUTIA,
    change="another temperature or block size of swaps, frequency IDs with linear weights",
)
def anticorrelation(evidence: Evidence) -> Iterator[Item]:
    """s_pos and s_sym are anticorrelated over heads, and both correlate with the mean frequency."""
    run, random = evidence.run("heads"), evidence.find("heads", "random")
    titles = {
        "corr_pos_sym": "correlation of s_pos and s_sym over heads",
        "corr_pos_frequency_softmax": "correlation of s_pos and mean frequency ID",
        "corr_sym_frequency_softmax": "correlation of s_sym and mean frequency ID",
    }
    rotated = False
    for version, ending in VERSIONS.items():
        values = {name: mean(run, f"{name}{ending}") for name in titles}
        for name, value in values.items():
            if value.n:
                control = control_mean(random, f"{name}{ending}")
                yield Number(f"{titles[name]}, {version}", value, control, "random model")
        scores, with_pos = (at_most(values[name], -0.3) for name in ("corr_pos_sym", "corr_pos_frequency_softmax"))
        with_sym = at_least(values["corr_sym_frequency_softmax"], 0.3)
        condition = f"only the two scores {version} are meant"
        yield Statement(f"{version}: s_pos and s_sym correlate by {scores}", scores, condition=condition)
        if values["corr_pos_frequency_softmax"].n:
            rotated = True
            statement = (
                f"{version}: mean frequency ID (1 is the fastest), {with_pos} with s_pos and {with_sym} with s_sym"
            )
            condition = f"only the frequencies are meant, with scores {version}"
            yield Statement(statement, with_pos, with_sym, condition=condition)
    if not rotated:
        yield "No layer rotates: there are no frequencies to correlate with."


@claim(
    20,
    "frequencies",
    title="One band of high norm",
    source="ICLR 2026, PR1PPxvG9Q",
    change="another trained length than the stated one, longer texts, the band of each layer instead of their mean",
    rotary=True,
)
def unrotated_planes(evidence: Evidence) -> Iterator[Item]:
    """One band of planes has a high norm, at d/2 · log_base(L / 3.657); un-rotating the slower ones is harmless."""
    run = evidence.run("frequencies")
    gap, limit = mean(run, "band_peak", less="band_predicted"), 0.1 * evidence.planes
    if not gap.n:
        yield "The model does not state its trained length, from which the band is predicted."
        return
    title = "plane of the largest norm, mean over layers, 0 the fastest"
    yield Number(title, mean(run, "band_peak"), control_mean(run, "band_predicted"), "predicted")
    rise = mean(run, "loss_unrotated_slow", less="loss")
    for loss, title in (
        ("loss_unrotated_slow_random", "random planes un-rotated"),
        ("loss_without_slow", "slower planes masked"),
    ):
        yield Number("rise of the loss with slower planes un-rotated", rise, mean(run, loss, less="loss").mean, title)
    yield Statement(
        "the plane of the largest norm is at most a tenth of the planes away from the predicted one",
        at_least(gap, -limit),
        at_most(gap, limit),
        condition="only the index of the band is meant",
    )
    harmless = at_most(rise, COSTLY)
    statement = f"un-rotating the planes slower than the predicted one costs {harmless} nats"
    yield Statement(statement, harmless, condition="only un-rotating is meant")
    yield "The predicted index follows from the trained length of the configuration."


@claim(
    22,
    "heads",
    "random tokens",
    title="Slash heads ignore tokens",
    source="arXiv 2601.08297",
    change="another threshold of a slash, longer texts",
)
def random_tokens(evidence: Evidence) -> Iterator[Item]:
    """Slash-dominant heads are the same on random tokens."""
    text = evidence.run("heads")
    runs = text, evidence.run("random tokens")
    sizes, random_sizes = (head_means(run, "slash_max") for run in runs)
    lags, random_lags = (
        {place: mode(values.values()) for place, values in run.head_documents("slash_lag").items()} for run in runs
    )
    slashes = [place for place, size in sizes.items() if size >= SLASH and place in random_sizes]
    labels, random_labels = (head_labels(run) for run in runs)
    places = [place for place in labels if place in random_labels]
    if len(slashes) >= FEWEST_HEADS:
        kept = wilson([float(random_sizes[x] >= SLASH and lags[x] == random_lags[x]) for x in slashes])
        usual = _agreement(text, slashes, "slash_lag")
        yield Number("slash-dominant heads with the same slash on random tokens", kept, usual, "two documents")
        statement = f"of {len(slashes)} slash-dominant heads (at least {SLASH}), share with the same: {_AS_USUAL}"
        as_usual = at_least(kept, min(MOST, usual - 0.1))
        yield Statement(statement, as_usual, condition="slash-dominant heads are meant")
    if places:
        equal = wilson([float(labels[place] == random_labels[place]) for place in places])
        usual = _agreement(text, places, "label_no_sink")
        yield Number("heads with the same label on random tokens", equal, usual, "two documents")
        as_usual = at_least(equal, min(MOST, usual - 0.1))
        yield Statement(
            f"share of heads with the same label: {_AS_USUAL}", as_usual, condition="labels of heads are meant"
        )
    elif len(slashes) < FEWEST_HEADS:
        yield "No head has a label or a slash on both kinds of text."


@claim(
    23,
    "massive",
    title="Massive values aid context",
    source="arXiv 2502.01563",
    change="facts of other kinds (wherewhat choices), other retrieval than copying, values replaced in single layers",
    rotary=True,
)
def massive_values(evidence: Evidence) -> Iterator[Item]:
    """Massive values of q and k in slow planes matter for reading context, not for what is remembered."""
    run = evidence.run("massive")
    heads, slow = mean(run, "massive_heads"), mean(run, "massive_slow")
    yield Number("share of heads with massive values", heads, control_mean(run, "massive_heads_v"), "of v")
    yield Number("share of them in slow planes", slow, control_mean(run, "massive_slow_even"), "all dimensions")
    gains = {"planted": "planted runs", "facts": "remembered facts"}
    for control, title in (("random", "random dimensions"), ("later", "first token unchanged")):
        for name, what in gains.items():
            lost = f"{name}_lost_massive"
            control_value = control_mean(run, f"{lost}_{control}")
            yield Number(f"lost share of the gain from {what}", mean(run, lost), control_value, title)
    half, most = at_least(heads, 0.5), at_least(slow, MOST)
    more = at_least(mean(run, "massive_slow", less="massive_slow_even"), CLEAR)
    yield Statement(
        f"at least half of the heads have massive values; {most:.0%} of these are in slow planes, and {more} more than "
        "of all dimensions",
        half,
        most,
        more,
        condition="only their place is meant",
    )
    reads = at_least(mean(run, "planted_lost_massive", less="planted_lost_massive_random"), CLEAR)
    statement = f"without them {reads} more of the gain from planted runs is lost than without random dimensions"
    yield Statement(statement, reads, condition="only reading context is meant")
    excess = over_documents(
        run, lambda planted, facts: facts - 0.5 * planted, "planted_lost_massive", "facts_lost_massive"
    )
    fewer = at_most(excess, 0.0).outcome
    yield Statement(
        "the lost share of the gain from remembered facts is at most half of that from planted runs",
        None if fewer and not reads.outcome else fewer,  # half of nothing is no comparison
        condition="only the comparison with remembered facts is meant",
    )
    for name, what in (("planted", "planted runs"), ("facts", "facts")):
        gain = mean(run, name)
        if gain.n:
            yield f"The unchanged model gains {gain.mean:.2f} nats from {what}."
    if not mean(run, "facts_lost_massive").n:
        yield "The model does not know the facts, or has no tokenizer for them."


@claim(
    24,
    "heads",
    title="Retrieval is symbolic",
    source="arXiv 2410.10819 and 2511.11579",
    change="an intervention instead of attention scores: wherewhat plan --compare symbolic --compare random",
)
def retrieval_heads(evidence: Evidence) -> Iterator[Item]:
    """Retrieval heads are the symbolic ones."""
    run, judged = evidence.run("heads"), False
    for version, ending in VERSIONS.items():
        for metric, what in (("retrieval", "attention to the next token"), ("induction", "induction")):
            areas = ranked_higher(run, metric, ending)
            if not areas:
                continue
            judged = True
            area = interval(areas).within(SHARE)
            title = (
                f"probability that one of the {TOP:.0%} of heads with most {what} is more symbolic than another head, "
                f"scored {version}"
            )
            yield Number(title, area, 0.5, "chance")
            high = at_least(area, MOST)
            condition = f"retrieval heads are those with most {what}, and scores are {version}"
            yield Statement(f"{version}: it is {high}, {what}", high, condition=condition)
    if not judged:
        yield "Too few heads have scores."
        return
    symbolic = LABELS.index("symbolic")
    no_sink, all_keys = (list(head_labels(run, all_keys=every).values()) for every in (False, True))
    yield (
        f"Attention sinks: {no_sink.count(LABELS.index('sink'))} of {len(no_sink)} heads; pure symbolic heads among "
        f"the others: {no_sink.count(symbolic)}; over all keys, with sinks: {all_keys.count(symbolic)}."
    )


@claim(
    25,
    "retrieval",
    title="Retrieval heads need slow planes",
    source="arXiv 2606.21249",
    change="longer texts, in which slow planes rotate further; other shares of planes and heads; answers in words",
    rotary=True,
)
def slow_planes(evidence: Evidence) -> Iterator[Item]:
    """Without the slowest planes of its retrieval heads a model no longer retrieves; without other planes it does."""
    run, masked = evidence.run("retrieval"), "planted_lost_masked"
    for lost, how in ((masked, "masked"), ("planted_lost_unrotated", "un-rotated")):
        for control, title in (("random", "random planes"), ("others", "other heads")):
            what = f"lost share of the gain from planted runs, slowest planes of retrieval heads {how}"
            yield Number(what, mean(run, lost), control_mean(run, f"{lost}_{control}"), title)
    half = at_least(mean(run, masked), 0.5)
    yield Statement(
        f"without the slowest quarter of the planes of retrieval heads, {half} of the gain from planted runs is lost",
        half,
        condition="only the slowest planes of retrieval heads are meant",
    )
    for control, title in (("random", "random other planes of these heads"), ("others", "those of other heads")):
        few, more = at_most(mean(run, f"{masked}_{control}"), LITTLE), mean(run, masked, less=f"{masked}_{control}")
        clear = at_least(more, CLEAR)
        condition = f"the comparison with {title} is meant"
        yield Statement(f"without {title} it is {few}, and {clear} less", few, clear, condition=condition)
    rotation = mean(run, "planted_lost_unrotated")
    if rotation.n:
        yield (
            f"With the same planes un-rotated instead, {in_words(rotation)} is lost: masking also removes what they "
            "know about content."
        )
    gain = mean(run, "planted")
    yield f"The unchanged model gains {gain.mean:.2f} nats from planted runs."


def _agreement(run: StoredRun, places: Sequence[tuple[int, int]], metric: str) -> float:
    """Return the share of heads with the same value on two documents, over all pairs; 1 for a single document."""
    heads = run.head_documents(metric)
    equal = [first == second for place in places for first, second in combinations(heads[place].values(), 2)]
    return sum(equal) / len(equal) if equal else 1.0


def ranked_higher(run: StoredRun, metric: str, ending: str) -> list[float]:
    """Return for each document how often a head with a high value of a metric is more symbolic than another head.

    That is the area under the ROC curve of ``s_sym - s_pos`` for the share ``TOP`` of heads with the highest values:
    0.5 if they are unrelated, 1 if they are the most symbolic heads. ``ending`` is that of the scores' names.
    """
    scores, s_pos, s_sym = (run.head_documents(name) for name in (metric, f"s_pos{ending}", f"s_sym{ending}"))
    areas = []
    for document in run.documents:
        pairs = [
            (values[document], s_sym[place][document] - s_pos[place][document])
            for place, values in scores.items()
            if all(document in by_head.get(place, {}) for by_head in (scores, s_pos, s_sym))
        ]
        ranked = [symbolic for _, symbolic in sorted(pairs, key=lambda pair: -pair[0])]
        count = max(FEWEST_HEADS, round(TOP * len(ranked)))
        top, rest = ranked[:count], ranked[count:]
        if rest:
            wins = sum((high > low) + 0.5 * (high == low) for high in top for low in rest)
            areas.append(wins / len(top) / len(rest))
    return areas


CLAIMS = (
    frequency_roles,
    anticorrelation,
    unrotated_planes,
    random_tokens,
    massive_values,
    retrieval_heads,
    slow_planes,
    *(
        Claim(number, title, statement, "arXiv 2605.31558", reason="about trained small models: see wherewhat multihop")
        for number, (title, statement) in _LABORATORY.items()
    ),
)
