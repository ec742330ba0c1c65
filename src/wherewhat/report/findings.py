"""Findings: sentences that the numbers of a report support, each with interval, control and a link to its evidence.

:data:`RULES` holds one function per sentence. A function returns None where the numbers do not support its sentence,
see :func:`supports`: where an interval includes no effect or is of fewer than three documents, where the effect is too
small to matter, or where there is no control to compare with. A sentence about the clearest of several quantities rests
on an interval that is wider accordingly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from wherewhat.measures.perturb import KINDS, percent
from wherewhat.measures.statistics import Interval, in_words, interval, share_bounds
from wherewhat.measures.swaps import LABELS
from wherewhat.report.claims.claim import (
    LEAST_DOCUMENTS,
    declared_mean,
    document_mean,
    jackknife_difference,
    model_mean,
    negative,
    untrained_difference,
)
from wherewhat.report.data import count_documents, head_labels
from wherewhat.report.measurements import Runs
from wherewhat.runs.results import HeadCount, StoredRun

MOST = 6
"""Largest number of findings on a page."""

_UNTRAINED = "random"

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


@dataclass(frozen=True)
class Finding:
    """One sentence.

    Attributes:
        text: The sentence, with interval and control.
        link: Fragment of the page that shows its evidence.
        strength: Effect relative to half of its 95 % interval; findings are sorted by it.
        rule: Name of its rule.
    """

    text: str
    link: str
    strength: float
    rule: str = ""


Rule = Callable[[Runs], Finding | None]


def find(runs: Runs) -> list[Finding]:
    """Return the findings of a model's report, strongest first."""
    found = []
    for name, rule in RULES.items():
        finding = rule(runs)
        if finding is not None:
            found.append(replace(finding, rule=name))
    return sorted(found, key=lambda finding: -finding.strength)[:MOST]


def _of_training(metric: str, what: str) -> Rule:
    """Return the rule of a share of variance that training changed."""

    def rule(runs: Runs) -> Finding | None:
        found = _against_untrained(runs, metric)
        if found is None or not supports(found[2], 0.0, _CLEAR_SHARE):
            return None
        own, untrained, change = found
        if max(own.mean, untrained.mean) < _CLEAR_RATIO * min(own.mean, untrained.mean):
            return None
        verb = _verb(own.mean, untrained.mean)
        text = (
            f"Training {verb} what only {what} explains: {in_words(own, percent=True)} of the logits' variance, "
            f"against {in_words(untrained, percent=True)} in one untrained model ({count_documents(own.n)})."
        )
        return Finding(text, f"heads?metric={metric}", _strength(change, 0.0))

    return rule


def _additivity(runs: Runs) -> Finding | None:
    """Compare r with that of the untrained model: it is no sign of learning where they hardly differ."""
    found = _against_untrained(runs, "r")
    if found is None:
        return None
    own, untrained, change = found
    sizes = f"{in_words(own)} here, {in_words(untrained)} in one untrained model ({count_documents(own.n)})"
    if supports(change, 0.0, _CLEAR_CHANGE):
        verb = "more" if change.mean > 0 else "less"
        return Finding(f"Training made logits {verb} additive: r is {sizes}.", "heads?metric=r", _strength(change, 0.0))
    if change.n < LEAST_DOCUMENTS or change.low is None or change.high is None:
        return None
    if max(-change.low, change.high) > _NO_CHANGE:  # too uncertain for "no"
        return None
    high = "A high r" if own.mean >= _HIGH else "r"
    return Finding(f"{high} is no sign of training in this model: {sizes}.", "heads?metric=r", 0.0)


def _pure_heads(runs: Runs) -> Finding | None:
    """Count sinks, and the other heads that follow positions alone or contents alone, if training made them.

    Beside the counts over all documents together stand their range over single documents, and where they differ those
    of the papers, over all keys and with sinks among the heads.
    """
    found = _labels(runs)
    labels = {"positional": "positions", "symbolic": "contents"}
    labels = {name: what for name, what in labels.items() if found is not None and _learned(runs, name)}
    if found is None or not labels:
        return None
    counts, untrained, total = found
    parts = [f"{counts[name]} {what} alone" for name, what in labels.items()]
    own = runs.weights("heads")[runs.own]
    beside = [f"in single documents {' and '.join(_single(own, name, total) for name in labels)}"]
    all_keys = _count(own, all_keys=True)
    if any(all_keys[name] != counts[name] for name in labels):
        beside.append(f"over all keys, with sinks, {' and '.join(str(all_keys[name]) for name in labels)}")
    beside.append(f"in one untrained model {' and '.join(str(untrained[name]) for name in labels)}")
    sinks = counts["sink"] if _learned(runs, "sink") else 0
    verb = "is an attention sink" if sinks == 1 else "are attention sinks"
    apart = f"{sinks} {verb}; of the others, " if sinks else ""
    text = f"Of {total} heads, {apart}{_follow(parts)} ({'; '.join(beside)}; {count_documents(len(own.documents))})."
    strength = max(_surprise(counts[name], untrained[name], total) for name in labels)
    return Finding(text, f"heads?label={','.join(labels)}", strength)


def _follow(parts: Sequence[str]) -> str:
    """Return ``8 follow positions alone, 139 contents alone``."""
    first, *rest = parts
    count, what = first.split(" ", 1)
    verb = "follows" if count == "1" else "follow"
    return ", ".join([f"{count} {verb} {what}", *rest])


def _uniform_heads(runs: Runs) -> Finding | None:
    """Count the heads whose attention is uniform, if the untrained model has fewer of them."""
    found = _labels(runs)
    if found is None or not _learned(runs, "uniform"):
        return None
    counts, untrained, total = found
    own, count = runs.weights("heads")[runs.own], counts["uniform"]
    verb = "attends" if count == 1 else "attend"
    text = (
        f"{count} of {total} heads {verb} uniformly, to no position and no content (in single documents "
        f"{_single(own, 'uniform', total)}; in one untrained model {untrained['uniform']}; "
        f"{count_documents(len(own.documents))})."
    )
    return Finding(text, "heads?label=uniform", _surprise(count, untrained["uniform"], total))


def _sink(runs: Runs) -> Finding | None:
    """Compare attention on the first token with that of uniform attention."""
    run = runs.find("heads")
    if run is None:
        return None
    own, even = (document_mean(run, name) for name in ("sink_mass", "sink_mass_uniform"))
    if not even.n or own.mean < 2 * even.mean or not supports(own, 2 * even.mean):
        return None
    text = (
        f"Heads give {in_words(own, percent=True)} of their attention to the first token; uniform attention would give "
        f"{100 * even.mean:.2g} % ({count_documents(own.n)})."
    )
    return Finding(text, "heads?metric=sink_mass", _strength(own, even.mean))


def _perturbation(runs: Runs) -> Finding | None:
    """Return the clearest cost of a perturbation at 5 %, or at the lowest higher rate, on targets that are untouched.

    The loss of the perturbed words themselves rises too, and says nothing about how others are predicted.
    """
    run = runs.find("perturb")
    if run is None:
        return None
    rates = sorted(rate for rate in run.config.rates if rate >= 0.05)
    kinds = run.config.kinds or tuple(KINDS)
    costs = {}
    for kind in kinds if rates else ():
        values = run.values(f"rise_{kind}_at_{percent(rates[0])}_untouched")
        if values:
            costs[kind] = interval(values, tests=len(kinds))
    clear = {kind: cost for kind, cost in costs.items() if cost.mean > 0 and supports(cost, 0.0, _LEAST_COST)}
    if not clear:
        return None
    kind = max(clear, key=lambda kind: _strength(clear[kind], 0.0))
    among = f", the clearest of {len(costs)} perturbations" if len(costs) > 1 else ""
    text = (
        f"With {percent(rates[0])} % of {KINDS[kind]}{among}, the loss of the other tokens rises by "
        f"{in_words(clear[kind])} nats ({count_documents(clear[kind].n)})."
    )
    return Finding(text, "perturbation", _strength(clear[kind], 0.0))


def _length(runs: Runs) -> Finding | None:
    """Return what texts beyond the trained length cost, if they were measured."""
    found = runs.request("extend")
    if found is None or not found[0].beyond:
        return None
    request, run = found
    methods = [name for name in request.options["methods"] if name != "none"]
    changes = {name: run.values(f"loss_beyond_{name}", less="loss_beyond_none") for name in methods}
    rises = {name: interval(values, tests=len(methods)) for name, values in changes.items() if values}
    helping = {name: about for name, about in rises.items() if about.mean < 0 and supports(about, 0.0, _LEAST_COST)}
    if not helping:
        return None
    best = min(helping, key=lambda name: helping[name].mean)
    text = (
        f"Beyond the trained length, {best} lowers the loss most of {len(rises)} methods, by "
        f"{in_words(negative(helping[best]))} nats per token ({count_documents(helping[best].n)})."
    )
    return Finding(text, "length", _strength(helping[best], 0.0))


def _answers(measurement: str, right: str, unit: str) -> Rule:
    """Return the rule of an accuracy above chance."""

    def rule(runs: Runs) -> Finding | None:
        about, chance = declared_mean(runs.other(measurement), "accuracy")
        if about is None or chance is None or about.mean <= chance or not supports(about, chance):
            return None
        text = f"The model {right} {in_words(about, percent=True)} of {about.n} {unit}; chance is {100 * chance:.0f} %."
        return Finding(text, f"measured-{measurement}", _strength(about, chance))

    return rule


def _position(runs: Runs) -> Finding | None:
    """Compare the share of position in the keys with that of the untrained model, on the same documents."""
    both = [runs.other("split", weights) for weights in (runs.own, _UNTRAINED)]
    own, untrained = (declared_mean(run, "k_position")[0] for run in both)
    change = jackknife_difference(both[0], "k_position", both[1])
    if own is None or untrained is None or change is None or runs.own == _UNTRAINED:
        return None
    if not supports(change, 0.0, _CLEAR_SHARE):
        return None
    text = (
        f"Position accounts for {in_words(own, percent=True)} of the keys' variance, against "
        f"{in_words(untrained, percent=True)} in one untrained model ({count_documents(own.n)})."
    )
    return Finding(text, "measured-split", _strength(change, 0.0))


def _residual(runs: Runs) -> Finding | None:
    """Return the cost of exactly additive logits."""
    run = runs.find("residual") or runs.other("residual")
    cost = None if run is None else model_mean(run, "loss_strength_0", less="loss")
    if run is None or cost is None or cost.mean < 0 or not supports(cost, 0.0, _LEAST_COST):
        return None
    before = model_mean(run, "loss").mean
    text = (
        f"With exactly additive logits in all heads the loss rises from {before:.2f} to {before + cost.mean:.2f} nats, "
        f"by {in_words(cost)} ({count_documents(cost.n)})."
    )
    return Finding(text, "measured-residual", _strength(cost, 0.0))


RULES: Mapping[str, Rule] = {
    "key": _of_training("unique_c", "the key"),
    "distance": _of_training("unique_a", "the distance"),
    "pure heads": _pure_heads,
    "uniform heads": _uniform_heads,
    "sink": _sink,
    "perturbation": _perturbation,
    "length": _length,
    "residual": _residual,
    "position": _position,
    "prompts": _answers("prompts", "answers", "prompts correctly"),
    "choices": _answers("choices", "chooses the right alternative in", "items"),
    "additivity": _additivity,
}
"""The rules by name; of two findings of the same strength the earlier rule comes first."""


def _against_untrained(runs: Runs, metric: str) -> tuple[Interval, Interval, Interval] | None:
    """Return a metric of axes on the model and on the untrained one, and their difference."""
    found = runs.weights("axes")
    if runs.own == _UNTRAINED or runs.own not in found or _UNTRAINED not in found:
        return None
    own, untrained = found[runs.own], found[_UNTRAINED]
    change = untrained_difference(own, metric, untrained)
    return None if change is None else (document_mean(own, metric), document_mean(untrained, metric), change)


def _labels(runs: Runs) -> tuple[dict[str, int], dict[str, int], int] | None:
    """Return the number of heads with each label, that of the untrained model, and the number of heads.

    None without an untrained model to compare with, or on too few documents.
    """
    found = runs.weights("heads")
    if runs.own == _UNTRAINED or not {runs.own, _UNTRAINED} <= found.keys():
        return None
    counts, untrained = _count(found[runs.own]), _count(found[_UNTRAINED])
    total = sum(counts.values())
    return (counts, untrained, total) if total and len(found[runs.own].documents) >= LEAST_DOCUMENTS else None


def _count(run: StoredRun, *, all_keys: bool = False) -> dict[str, int]:
    """Return the number of heads with each label, over all documents together where there are several."""
    found = Counter(head_labels(run, all_keys=all_keys).values())
    return {name: found[code] for code, name in enumerate(LABELS)}


def _share(label: str) -> str:
    """Return the metric that is the share of heads with a label, sinks apart."""
    return "heads_sink" if label == "sink" else f"heads_{label}_no_sink"


def _single(run: StoredRun, label: str, total: int) -> str:
    """Return the range over documents of the number of heads with a label, in words."""
    shares = run.document_means(_share(label)).values()
    return HeadCount(0, total, tuple(round(total * share) for share in shares)).single


def _learned(runs: Runs, label: str) -> bool:
    """Return whether more heads have a label than in the untrained model.

    That must hold in every document, by the interval of the difference over documents, and by the counts over all
    documents together.
    """
    counted, found = _labels(runs), runs.weights("heads")
    if counted is None or not counted[0][label]:
        return False
    own, untrained = (found[weights].document_means(_share(label)) for weights in (runs.own, _UNTRAINED))
    changes = [own[name] - untrained[name] for name in own if name in untrained]
    if len(changes) < LEAST_DOCUMENTS or min(changes) <= 0 or (interval(changes).low or 0.0) <= 0:
        return False
    counts, others, total = counted
    return _more(counts[label], others[label], total)


def _more(count: int, other: int, total: int) -> bool:
    """Return whether a count is larger than another of as many heads, by Wilson's 95 % intervals."""
    return share_bounds(count / total, total)[0] > share_bounds(other / total, total)[1]


def _surprise(count: int, other: int, total: int) -> float:
    """Return the difference of two shares relative to half of the first one's interval."""
    low, high = share_bounds(count / total, total)
    return (count - other) / total / max((high - low) / 2, 1e-9)


def supports(about: Interval, value: float, least: float = 0.0) -> bool:
    """Return whether a mean is evidence for a difference to a value: the support that every sentence needs.

    Its interval is of at least :data:`LEAST_DOCUMENTS`, has a width (equal documents are no evidence) and excludes the
    value, and the difference is at least ``least``.
    """
    if about.low is None or about.high is None or about.low == about.high or about.n < LEAST_DOCUMENTS:
        return False
    return not about.low <= value <= about.high and abs(about.mean - value) >= least


def _strength(about: Interval, value: float) -> float:
    half = ((about.high or 0.0) - (about.low or 0.0)) / 2
    return abs(about.mean - value) / half if half > 0 else math.inf


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
