"""Declaration of a claim, its verdict, and the numbers of runs that rules read.

A rule returns numbers with intervals and controls, and *parts*: statements with a threshold that the numbers support,
contradict, or leave open. The verdict follows from the parts, see :func:`verdict_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from wherewhat.measures.statistics import Interval, around, in_words, interval, student
from wherewhat.models.source import Weights
from wherewhat.report.measurements import Runs
from wherewhat.runs.request import Request
from wherewhat.runs.results import StoredRun
from wherewhat.scores import UNBOUNDED

Verdict = Literal["holds", "holds if", "does not hold", "cannot be told", "not judged"]

HAN, URRUTIA = "arXiv 2503.13305", "arXiv 2605.31558 and 2511.11579"
"""Sources of most claims."""

HIGH_R = 0.9
"""Smallest r that counts as the high correlation of arXiv 2503.13305 (0.959)."""
CLEAR = 0.05
"""Smallest difference of correlations, shares and scores that counts."""
COSTLY = 0.1
"""Rise of the loss in nats, about 10 % of the perplexity, from which a change matters."""
MOST = 0.75
"""Share of heads that counts as most of them."""
FEWEST_HEADS = 3
"""Smallest number of heads of which a share is judged."""

LEAST_DOCUMENTS = 3
"""Fewest documents that a sentence or a part of a claim rests on: the spread of two is not known well enough."""

_MORE = "more documents, prompts or tokens where an interval includes a threshold"


@dataclass(frozen=True)
class ClaimNumber:
    """A number that a claim is judged by.

    Attributes:
        title: What it is.
        value: Its mean with its 95 % interval.
        control: The number to compare it with; None if there is none.
        control_title: What the control is.
    """

    title: str
    value: Interval
    control: float | None = None
    control_title: str = ""


@dataclass(frozen=True)
class ClaimPart:
    """One statement of a claim.

    Attributes:
        statement: The statement with its threshold.
        outcome: True if the interval is on the stated side of the threshold, False if it is on the other side, None if
            it includes the threshold or there is no interval of at least three documents.
        condition: Completes "holds if" where other parts do not hold.
    """

    statement: str
    outcome: bool | None
    condition: str


@dataclass(frozen=True)
class Judged:
    """What a rule returns.

    Attributes:
        numbers: The numbers, most important first.
        parts: The parts of the claim.
        notes: What else a reader has to know about these numbers.
    """

    numbers: Sequence[ClaimNumber]
    parts: Sequence[ClaimPart]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Evidence:
    """Finished runs by the names that claims use.

    Attributes:
        runs: The finished runs.
        requests: Request of each run by name, on the model itself.
        reasons: Why a run is missing, by name.
        planes: Smallest number of planes in a layer that rotates queries and keys; 0 if none rotates.
    """

    runs: Runs
    requests: Mapping[str, Request]
    reasons: Mapping[str, str] = field(default_factory=dict)
    planes: int = 1

    def find(self, name: str, weights: Weights | None = None) -> StoredRun | None:
        """Return the run of that name on the model itself, or on a control model; None if it is missing."""
        request = self.requests.get(name)
        if request is None:
            return self.runs.other(name, weights) if weights is None else None
        wanted = request if weights is None else request.with_weights(weights)
        return next((run for made, run in self.runs.finished if made == wanted), None)

    def run(self, name: str) -> StoredRun:
        """Return the run of that name on the model itself, which must exist."""
        found = self.find(name)
        assert found is not None, name
        return found


@dataclass(frozen=True)
class Claim:
    """A claim and how it is judged.

    Attributes:
        number: Its number in the documentation.
        statement: The claim in one sentence.
        source: arXiv number or other reference of the paper.
        change: What would change the verdict.
        needs: Names of the runs that its rule reads.
        rule: Returns numbers and parts; None if the claim is not judged on a pretrained model.
        also: Names of further runs that its rule reads where they exist.
        rotary: Whether it applies only to models that rotate queries and keys.
        reason: Why it is not judged.
    """

    number: int
    statement: str
    source: str
    change: str = ""
    needs: tuple[str, ...] = ()
    rule: Callable[[Evidence], Judged] | None = None
    also: tuple[str, ...] = ()
    rotary: bool = False
    reason: str = ""


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim judged on a model.

    Attributes:
        claim: The claim.
        verdict: The verdict.
        condition: Completes the verdict "holds if"; for "not judged" the reason.
        judged: Numbers, parts and notes; empty if it was not judged.
        runs: Names of the run directories of the model itself that the numbers are from.
    """

    claim: Claim
    verdict: Verdict
    condition: str = ""
    judged: Judged = field(default_factory=lambda: Judged((), ()))
    runs: tuple[str, ...] = ()


def claim(
    number: int,
    *,
    source: str,
    change: str,
    needs: tuple[str, ...],
    also: tuple[str, ...] = (),
    rotary: bool = False,
) -> Callable[[Callable[[Evidence], Judged]], Claim]:
    """Turn a rule into a :class:`Claim`, whose attributes these are; the statement is the docstring of the rule."""

    def declare(rule: Callable[[Evidence], Judged]) -> Claim:
        statement = " ".join((rule.__doc__ or "").split())
        return Claim(number, statement, source, change, needs, rule, also, rotary)

    return declare


def verdict_of(parts: Sequence[ClaimPart]) -> tuple[Verdict, str]:
    """Return the verdict that follows from the parts of a claim, and its condition.

    A claim holds if all parts do, and does not hold if none does. If some hold and others do not, it holds under the
    conditions of the former. If none is contradicted and some are open, it cannot be told.
    """
    outcomes = [part.outcome for part in parts]
    if outcomes and all(outcomes):
        return "holds", ""
    if False not in outcomes:
        return "cannot be told", ""
    conditions = [part.condition for part in parts if part.outcome]
    return ("holds if", " and ".join(conditions)) if conditions else ("does not hold", "")


def judge(claim: Claim, evidence: Evidence) -> ClaimVerdict:
    """Judge one claim by finished runs."""
    if claim.rule is None:
        return ClaimVerdict(claim, "not judged", claim.reason)
    if claim.rotary and not evidence.planes:
        return ClaimVerdict(claim, "not judged", "no layer of this model rotates its queries and keys")
    missing = next((name for name in claim.needs if evidence.find(name) is None), None)
    if missing is not None:
        return ClaimVerdict(claim, "not judged", evidence.reasons.get(missing, f"{missing} was not measured"))
    judged = claim.rule(evidence)
    if not judged.parts:
        return ClaimVerdict(claim, "not judged", " ".join(judged.notes))
    runs = tuple(evidence.run(name).directory.path.name for name in claim.needs)
    verdict, condition = verdict_of(judged.parts)
    return ClaimVerdict(claim, verdict, condition, judged, runs)


def at_least(value: Interval | None, threshold: float) -> bool | None:
    """Return whether a whole interval is at or above a threshold.

    None if it includes the threshold, does not exist or is of fewer than :data:`LEAST_DOCUMENTS`.
    """
    if value is None or value.low is None or value.high is None or value.n < LEAST_DOCUMENTS:
        return None
    return True if value.low >= threshold else False if value.high < threshold else None


def at_most(value: Interval | None, threshold: float) -> bool | None:
    """Return whether a whole interval is at or below a threshold; None as in :func:`at_least`."""
    return None if value is None else at_least(negative(value), -threshold)


def both(*outcomes: bool | None) -> bool | None:
    """Return the conjunction of outcomes, of which some may be open."""
    return False if False in outcomes else None if None in outcomes else True


def negative(value: Interval) -> Interval:
    """Return the interval of the negative value."""
    low, high = (None if x is None else -x for x in (value.high, value.low))
    return Interval(-value.mean, low, high, value.n)


def scaled(value: Interval, factor: float) -> Interval:
    """Return the interval of a positive multiple of the value."""
    low, high = (None if x is None else factor * x for x in (value.low, value.high))
    return Interval(factor * value.mean, low, high, value.n)


def document_mean(run: StoredRun, metric: str) -> Interval:
    """Return the interval over documents of a metric, averaged over heads and layers."""
    values = list(run.document_means(metric).values())
    return interval(values).within(run.range_of(metric)) if values else Interval(math.nan, None, None, 0)


def document_difference(
    first: StoredRun, metric: str, second: StoredRun | None, other: str | None = None
) -> Interval | None:
    """Return the interval of the difference of two metrics on the same documents; None without common documents."""
    if second is None:
        return None
    one, two = first.document_means(metric), second.document_means(other or metric)
    changes = [one[name] - two[name] for name in one if name in two]
    return interval(changes) if changes else None


def untrained_difference(run: StoredRun, metric: str, untrained: StoredRun | None) -> Interval | None:
    """Return the difference of a metric of heads to that of the untrained model, with the interval of its mean.

    Besides the spread over documents, the interval includes that between untrained models, of which one was drawn: the
    difference of two of them, from the spread over the untrained model's heads within layers. None without common
    documents.
    """
    change = document_difference(run, metric, untrained)
    if untrained is None or change is None or change.low is None or change.high is None:
        return change
    by_layer: dict[int, list[float]] = {}
    for (layer, _), value in head_means(untrained, metric).items():
        by_layer.setdefault(layer, []).append(value)
    count = sum(map(len, by_layer.values()))
    free = count - len(by_layer)
    if not free:  # layers of one head: nothing is known about other untrained models
        return Interval(change.mean, None, None, change.n)
    means = {layer: sum(values) / len(values) for layer, values in by_layer.items()}
    squares = sum((value - means[layer]) ** 2 for layer, values in by_layer.items() for value in values)
    reach = math.hypot((change.high - change.low) / 2, student(free + 1) * math.sqrt(2 * squares / free / count))
    return Interval(change.mean, change.mean - reach, change.mean + reach, change.n)


def model_mean(run: StoredRun, metric: str, *, less: str | None = None) -> Interval:
    """Return the interval over documents of a metric of the model as a whole, or of its difference to another."""
    values = run.values(metric, less=less)
    if not values:
        return Interval(math.nan, None, None, 0)
    return interval(values).within(UNBOUNDED if less else run.range_of(metric))


def control_mean(run: StoredRun | None, metric: str) -> float | None:
    """Return the mean of a metric on a control model; None if there is none."""
    value = None if run is None else document_mean(run, metric).mean
    return None if value is None or math.isnan(value) else value


def declared_mean(run: StoredRun | None, metric: str) -> tuple[Interval | None, float | None]:
    """Return a metric with its declared interval, and its control metric; None for what does not exist."""
    summaries = [] if run is None else run.summaries
    found = next((summary for summary in summaries if summary.metric.name == metric), None)
    return (None, None) if found is None else (found.overall, found.control)


def jackknife_difference(first: StoredRun | None, metric: str, second: StoredRun | None) -> Interval | None:
    """Return the difference of a metric of all documents together in two runs on the same documents, paired.

    Its error is the jackknife's of the difference without each document (Efron & Stein 1981). None if the documents are
    not the same, or are two: their jackknife needs three.
    """
    one, two = declared_mean(first, metric)[0], declared_mean(second, metric)[0]
    if first is None or second is None or one is None or two is None:
        return None
    rests = first.without_each(metric), second.without_each(metric)
    changes = [rests[0][name] - rests[1][name] for name in rests[0] if name in rests[1]]
    n = len(changes)
    if n < 3 or any(len(rest) != n for rest in rests):
        return None
    middle = sum(changes) / n
    return around(one.mean - two.mean, math.sqrt((n - 1) / n * sum((x - middle) ** 2 for x in changes)), n)


def contrast(first: Interval | None, second: Interval | None) -> Interval | None:
    """Return the difference of two proportions of different prompts with its interval (MOVER, Zou & Donner 2008).

    The two must be independent: numbers of the same documents are subtracted document by document instead. With
    Wilson's intervals of about 15 prompts it contains the difference in 94 to 97 % of draws for accuracies of 0.2 to
    0.8, and in more near 0 and 1.
    """
    if first is None or first.low is None or first.high is None:
        return None
    if second is None or second.low is None or second.high is None:
        return None
    change = first.mean - second.mean
    low = change - math.hypot(first.mean - first.low, second.high - second.mean)
    high = change + math.hypot(first.high - first.mean, second.mean - second.low)
    return Interval(change, low, high, min(first.n, second.n))


def head_means(run: StoredRun, metric: str) -> dict[tuple[int, int], float]:
    """Return the mean over documents of a metric by layer and head."""
    found = run.head_documents(metric)
    return {place: sum(values.values()) / len(values) for place, values in found.items() if values}


def verdict_json(found: ClaimVerdict) -> dict[str, Any]:
    """Return a judged claim as it is stored."""

    def number(one: ClaimNumber) -> dict[str, Any]:
        value = {name: _finite(getattr(one.value, name)) for name in ("mean", "low", "high")}
        control = None if one.control is None else _finite(one.control)
        return {"title": one.title, **value, "n": one.value.n, "control": control, "control_title": one.control_title}

    claim, judged = found.claim, found.judged
    return {
        "number": claim.number,
        "statement": claim.statement,
        "source": claim.source,
        "verdict": found.verdict,
        "condition": found.condition,
        "numbers": [number(one) for one in judged.numbers],
        "parts": [{"statement": part.statement, "outcome": part.outcome} for part in judged.parts],
        "notes": list(judged.notes),
        "change": f"{claim.change}; {_MORE}" if found.verdict == "cannot be told" else claim.change,
        "runs": list(found.runs),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def opposite(outcome: bool | None) -> bool | None:
    """Return the negation of an outcome, which may be open."""
    return None if outcome is None else not outcome


def verdict_words(claim: Mapping[str, Any]) -> str:
    """Return the stored verdict on a claim in words, with the condition or the reason."""
    verdict, condition = claim["verdict"], claim["condition"]
    return f"{verdict} {condition}" if verdict == "holds if" else f"{verdict}: {condition}" if condition else verdict


def number_words(number: Mapping[str, Any]) -> str:
    """Return a stored number of a claim with its interval in words."""
    if number["mean"] is None:
        return "undefined"
    return in_words(Interval(number["mean"], number["low"], number["high"], number["n"]))
