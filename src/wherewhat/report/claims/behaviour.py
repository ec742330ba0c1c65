"""Claims about behaviour: perturbed words and positions, longer texts, and answers to prompts."""

from __future__ import annotations

from wherewhat.measures.prompts import THIRDS
from wherewhat.measures.statistics import interval, wilson
from wherewhat.report.claims.claim import (
    COSTLY,
    FEWEST_HEADS,
    HAN,
    MOST,
    URRUTIA,
    ClaimNumber,
    ClaimPart,
    Evidence,
    Judged,
    at_least,
    at_most,
    both,
    claim,
    contrast,
    control_mean,
    declared_mean,
    document_mean,
    head_means,
    model_mean,
    negative,
    opposite,
    scaled,
)


@claim(7, source=HAN, change="another threshold than 0.1 nats, downstream tasks (wherewhat choices)", needs=("words",))
def transposed_words(evidence: Evidence) -> Judged:
    """Transposing up to 5 % of the words hardly matters, more than 10 % does."""
    run = evidence.run("words")
    numbers, parts = [], []
    for ending, title, condition in (
        ("", "all targets", "all targets are counted"),
        ("_untouched", "targets that were not moved", "only targets that were not moved are counted"),
    ):
        low, high = (model_mean(run, f"rise_words_at_{rate}{ending}") for rate in (5, 20))
        numbers.append(ClaimNumber(f"rise of the loss at 5 % of words, {title}", low, high.mean, "at 20 %"))
        statement = f"the rise is at most {COSTLY} nats at 5 % and at least {COSTLY} at 20 %: {title}"
        parts.append(ClaimPart(statement, both(at_most(low, COSTLY), at_least(high, COSTLY)), condition))
    items = evidence.find("choices")
    few, many = (declared_mean(items, f"change_words_at_{rate}")[0] for rate in (5, 20))
    if few is None or many is None:
        return Judged(numbers, parts, ["Answers to questions were not measured: use wherewhat choices --items TASK."])
    numbers.append(ClaimNumber("change of accuracy at 5 % of words", few, many.mean, "at 20 %"))
    statement = "accuracy falls by at most 0.02 at 5 % and by at least 0.02 at 20 %"
    outcome = both(at_least(few, -0.02), at_most(many, -0.02))
    return Judged(numbers, [*parts, ClaimPart(statement, outcome, "answers to questions are counted")])


@claim(8, source=HAN, change="other rates, features swapped at later layers", needs=("positions",))
def positions_and_features(evidence: Evidence) -> Judged:
    """Perturbing positions and perturbing features have similar effects."""
    run = evidence.run("positions")
    same, gap = model_mean(run, "index_feature_correlation"), model_mean(run, "index_minus_feature")
    rise = model_mean(run, "rise_features_0_at_5_untouched")
    gaps, rises = (run.document_means(name) for name in ("index_minus_feature", "rise_features_0_at_5_untouched"))
    beyond = [[sign * gaps[name] - 0.5 * rises[name] for name in gaps if name in rises] for sign in (1, -1)]
    half = both(*(at_most(interval(values), 0.0) if values else None for values in beyond))
    small = both(at_least(gap, -0.02), at_most(gap, 0.02))
    numbers = [
        ClaimNumber("correlation over targets of the two changes of the loss", same, 0.0, "unrelated changes"),
        ClaimNumber("loss with swapped positions minus that with swapped features", gap, rise.mean, "rise by features"),
    ]
    parts = [
        ClaimPart("the correlation is at least 0.5", at_least(same, 0.5), "the same targets are meant"),
        ClaimPart(
            "the losses differ by at most half of the rise by swapped features, or 0.02 nats",
            opposite(both(opposite(half), opposite(small))),
            "only the mean loss is meant",
        ),
    ]
    return Judged(numbers, parts, ["5 % of the tokens are swapped, at the first layer; targets are untouched ones."])


@claim(9, source=HAN, change="longer texts, other length methods (wherewhat extend)", needs=("extend",))
def outputs_inside(evidence: Evidence) -> Judged:
    """Attention outputs under LM-Infinite stay in their training distribution, and therefore it works."""
    run = evidence.run("extend")
    if not {"none", "lm-infinite"} <= set(run.config.methods):
        return Judged([], [], ["The finished run of extend is without the methods none and lm-infinite."])
    plain, rise = model_mean(run, "loss_rise_none"), model_mean(run, "loss_rise_lm-infinite")
    shifts = [run.document_means(f"output_shift_{name}") for name in ("none", "lm-infinite", "pieces")]
    excess = [
        (limited - inside) - 0.25 * (none - inside)
        for none, limited, inside in zip(*map(dict.values, shifts), strict=True)
    ]
    ranks = model_mean(run, "rank_shift_loss")
    numbers = [
        ClaimNumber(
            "output shift under LM-Infinite",
            document_mean(run, "output_shift_lm-infinite"),
            control_mean(run, "output_shift_none"),
            "no method",
        ),
        ClaimNumber("rise of the loss under LM-Infinite", rise, plain.mean, "no method"),
        ClaimNumber("rank correlation over methods of output shift and loss", ranks, 0.0, "unrelated"),
    ]
    if not plain.mean >= COSTLY:
        statement = f"the mean loss of the unmodified model rises by at least {COSTLY} nats"
        return Judged(numbers, [ClaimPart(statement, None, "")], ["The unmodified model does not fail on these texts."])
    parts = [
        ClaimPart(
            "the shift beyond that of pieces is at most a quarter of the unmodified model's",
            at_most(interval(excess), 0.0) if excess else None,
            "only the distribution of outputs is meant",
        ),
        ClaimPart(f"the loss rises by at most {COSTLY} nats", at_most(rise, COSTLY), "only the loss is meant"),
        ClaimPart(
            "a smaller shift goes with a lower loss over methods: rank correlation of at least 0.5",
            at_least(ranks, 0.5),
            "only the order of methods is meant",
        ),
    ]
    return Judged(numbers, parts)


@claim(
    10,
    source=HAN,
    change="another criterion or threshold, tested on models it was not chosen on",
    needs=("positions",),
    also=("words",),
)
def criterion(evidence: Evidence) -> Judged:
    """A criterion tells which heads and models can be perturbed."""
    run = evidence.run("positions")
    shares, changes = head_means(run, "share_a"), head_means(run, "sensitivity_position_swap")
    places = [place for place in shares if place in changes]
    if len(places) < FEWEST_HEADS:
        return Judged([], [], ["Too few heads have a share of distance and a sensitivity."])
    middle_share, middle_change = (sorted(x[place] for place in places)[len(places) // 2] for x in (shares, changes))
    hits = wilson([float((shares[p] < middle_share) == (changes[p] < middle_change)) for p in places])
    numbers = [
        ClaimNumber("heads for which the criterion is right", hits, 0.5, "chance"),
        ClaimNumber(
            "correlation over heads of distance share and sensitivity",
            model_mean(run, "predicted_position_swap"),
            0.0,
            "unrelated",
        ),
    ]
    parts = [
        ClaimPart("it is right for more heads than chance", at_least(hits, 0.5), "better than chance is enough"),
        ClaimPart(f"it is right for at least {MOST:.0%} of the heads", at_least(hits, MOST), "most heads are enough"),
    ]
    notes = [
        "Criterion: a head can be perturbed if the share that only distance explains is below the median of the model; "
        "outcome: its output changes less than the median head's when 5 % of the positions are swapped. Heads are "
        "counted as independent."
    ]
    if at_most(hits, 0.5):
        notes.append(f"The opposite criterion is right for {1 - hits.mean:.0%} of the heads.")
    words = evidence.find("words")
    if words is not None:
        rise = model_mean(words, "rise_words_at_5")
        answer = {True: "yes", False: "no", None: "open"}[at_most(rise, COSTLY)]
        notes.append(f"The model as a whole can be perturbed (5 % of words, {COSTLY} nats): {answer}.")
    return Judged(numbers, parts, notes)


@claim(
    16,
    source=URRUTIA,
    change="more prompts, longer lists, several hops, a model that solves the task at all",
    needs=("prompts",),
)
def longer_inputs(evidence: Evidence) -> Judged:
    """Letter generalises to longer inputs, number does not."""
    run = evidence.run("prompts")
    short, long = min(run.config.sizes), max(run.config.sizes)
    numbers, notes = [], []
    outcomes: dict[str, bool | None] = {}
    for kind in ("letters", "numbers"):
        (few, chance_few), (many, chance_many) = (
            declared_mean(run, f"accuracy_{kind}_{size}") for size in (short, long)
        )
        if few is None or many is None or chance_few is None or chance_many is None:
            outcomes[kind] = None
            continue
        numbers.append(ClaimNumber(f"accuracy on {kind}, {long} alternatives", many, few.mean, f"{short} alternatives"))
        # A model that names any digit of the list is right more often than one that names any digit.
        chance_few, chance_many = max(chance_few, 1 / short), max(chance_many, 1 / long)
        able = few.low is not None and few.low > chance_few
        if not able:
            notes.append(
                f"{kind.capitalize()} are not above chance ({chance_few:.2f}) with {short} alternatives already."
            )
        left = contrast(many, scaled(few, 0.5))
        outcomes[kind] = at_least(left, chance_many - 0.5 * chance_few) if able else None
    parts = [
        ClaimPart(
            f"on letters at least half of the accuracy above chance is left with {long} alternatives",
            outcomes["letters"],
            "only letter is meant",
        ),
        ClaimPart("on numbers less than half of it is left", opposite(outcomes["numbers"]), "only number is meant"),
    ]
    return Judged(numbers, parts, [*notes, "Prompts have one hop; intervals are over prompts."])


@claim(
    19, source=URRUTIA, change="more prompts, longer lists, heads restricted to wrong frequencies", needs=("prompts",)
)
def answer_place(evidence: Evidence) -> Judged:
    """Accuracy by place of the answer is U-shaped for Index and an inverted U for Retrieval with a wrong frequency."""
    run = evidence.run("prompts")
    numbers, notes = [], []
    outcomes: dict[str, bool | None] = {}
    for kind, sign in (("numbers", 1), ("letters", -1)):
        first, middle, last = (declared_mean(run, f"accuracy_{kind}_{third}")[0] for third in THIRDS)
        overall, chance = declared_mean(run, f"accuracy_{kind}")
        least = sum(1 / size for size in run.config.sizes) / len(run.config.sizes)
        able = overall is not None and overall.low is not None and overall.low > max(chance or 0.0, least)
        if not able:
            notes.append(f"{kind.capitalize()} are not above chance.")
        contrasts = [contrast(end, middle) for end in (first, last)]
        signed = [None if x is None else x if sign > 0 else negative(x) for x in contrasts]
        outcomes[kind] = both(*(at_least(x, 0.0) for x in signed)) if able else None
        if middle is not None and first is not None and last is not None:
            ends = (first.mean + last.mean) / 2
            numbers.append(ClaimNumber(f"accuracy on {kind}, answer in the middle third", middle, ends, "outer thirds"))
    parts = [
        ClaimPart("numbers (Index): both outer thirds above the middle", outcomes["numbers"], "only Index is meant"),
        ClaimPart(
            "letters (Retrieval): the middle above both outer thirds", outcomes["letters"], "only Retrieval is meant"
        ),
    ]
    return Judged(numbers, parts, [*notes, "The model's own frequencies are used, none is wrong by construction."])


CLAIMS = (transposed_words, positions_and_features, outputs_inside, criterion, longer_inputs, answer_place)
