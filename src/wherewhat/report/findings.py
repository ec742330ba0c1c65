"""Findings: sentences that the numbers of a report support, each with interval, control and a link to its evidence.

:data:`RULES` holds one function per sentence. A function returns None where the numbers do not support its sentence:
where an interval includes no effect, where there is no control to compare with, or where a single document has no
interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from wherewhat.measures.perturb.measurement import KINDS, percent
from wherewhat.measures.statistics import Interval, interval, share_bounds
from wherewhat.measures.swaps import LABELS
from wherewhat.report.claims.claim import (
    contrast,
    declared_mean,
    document_difference,
    document_mean,
    model_mean,
    negative,
)
from wherewhat.report.data import head_labels
from wherewhat.report.measurements import Runs
from wherewhat.runs.results import StoredRun

MOST = 6
"""Largest number of findings on a page."""

_UNTRAINED = "random"

_CLEAR_RATIO, _CLEAR_CHANGE = 1.5, 0.05
"""Smallest ratio of shares, and change of r, that are more than the difference between two untrained models."""

_HIGH = 0.7
"""Smallest r that is called high."""

_LEAST_COST = 0.01
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
        if found is None or not _excludes(found[2], 0.0):
            return None
        own, untrained, change = found
        # The interval is over documents: one untrained model differs from another by more than that.
        if max(own.mean, untrained.mean) < _CLEAR_RATIO * min(own.mean, untrained.mean):
            return None
        verb = _verb(own.mean, untrained.mean)
        text = (
            f"Training {verb} what only {what} explains: {_percent(own)} of the logits' variance, against "
            f"{_percent(untrained)} in one untrained model ({_documents(own)})."
        )
        return Finding(text, f"heads?metric={metric}", _strength(change, 0.0))

    return rule


def _additivity(runs: Runs) -> Finding | None:
    """Compare r with that of the untrained model: it is no sign of learning where they do not differ."""
    found = _against_untrained(runs, "r")
    if found is None or found[2].low is None:
        return None
    own, untrained, change = found
    sizes = f"{_plus_minus(own)} here, {_plus_minus(untrained)} in one untrained model ({_documents(own)})"
    if not _excludes(change, 0.0) or abs(change.mean) < _CLEAR_CHANGE:
        high = "A high r" if own.mean >= _HIGH else "r"
        return Finding(f"{high} is no sign of training in this model: {sizes}.", "heads?metric=r", 0.0)
    verb = "more" if change.mean > 0 else "less"
    return Finding(f"Training made logits {verb} additive: r is {sizes}.", "heads?metric=r", _strength(change, 0.0))


def _pure_heads(runs: Runs) -> Finding | None:
    """Count the heads that follow positions alone or contents alone, if the untrained model has fewer of them."""
    counts, untrained, total = _labels(runs)
    parts, controls, labels, strength = [], [], [], 0.0
    for name, what in (("positional", "positions"), ("symbolic", "contents")):
        count, other = counts.get(name, 0), None if untrained is None else untrained.get(name, 0)
        if not count or (other is not None and not _more(count, other, total)):
            continue
        parts.append(f"{count} {what} alone")
        labels.append(name)
        controls.append("" if other is None else str(other))
        strength = max(strength, _surprise(count, other or 0, total))
    if not parts:
        return None
    beside = f"one untrained model: {' and '.join(controls)}; " if all(controls) else ""
    text = f"Of {total} heads, {_follow(parts)} ({beside}{_count_documents(runs)})."
    return Finding(text, f"heads?label={','.join(labels)}", strength)


def _follow(parts: Sequence[str]) -> str:
    """Return ``8 follow positions alone, 139 contents alone``."""
    first, *rest = parts
    count, what = first.split(" ", 1)
    verb = "follows" if count == "1" else "follow"
    return ", ".join([f"{count} {verb} {what}", *rest])


def _uniform_heads(runs: Runs) -> Finding | None:
    """Count the heads whose attention is uniform, if the untrained model has fewer of them, or there is none."""
    counts, untrained, total = _labels(runs)
    count = counts.get("uniform", 0)
    other = None if untrained is None else untrained.get("uniform", 0)
    if not count or (other is not None and not _more(count, other, total)):
        return None
    verb = "attends" if count == 1 else "attend"
    beside = "" if other is None else f"one untrained model: {other}; "
    text = (
        f"{count} of {total} heads {verb} uniformly, to no position and no content ({beside}{_count_documents(runs)})."
    )
    return Finding(text, "heads?label=uniform", _surprise(count, other or 0, total))


def _sink(runs: Runs) -> Finding | None:
    """Compare attention on the first token with that of uniform attention."""
    run = runs.find("heads")
    if run is None:
        return None
    own, even = (document_mean(run, name) for name in ("sink_mass", "sink_mass_uniform"))
    if not even.n or not _excludes(own, 2 * even.mean) or own.mean < 2 * even.mean:
        return None
    text = (
        f"Heads give {_percent(own)} of their attention to the first token; uniform attention would give "
        f"{100 * even.mean:.2g} % ({_documents(own)})."
    )
    return Finding(text, "heads?metric=sink_mass", _strength(own, even.mean))


def _perturbation(runs: Runs) -> Finding | None:
    """Return what the perturbation with the clearest effect costs at 5 %, or at the lowest rate that was measured."""
    run = runs.find("perturb")
    if run is None:
        return None
    best: tuple[float, str] | None = None
    for kind in run.config.kinds or KINDS:
        for rate in sorted(rate for rate in run.config.rates if rate >= 0.05):
            values = run.values(f"rise_{kind}_at_{percent(rate)}")
            cost = interval(values) if values else None
            if cost is None or not _excludes(cost, 0.0) or cost.mean < _LEAST_COST:
                continue
            strength = _strength(cost, 0.0)
            text = (
                f"With {percent(rate)} % of {KINDS[kind]}, the loss rises by {_plus_minus(cost)} nats per token "
                f"({_documents(cost)})."
            )
            if best is None or strength > best[0]:
                best = (strength, text)
            break
    return None if best is None else Finding(best[1], "perturbation", best[0])


def _length(runs: Runs) -> Finding | None:
    """Return what texts beyond the trained length cost, if they were measured."""
    found = runs.request("extend")
    if found is None or not found[0].beyond:
        return None
    request, run = found
    methods = [name for name in request.options["methods"] if name != "none"]
    rises = {name: model_mean(run, f"loss_beyond_{name}", less="loss_beyond_none") for name in methods}
    helping = {name: about for name, about in rises.items() if _excludes(about, 0.0) and about.mean < 0}
    if not helping:
        return None
    best = min(helping, key=lambda name: helping[name].mean)
    text = (
        f"Beyond the trained length, {best} lowers the loss by {_plus_minus(negative(helping[best]))} nats per token "
        f"({_documents(helping[best])})."
    )
    return Finding(text, "length", _strength(helping[best], 0.0))


def _answers(measurement: str, right: str, unit: str) -> Rule:
    """Return the rule of an accuracy above chance."""

    def rule(runs: Runs) -> Finding | None:
        about, chance = declared_mean(runs.other(measurement), "accuracy")
        if about is None or chance is None or about.mean <= chance or not _excludes(about, chance):
            return None
        text = f"The model {right} {_percent(about)} of {about.n} {unit}; chance is {100 * chance:.0f} %."
        return Finding(text, f"measured-{measurement}", _strength(about, chance))

    return rule


def _position(runs: Runs) -> Finding | None:
    """Compare the share of position in the keys with that of the untrained model."""
    both = (runs.other("split", weights) for weights in (runs.own, _UNTRAINED))
    own, untrained = (declared_mean(run, "k_position")[0] for run in both)
    change = contrast(own, untrained)
    if own is None or untrained is None or change is None or runs.own == _UNTRAINED or not _excludes(change, 0.0):
        return None
    text = (
        f"Position accounts for {_percent(own)} of the keys' variance, against {_percent(untrained)} in one untrained "
        f"model ({_documents(own)})."
    )
    return Finding(text, "measured-split", _strength(change, 0.0))


def _residual(runs: Runs) -> Finding | None:
    """Return the cost of exactly additive logits."""
    run = runs.other("residual")
    cost = None if run is None else model_mean(run, "loss_strength_0", less="loss")
    if cost is None or not _excludes(cost, 0.0) or cost.mean < _LEAST_COST:
        return None
    text = f"Exactly additive logits in all heads cost {_plus_minus(cost)} nats per token ({_documents(cost)})."
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
    """Return a metric of axes on the model and on the untrained one, and the difference on the same documents."""
    found = runs.weights("axes")
    if runs.own == _UNTRAINED or runs.own not in found or _UNTRAINED not in found:
        return None
    own, untrained = found[runs.own], found[_UNTRAINED]
    change = document_difference(own, metric, untrained)
    return None if change is None else (document_mean(own, metric), document_mean(untrained, metric), change)


def _labels(runs: Runs) -> tuple[dict[str, int], dict[str, int] | None, int]:
    """Return the number of heads with each label, that of the untrained model, and the number of heads."""
    found = runs.weights("heads")
    if runs.own not in found:
        return {}, None, 0
    counts = _count(found[runs.own])
    untrained = _count(found[_UNTRAINED]) if _UNTRAINED in found and runs.own != _UNTRAINED else None
    return counts, untrained, sum(counts.values())


def _count(run: StoredRun) -> dict[str, int]:
    """Return the number of heads with each label, over all documents together where there are several."""
    found = Counter(head_labels(run).values())
    return {name: found[code] for code, name in enumerate(LABELS)}


def _more(count: int, other: int, total: int) -> bool:
    """Return whether a count is larger than another of as many heads, by Wilson's 95 % intervals."""
    return share_bounds(count / total, total)[0] > share_bounds(other / total, total)[1]


def _surprise(count: int, other: int, total: int) -> float:
    """Return the difference of two shares relative to half of the first one's interval."""
    low, high = share_bounds(count / total, total)
    return (count - other) / total / max((high - low) / 2, 1e-9)


def _excludes(about: Interval, value: float) -> bool:
    """Return whether an interval with a width excludes a value; equal documents are no evidence."""
    if about.low is None or about.high is None or about.low == about.high:
        return False
    return not about.low <= value <= about.high


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


def _plus_minus(about: Interval) -> str:
    if about.low is None or about.high is None:
        return f"{about.mean:.2g}"
    half = (about.high - about.low) / 2
    decimals = max(0, min(4, 1 - math.floor(math.log10(half)))) if half > 0 else 2
    if about.reach is None:
        return f"{about.mean:.{decimals}f} ({about.low:.{decimals}f} to {about.high:.{decimals}f})"
    return f"{about.mean:.{decimals}f} ± {half:.{decimals}f}"


def _percent(about: Interval) -> str:
    if about.low is None or about.high is None:
        return f"{100 * about.mean:.0f} %"
    if about.reach is None:
        return f"{100 * about.mean:.0f} % ({100 * about.low:.0f} to {100 * about.high:.0f} %)"
    return f"{100 * about.mean:.0f} ± {100 * about.reach:.0f} %"


def _documents(about: Interval) -> str:
    return f"{about.n} documents" if about.n > 1 else "one document"


def _count_documents(runs: Runs) -> str:
    """Return the number of documents that heads were labelled on, in words."""
    run = runs.find("heads")
    assert run is not None
    return _documents(Interval(0.0, None, None, len(run.documents)))
