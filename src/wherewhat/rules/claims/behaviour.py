"""Claims about behaviour: perturbed words and positions, longer texts, and answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator

from wherewhat.measures.prompts import THIRDS
from wherewhat.measures.statistics import wilson
from wherewhat.rules.claims.claim import COSTLY, FEWEST_HEADS, HAN, MOST, URRUTIA, Evidence, claim
from wherewhat.rules.numbers import contrast, control_mean, declared_mean, head_means, mean, over_documents, scaled
from wherewhat.rules.rule import Item, Number, Statement, at_least, at_most, both, either, less_than


@claim(
    7,
    "words",
    title="Few word swaps do no harm",
    source=HAN,
    change="another threshold than 0.1 nats, downstream tasks (wherewhat choices)",
)
def transposed_words(evidence: Evidence) -> Iterator[Item]:
    """Transposing up to 5 % of the words hardly matters, more than 10 % does."""
    run = evidence.run("words")
    for ending, title, condition in (
        ("", "all targets", "all targets are counted"),
        ("_untouched", "targets that were not moved", "only targets that were not moved are counted"),
    ):
        few, many = (mean(run, f"rise_words_at_{rate}{ending}") for rate in (5, 20))
        yield Number(f"rise of the loss at 5 % of words, {title}", few, many.mean, "at 20 %")
        small, large = at_most(few, COSTLY), at_least(many, COSTLY)
        statement = f"the rise is {small} nats at 5 % and {large} at 20 %: {title}"
        yield Statement(statement, small, large, condition=condition)
    items = evidence.find("choices")
    fall, deep_fall = (declared_mean(items, f"change_words_at_{rate}")[0] for rate in (5, 20))
    if fall is None or deep_fall is None:
        yield "Answers to questions were not measured: use wherewhat choices --items TASK."
        return
    yield Number("change of accuracy at 5 % of words", fall, deep_fall.mean, "at 20 %")
    small, large = at_least(fall, -0.02), at_most(deep_fall, -0.02)
    statement = "accuracy falls by at most 0.02 at 5 % and by at least 0.02 at 20 %"
    yield Statement(statement, small, large, condition="answers to questions are counted")


@claim(
    8,
    "positions",
    title="Positions act as features",
    source=HAN,
    change="other rates, features swapped at later layers",
)
def positions_and_features(evidence: Evidence) -> Iterator[Item]:
    """Perturbing positions and perturbing features have similar effects."""
    run = evidence.run("positions")
    difference, feature_rise = "index_minus_feature", "rise_features_0_at_5_untouched"
    same, gap = mean(run, "index_feature_correlation"), mean(run, difference)
    yield Number("correlation over targets of the two changes of the loss", same, 0.0, "unrelated changes")
    title = "loss with swapped positions minus that with swapped features"
    yield Number(title, gap, mean(run, feature_rise).mean, "rise by features")
    related = at_least(same, 0.5)
    yield Statement(f"the correlation is {related}", related, condition="the same targets are meant")
    above = over_documents(run, lambda gap, rise: gap - 0.5 * rise, difference, feature_rise)
    below = over_documents(run, lambda gap, rise: -gap - 0.5 * rise, difference, feature_rise)
    yield Statement(
        "the losses differ by at most half of the rise by swapped features, or 0.02 nats",
        either(both(at_most(above, 0.0), at_most(below, 0.0)), both(at_least(gap, -0.02), at_most(gap, 0.02))),
        condition="only the mean loss is meant",
    )
    yield "5 % of the tokens are swapped, at the first layer; targets are untouched ones."


@claim(
    9,
    "extend",
    title="LM-Infinite keeps outputs",
    source=HAN,
    change="longer texts, other length methods (wherewhat extend)",
)
def outputs_inside(evidence: Evidence) -> Iterator[Item]:
    """Attention outputs under LM-Infinite stay in their training distribution, and therefore it works."""
    run = evidence.run("extend")
    if not {"none", "lm-infinite"} <= set(run.config.methods):
        yield "The finished run of extend is without the methods none and lm-infinite."
        return
    plain, rise, ranks = (mean(run, name) for name in ("loss_rise_none", "loss_rise_lm-infinite", "rank_shift_loss"))
    none, limited, inside = (f"output_shift_{name}" for name in ("none", "lm-infinite", "pieces"))
    yield Number("output shift under LM-Infinite", mean(run, limited), control_mean(run, none), "no method")
    yield Number("rise of the loss under LM-Infinite", rise, plain.mean, "no method")
    yield Number("rank correlation over methods of output shift and loss", ranks, 0.0, "unrelated")
    if not plain.mean >= COSTLY:
        yield Statement(f"the mean loss of the unmodified model rises by at least {COSTLY} nats", None)
        yield "The unmodified model does not fail on these texts."
        return
    excess = over_documents(run, lambda x, y, usual: (x - usual) - 0.25 * (y - usual), limited, none, inside)
    statement = "the shift beyond that of pieces is at most a quarter of the unmodified model's"
    yield Statement(statement, at_most(excess, 0.0), condition="only the distribution of outputs is meant")
    flat, ordered = at_most(rise, COSTLY), at_least(ranks, 0.5)
    yield Statement(f"the loss rises by {flat} nats", flat, condition="only the loss is meant")
    statement = f"a smaller shift goes with a lower loss over methods: rank correlation of {ordered}"
    yield Statement(statement, ordered, condition="only the order of methods is meant")


@claim(
    10,
    "positions",
    title="A rule finds robust heads",
    source=HAN,
    change="another criterion or threshold, tested on models it was not chosen on",
    also=("words",),
)
def criterion(evidence: Evidence) -> Iterator[Item]:
    """A criterion tells which heads and models can be perturbed."""
    run = evidence.run("positions")
    shares, changes = head_means(run, "share_a"), head_means(run, "sensitivity_position_swap")
    places = [place for place in shares if place in changes]
    if len(places) < FEWEST_HEADS:
        yield "Too few heads have a share of distance and a sensitivity."
        return
    middle_share, middle_change = (sorted(x[place] for place in places)[len(places) // 2] for x in (shares, changes))
    hits = wilson([float((shares[p] < middle_share) == (changes[p] < middle_change)) for p in places])
    yield Number("heads for which the criterion is right", hits, 0.5, "chance")
    title = "correlation over heads of distance share and sensitivity"
    yield Number(title, mean(run, "predicted_position_swap"), 0.0, "unrelated")
    statement = "it is right for more heads than chance"
    yield Statement(statement, at_least(hits, 0.5), condition="better than chance is enough")
    most = at_least(hits, MOST)
    yield Statement(f"it is right for {most:.0%} of the heads", most, condition="most heads are enough")
    yield (
        "Criterion: a head can be perturbed if the share that only distance explains is below the median of the model; "
        "outcome: its output changes less than the median head's when 5 % of the positions are swapped. Heads are "
        "counted as independent."
    )
    if at_most(hits, 0.5).outcome:
        yield f"The opposite criterion is right for {1 - hits.mean:.0%} of the heads."
    words = evidence.find("words")
    if words is not None:
        small = at_most(mean(words, "rise_words_at_5"), COSTLY)
        answer = {True: "yes", False: "no", None: "open"}[small.outcome]
        yield f"The model as a whole can be perturbed (5 % of words, {COSTLY} nats): {answer}."


@claim(
    16,
    "prompts",
    title="Only letter generalises",
    source=URRUTIA,
    change="more prompts, longer lists, several hops, a model that solves the task at all",
)
def longer_inputs(evidence: Evidence) -> Iterator[Item]:
    """Letter generalises to longer inputs, number does not."""
    run = evidence.run("prompts")
    short, long = min(run.config.sizes), max(run.config.sizes)
    for kind, bound, statement, condition in (
        (
            "letters",
            at_least,
            f"on letters at least half of the accuracy above chance is left with {long} alternatives",
            "only letter is meant",
        ),
        ("numbers", less_than, "on numbers less than half of it is left", "only number is meant"),
    ):
        few, many = (declared_mean(run, f"accuracy_{kind}_{size}") for size in (short, long))
        if few[0] is None or many[0] is None or few[1] is None or many[1] is None:
            yield Statement(statement, None, condition=condition)
            continue
        yield Number(f"accuracy on {kind}, {long} alternatives", many[0], few[0].mean, f"{short} alternatives")
        # A model that names any digit of the list is right more often than one that names any digit.
        chance_few, chance_many = max(few[1], 1 / short), max(many[1], 1 / long)
        able = few[0].low is not None and few[0].low > chance_few
        if not able:
            yield f"{kind.capitalize()} are not above chance ({chance_few:.2f}) with {short} alternatives already."
        left = bound(contrast(many[0], scaled(few[0], 0.5)), chance_many - 0.5 * chance_few)
        yield Statement(statement, left if able else None, condition=condition)
    yield "Prompts have one hop; intervals are over prompts."


@claim(
    19,
    "prompts",
    title="U shape by answer place",
    source=URRUTIA,
    change="more prompts, longer lists, heads restricted to wrong frequencies",
)
def answer_place(evidence: Evidence) -> Iterator[Item]:
    """Accuracy by place of the answer is U-shaped for Index and an inverted U for Retrieval with a wrong frequency."""
    run = evidence.run("prompts")
    least = sum(1 / size for size in run.config.sizes) / len(run.config.sizes)
    for kind, bound, statement, condition in (
        ("numbers", at_least, "numbers (Index): both outer thirds above the middle", "only Index is meant"),
        ("letters", at_most, "letters (Retrieval): the middle above both outer thirds", "only Retrieval is meant"),
    ):
        first, middle, last = (declared_mean(run, f"accuracy_{kind}_{third}")[0] for third in THIRDS)
        overall, chance = declared_mean(run, f"accuracy_{kind}")
        able = overall is not None and overall.low is not None and overall.low > max(chance or 0.0, least)
        if not able:
            yield f"{kind.capitalize()} are not above chance."
        ends = both(*(bound(contrast(end, middle), 0.0) for end in (first, last)))
        yield Statement(statement, ends if able else None, condition=condition)
        if middle is not None and first is not None and last is not None:
            outer = (first.mean + last.mean) / 2
            yield Number(f"accuracy on {kind}, answer in the middle third", middle, outer, "outer thirds")
    yield "The model's own frequencies are used, none is wrong by construction."


CLAIMS = (transposed_words, positions_and_features, outputs_inside, criterion, longer_inputs, answer_place)
