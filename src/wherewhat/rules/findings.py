"""Findings: sentences that the numbers of a report support, each with interval, control and a link to its evidence.

:data:`FINDINGS` holds the rules. The first statement of a rule that holds is shown: none where an interval includes no
effect or is of fewer than three documents (see :func:`~wherewhat.rules.rule.clear`), where the effect is too small to
matter, or where there is no control to compare with. A sentence about the clearest of several quantities rests on an
interval that is wider accordingly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

from wherewhat.measures.perturb import KINDS, percent
from wherewhat.measures.statistics import Interval, interval, share_bounds
from wherewhat.measures.swaps import LABELS
from wherewhat.progress import counted
from wherewhat.rules.numbers import (
    UNDEFINED,
    count_documents,
    declared_mean,
    head_labels,
    jackknife_difference,
    mean,
    negative,
    untrained_difference,
)
from wherewhat.rules.rule import LEAST_DOCUMENTS, Rule, Statement, Words, at_least, at_most, clear, differ_by_ratio
from wherewhat.runs.collection import Runs
from wherewhat.runs.results import HeadCount, StoredRun

MOST = 6
"""Largest number of findings on a page."""

_CLEAR_RATIO, _CLEAR_SHARE, _CLEAR_CHANGE = 2.0, 0.05, 0.1
"""Smallest ratio and difference of shares, and change of r, that are more than between two untrained models.

Heads of an untrained model share its embeddings, so that their spread does not say all about other untrained models.
"""

_NO_CHANGE = 0.05
"""Largest change of r that is called none."""

_HIGH = 0.7
"""Smallest r that is called high."""

_LEAST_COST = 0.02
"""Smallest cost in nats per token that is worth a sentence."""


def find(runs: Runs) -> dict[str, Statement]:
    """Return the findings of a model's report by the names of their rules, strongest first."""
    held = [(name, statement) for name, rule in FINDINGS.items() for statement in rule.held(runs)[:1]]
    return dict(sorted(held, key=lambda named: -named[1].strength)[:MOST])


def summarise(runs: Runs) -> Statement | None:
    """Return the sentence that a page begins with; None if neither axes nor heads were measured."""
    return next(iter(SUMMARY.held(runs)), None)


def _summary(runs: Runs) -> Iterator[Statement]:
    """Give the additive share of the logits, beside that of the untrained model, and the number of heads by label.

    It describes what was measured and compares nothing, so it needs no interval.
    """
    axes, untrained, heads = runs.find("axes"), runs.find("axes", "random"), runs.find("heads")
    own, other = (UNDEFINED if run is None else mean(run, "r2") for run in (axes, untrained))
    counts = {} if heads is None else {name: count for name, count in _count(heads).items() if count}
    listed = [name for name in ("sink", "positional", "symbolic", "mixed", "uniform") if name in counts]

    def sentence(words: Words) -> str:
        parts = []
        if own.n:
            beside = f" ({words(other, percent=True)} in one untrained model)" if other.n else ""
            parts.append(
                f"distance, query and key terms together explain {words(own, percent=True)} of the variance of "
                f"attention logits{beside}"
            )
        if listed:
            sinks = "an attention sink" if counts.get("sink") == 1 else "attention sinks"
            named = [f"{counts[name]} {sinks if name == 'sink' else name}" for name in listed]
            named[0] = named[0].replace(" ", " is " if counts[listed[0]] == 1 else " are ", 1)
            kinds = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
            parts.append(f"of {counted(sum(counts.values()), 'head')}, {kinds}")
        text = "; ".join(parts)
        return text[:1].upper() + text[1:]

    sizes = dict.fromkeys(n for n in (own.n, 0 if heads is None else len(heads.documents)) if n)
    yield Statement(sentence, bool(own.n or listed), beside=" and ".join(map(count_documents, sizes)))


def _of_training(metric: str, what: str) -> Rule[Runs]:
    """Return the rule of a share of variance that training changed."""

    def judge(runs: Runs) -> Iterator[Statement]:
        own, untrained, change = _against_untrained(runs, metric)
        yield Statement(
            lambda words: (
                f"Training {_verb(own.mean, untrained.mean)} what only {what} explains: {words(own, percent=True)} of "
                f"the logits' variance, against {words(untrained, percent=True)} in one untrained model"
            ),
            clear(change, least=_CLEAR_SHARE),
            differ_by_ratio(own, untrained, _CLEAR_RATIO),
            beside=count_documents(own.n),
            link=f"heads?metric={metric}",
        )

    return Rule(judge, ("axes",), control="random")


def _additivity(runs: Runs) -> Iterator[Statement]:
    """Compare r with that of the untrained model: it is no sign of learning where they hardly differ."""
    own, untrained, change = _against_untrained(runs, "r")

    def sizes(words: Words) -> str:
        return f"{words(own)} here, {words(untrained)} in one untrained model"

    documents, link = count_documents(own.n), "heads?metric=r"
    yield Statement(
        lambda words: f"Training made logits {'more' if change.mean > 0 else 'less'} additive: r is {sizes(words)}",
        clear(change, least=_CLEAR_CHANGE),
        beside=documents,
        link=link,
    )
    high = "A high r" if own.mean >= _HIGH else "r"
    yield Statement(
        lambda words: f"{high} is no sign of training in this model: {sizes(words)}",
        at_least(change, -_NO_CHANGE),
        at_most(change, _NO_CHANGE),
        beside=documents,
        link=link,
    )


def _against_untrained(runs: Runs, metric: str) -> tuple[Interval, Interval, Interval]:
    """Return a metric of axes on the model and on the untrained one, and their difference."""
    own, untrained = runs.run("axes"), runs.run("axes", "random")
    return mean(own, metric), mean(untrained, metric), untrained_difference(own, metric, untrained)


def _pure_heads(runs: Runs) -> Iterator[Statement]:
    """Count sinks, and the other heads that follow positions alone or contents alone, if training made them.

    Beside the counts over all documents together stand their range over single documents, and where they differ those
    of the papers, over all keys and with sinks among the heads.
    """
    own, counts, untrained = _learned_labels(runs)
    labels = [name for name in ("positional", "symbolic") if name in counts]
    if not labels:
        return
    total, all_keys = len(head_labels(own)), _count(own, all_keys=True)
    beside = [f"in single documents {' and '.join(_single(own, name) for name in labels)}"]
    if any(all_keys[name] != counts[name] for name in labels):
        beside.append(f"over all keys, with sinks, {' and '.join(str(all_keys[name]) for name in labels)}")
    beside.append(f"in one untrained model {' and '.join(str(untrained[name]) for name in labels)}")
    sinks = counts.get("sink", 0)
    apart = f"{sinks} {'is an attention sink' if sinks == 1 else 'are attention sinks'}; of the others, "
    parts = [f"{counts[name]} {'positions' if name == 'positional' else 'contents'} alone" for name in labels]
    verb = "follows" if counts[labels[0]] == 1 else "follow"
    follow = ", ".join(parts).replace(" ", f" {verb} ", 1)
    yield Statement(
        lambda _: f"Of {counted(total, 'head')}, {apart if sinks else ''}{follow}",
        beside=f"{'; '.join(beside)}; {count_documents(len(own.documents))}",
        link=f"heads?label={','.join(labels)}",
        strength=max(_surprise(counts[name], untrained[name], total) for name in labels),
    )


def _uniform_heads(runs: Runs) -> Iterator[Statement]:
    """Count the heads whose attention is uniform, if the untrained model has fewer of them."""
    own, counts, untrained = _learned_labels(runs)
    total, count, other = len(head_labels(own)), counts.get("uniform", 0), untrained["uniform"]
    verb = "attends" if count == 1 else "attend"
    if count:
        yield Statement(
            lambda _: f"{count} of {counted(total, 'head')} {verb} uniformly, to no position and no content",
            beside=f"in single documents {_single(own, 'uniform')}; in one untrained model {other}; "
            f"{count_documents(len(own.documents))}",
            link="heads?label=uniform",
            strength=_surprise(count, other, total),
        )


def _learned_labels(runs: Runs) -> tuple[StoredRun, dict[str, int], dict[str, int]]:
    """Return the run of heads, the number of heads by learned label, and that of all labels in the untrained model.

    A label is learned if more heads have it than in the untrained model. That must hold in every document, by the
    interval of the difference over documents, and by Wilson's intervals of the counts over all documents together.
    """
    own, untrained = runs.run("heads"), runs.run("heads", "random")
    counts, others = _count(own), _count(untrained)
    total, learned = sum(counts.values()), {}
    for label, count in counts.items():
        shares, other_shares = (run.document_means(_share(label)) for run in (own, untrained))
        changes = [shares[name] - other_shares[name] for name in shares if name in other_shares]
        if not count or len(changes) < LEAST_DOCUMENTS or min(changes) <= 0 or (interval(changes).low or 0.0) <= 0:
            continue
        if share_bounds(count / total, total)[0] > share_bounds(others[label] / total, total)[1]:
            learned[label] = count
    return own, learned, others


def _count(run: StoredRun, *, all_keys: bool = False) -> dict[str, int]:
    """Return the number of heads with each label, over all documents together where there are several."""
    codes = Counter(head_labels(run, all_keys=all_keys).values())
    return {name: codes[code] for code, name in enumerate(LABELS)}


def _share(label: str) -> str:
    """Return the metric that is the share of heads with a label, sinks apart."""
    return "heads_sink" if label == "sink" else f"heads_{label}_no_sink"


def _single(run: StoredRun, label: str) -> str:
    """Return the range over documents of the number of heads with a label, in words."""
    total, shares = len(head_labels(run)), run.document_means(_share(label)).values()
    return HeadCount(0, total, tuple(round(total * share) for share in shares)).single


def _surprise(count: int, other: int, total: int) -> float:
    """Return the difference of two shares relative to half of the first one's interval."""
    low, high = share_bounds(count / total, total)
    return (count - other) / total / max((high - low) / 2, 1e-9)


def _sink(runs: Runs) -> Iterator[Statement]:
    """Compare attention on the first token with that of uniform attention."""
    own, even = (mean(runs.run("heads"), name) for name in ("sink_mass", "sink_mass_uniform"))
    yield Statement(
        lambda words: (
            f"Heads give {words(own, percent=True)} of their attention to the first token; uniform attention would "
            f"give {100 * even.mean:.2g} %"
        ),
        clear(own, "above", 2 * even.mean),
        beside=count_documents(own.n),
        link="heads?metric=sink_mass",
        strength=clear(own, "above", even.mean).strength,
    )


def _perturbation(runs: Runs) -> Iterator[Statement]:
    """Return the clearest cost of a perturbation at 5 %, or at the lowest higher rate, on targets that are untouched.

    The loss of the perturbed words themselves rises too, and says nothing about how others are predicted.
    """
    run = runs.run("perturb")
    rates = [rate for rate in run.config.rates if rate >= 0.05]
    if not rates:
        return
    rate, kinds = percent(min(rates)), run.config.kinds or tuple(KINDS)
    costs = {kind: mean(run, f"rise_{kind}_at_{rate}_untouched", tests=len(kinds)) for kind in kinds}
    costs = {kind: cost for kind, cost in costs.items() if cost.n}
    among = f", the clearest of {len(costs)} perturbations" if len(costs) > 1 else ""
    sentences = [
        Statement(
            partial(_rises, f"With {rate} % of {KINDS[kind]}{among}", cost),
            clear(cost, "above", least=_LEAST_COST),
            beside=count_documents(cost.n),
            link="perturbation",
        )
        for kind, cost in costs.items()
    ]
    yield from sorted(sentences, key=lambda sentence: -sentence.strength)


def _rises(perturbed: str, cost: Interval, words: Words) -> str:
    return f"{perturbed}, the loss of the other tokens rises by {words(cost)} nats"


def _length(runs: Runs) -> Iterator[Statement]:
    """Return what texts beyond the trained length cost, if they were measured."""
    request, run = runs.request("extend") or (None, None)
    if request is None or run is None or not request.beyond:
        return
    methods = [name for name in request.options["methods"] if name != "none"]
    rises = {name: mean(run, f"loss_beyond_{name}", less="loss_beyond_none", tests=len(methods)) for name in methods}
    rises = {name: rise for name, rise in rises.items() if rise.n}
    for name, rise in sorted(rises.items(), key=lambda item: item[1].mean):
        yield Statement(
            partial(_lowers, name, len(rises), negative(rise)),
            clear(rise, "below", least=_LEAST_COST),
            beside=count_documents(rise.n),
            link="length",
        )


def _lowers(method: str, count: int, gain: Interval, words: Words) -> str:
    return (
        f"Beyond the trained length, {method} lowers the loss most of {count} methods, by {words(gain)} nats per token"
    )


def _answers(measurement: str, right: str, unit: str) -> Rule[Runs]:
    """Return the rule of an accuracy above chance."""

    def judge(runs: Runs) -> Iterator[Statement]:
        accuracy, chance = declared_mean(runs.run(measurement), "accuracy")
        if accuracy is not None and chance is not None:
            yield Statement(
                lambda words: (
                    f"The model {right} {words(accuracy, percent=True)} of {accuracy.n} {unit}; chance is "
                    f"{100 * chance:.0f} %"
                ),
                clear(accuracy, "above", chance),
                link=f"measured-{measurement}",
            )

    return Rule(judge, (measurement,))


def _position(runs: Runs) -> Iterator[Statement]:
    """Compare the share of position in the keys with that of the untrained model, on the same documents."""
    own, untrained = runs.run("split"), runs.run("split", "random")
    share, other = (declared_mean(run, "k_position")[0] for run in (own, untrained))
    change = jackknife_difference(own, "k_position", untrained)
    if share is not None and other is not None:
        yield Statement(
            lambda words: (
                f"Position accounts for {words(share, percent=True)} of the keys' variance, against "
                f"{words(other, percent=True)} in one untrained model"
            ),
            clear(change, least=_CLEAR_SHARE),
            beside=count_documents(share.n),
            link="measured-split",
        )


def _residual(runs: Runs) -> Iterator[Statement]:
    """Return the cost of exactly additive logits."""
    run = runs.run("residual")
    before, cost = mean(run, "loss").mean, mean(run, "loss_strength_0", less="loss")
    yield Statement(
        lambda words: (
            f"With exactly additive logits in all heads the loss rises from {before:.2f} to {before + cost.mean:.2f} "
            f"nats, by {words(cost)}"
        ),
        clear(cost, "above", least=_LEAST_COST),
        beside=count_documents(cost.n),
        link="measured-residual",
    )


SUMMARY: Rule[Runs] = Rule(_summary, also=("axes", "heads"))
"""The rule of the first sentence of a page."""

FINDINGS: Mapping[str, Rule[Runs]] = {
    "key": _of_training("unique_c", "the key"),
    "distance": _of_training("unique_a", "the distance"),
    "pure heads": Rule(_pure_heads, ("heads",), control="random"),
    "uniform heads": Rule(_uniform_heads, ("heads",), control="random"),
    "sink": Rule(_sink, ("heads",)),
    "perturbation": Rule(_perturbation, ("perturb",)),
    "length": Rule(_length, ("extend",)),
    "residual": Rule(_residual, ("residual",)),
    "position": Rule(_position, ("split",), control="random"),
    "prompts": _answers("prompts", "answers", "prompts correctly"),
    "choices": _answers("choices", "chooses the right alternative in", "items"),
    "additivity": Rule(_additivity, ("axes",), control="random"),
}
"""The rules by name; of two findings of the same strength the earlier rule comes first."""


def _verb(now: float, before: float) -> str:
    ratio = now / before if before > 0 else math.inf
    for low, high, verb in _VERBS:
        if low <= ratio < high:
            return verb
    return f"raised {ratio:.2g}-fold" if ratio > 1 and math.isfinite(ratio) else "raised" if ratio > 1 else "lowered"


_VERBS = (
    (1.0, 1.75, "raised"),
    (1.75, 2.3, "doubled"),
    (2.6, 3.4, "tripled"),
    (0.43, 0.57, "halved"),
    (0.57, 1.0, "lowered"),
)
"""Ratios and the verbs for them."""
