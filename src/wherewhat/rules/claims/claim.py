"""Declaration of a claim, the verdict that follows from the statements of its rule, and how a verdict is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from wherewhat.measures.statistics import Interval, in_brief, in_words
from wherewhat.models.source import Weights
from wherewhat.rules.rule import Bound, Item, Judged, Number, Rule, Statement
from wherewhat.runs.collection import Runs
from wherewhat.runs.request import Request
from wherewhat.runs.results import StoredRun

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

LONGEST_TITLE = 40
"""Most characters of a claim's title."""

_MORE = "more documents, prompts or tokens where an interval includes a threshold"


@dataclass(frozen=True)
class Evidence:
    """Finished runs by the names that claims use.

    Attributes:
        runs: The finished runs.
        requests: Request of each run by name, on the model itself.
        reasons: Why a run is missing, by name.
        planes: Smallest number of planes in a layer that rotates queries and keys; 0 if none rotates.
        controls: Number of random control models that were drawn, with consecutive seeds.
    """

    runs: Runs
    requests: Mapping[str, Request]
    reasons: Mapping[str, str] = field(default_factory=dict)
    planes: int = 1
    controls: int = 1

    def find(self, name: str, weights: Weights | None = None, *, draw: int = 0) -> StoredRun | None:
        """Return the run of that name on the model itself, or on a control model; None if it is missing.

        ``draw`` counts the control models that were drawn, from 0.
        """
        request = self.requests.get(name)
        if request is None:
            return self.runs.other(name, weights) if weights is None else None
        wanted = request if weights is None else request.with_weights(weights, draw=draw)
        return next((run for finished, run in self.runs.finished if finished == wanted), None)

    def run(self, name: str) -> StoredRun:
        """Return the run of that name on the model itself, which must exist."""
        run = self.find(name)
        assert run is not None, name
        return run


@dataclass(frozen=True)
class Claim:
    """A claim and how it is judged.

    Attributes:
        number: Its number in the documentation.
        title: A few words, at most :data:`LONGEST_TITLE` characters.
        statement: The claim in one sentence.
        source: arXiv number or other reference of the paper.
        change: What would change the verdict.
        rule: Yields its parts, which are statements, and numbers; None if it is not judged on a pretrained model.
        rotary: Whether it applies only to models that rotate queries and keys.
        reason: Why it is not judged.
        drawn: Whether the verdict rests on a random control model, of which several can be drawn.
    """

    number: int
    title: str
    statement: str
    source: str
    change: str = ""
    rule: Rule[Any] | None = None
    rotary: bool = False
    reason: str = ""
    drawn: bool = False

    def __post_init__(self) -> None:
        """Check the length of the title."""
        if not 0 < len(self.title) <= LONGEST_TITLE:
            raise ValueError(f"claim {self.number} has the title '{self.title}': give 1 to {LONGEST_TITLE} characters")


@dataclass(frozen=True)
class Stability:
    """How often a verdict changes if other documents are drawn from those that were measured.

    Attributes:
        over: What was drawn; why nothing was if ``changed`` is None.
        verdict: The verdict of the rule on all documents, in words.
        changed: Share of the resamples with another verdict.
        resamples: Number of resamples.
        verdicts: Share of the resamples with each verdict, by its words, the most frequent first.
    """

    over: str
    verdict: str = ""
    changed: float | None = None
    resamples: int = 0
    verdicts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim judged on a model.

    Attributes:
        claim: The claim.
        verdict: The verdict.
        condition: Completes the verdict "holds if"; for "not judged", and for a verdict that is not stable, the reason.
        judged: Numbers, parts and notes; empty if it was not judged.
        runs: Names of the run directories of the model itself that the numbers are from.
        stability: How often the verdict of the rule changes under resampling.
    """

    claim: Claim
    verdict: Verdict
    condition: str = ""
    judged: Judged = field(default_factory=Judged)
    runs: tuple[str, ...] = ()
    stability: Stability = Stability("the claim is not judged")


def claim(
    number: int,
    *needs: str,
    title: str,
    source: str,
    change: str,
    also: tuple[str, ...] = (),
    rotary: bool = False,
    drawn: bool = False,
) -> Callable[[Callable[[Evidence], Iterable[Item]]], Claim]:
    """Turn a function into a :class:`Claim` with that rule; the statement is the docstring of the function."""

    def declare(judge: Callable[[Evidence], Iterable[Item]]) -> Claim:
        statement = " ".join((judge.__doc__ or "").split())
        return Claim(number, title, statement, source, change, Rule(judge, needs, also=also), rotary, drawn=drawn)

    return declare


def verdict_of(parts: Sequence[Statement]) -> tuple[Verdict, str]:
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
    missing = claim.rule.missing(evidence)
    if missing is not None:
        return ClaimVerdict(claim, "not judged", evidence.reasons.get(missing, f"{missing} was not measured"))
    judged = claim.rule.judged(evidence)
    if not judged.statements:
        return ClaimVerdict(claim, "not judged", " ".join(judged.notes))
    runs = tuple(evidence.run(name).directory.path.name for name in claim.rule.needs)
    return ClaimVerdict(claim, *verdict_of(judged.statements), judged, runs)


def verdict_json(verdict: ClaimVerdict) -> dict[str, Any]:
    """Return a judged claim as it is stored."""
    claim, judged = verdict.claim, verdict.judged
    return {
        "number": claim.number,
        "title": claim.title,
        "statement": claim.statement,
        "source": claim.source,
        "verdict": verdict.verdict,
        "condition": verdict.condition,
        "stability": asdict(verdict.stability),
        "numbers": [_number_json(number) for number in judged.numbers],
        "parts": [
            {
                "statement": part.text,
                "outcome": part.outcome,
                "bounds": [_bound_json(test) for test in part.tests if isinstance(test, Bound)],
            }
            for part in judged.statements
        ],
        "notes": list(judged.notes),
        "change": f"{claim.change}; {_MORE}" if verdict.verdict == "cannot be told" else claim.change,
        "runs": list(verdict.runs),
    }


def _number_json(number: Number) -> dict[str, Any]:
    control = {"control": _finite(number.control), "control_title": number.control_title}
    return {"title": number.title, **_interval_json(number.value), **control}


def _bound_json(bound: Bound) -> dict[str, Any]:
    value = Interval(math.nan, None, None, 0) if bound.value is None else bound.value
    return {**_interval_json(value), "side": bound.side, "threshold": bound.threshold, "outcome": bound.outcome}


def _interval_json(value: Interval) -> dict[str, Any]:
    return {**{name: _finite(getattr(value, name)) for name in ("mean", "low", "high")}, "n": value.n}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def verdict_words(claim: Mapping[str, Any]) -> str:
    """Return the stored verdict on a claim in words, with the condition or the reason."""
    verdict, condition = claim["verdict"], claim["condition"]
    return f"{verdict} {condition}" if verdict == "holds if" else f"{verdict}: {condition}" if condition else verdict


def stability_words(claim: Mapping[str, Any]) -> str:
    """Return in words how often the stored verdict on a claim changes under resampling, or why that is not known."""
    stability = claim.get("stability") or {"changed": None, "over": "the result is of a version without resampling"}
    changed, verdicts = stability["changed"], stability.get("verdicts", {})
    if changed is None:
        return f"not resampled: {stability['over']}"
    resamples = f"{stability['resamples']:,} resamples of {stability['over']}"
    if not changed:
        return f"no other verdict in {resamples}"
    other = next((words for words in verdicts if words != stability["verdict"]), "")
    brief = "holds if …" if other.startswith("holds if") else other
    return f"another verdict in {percent(changed)} of {resamples}, most often “{brief}”"


def percent(share: float) -> str:
    """Return a share in whole percent, and a smaller one as such."""
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def stored_interval(value: Mapping[str, Any]) -> Interval:
    """Return the interval of a stored number or bound; its mean is NaN if it is undefined."""
    mean = math.nan if value["mean"] is None else value["mean"]
    return Interval(mean, value["low"], value["high"], value["n"])


def number_words(number: Mapping[str, Any]) -> str:
    """Return a stored number of a claim with its interval in words."""
    return "undefined" if number["mean"] is None else in_words(stored_interval(number))


SIGNS: Mapping[str, str] = {"at least": "≥", "at most": "≤", "less than": "<", "above": ">", "below": "<"}
"""Sign of each side of a threshold."""


def deciding_bound(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the stored bound that decides a verdict; None if there is none.

    That is the contradicted bound farthest from its threshold, relative to its interval; if none is contradicted, the
    open one nearest to it; and if all hold, the nearest one.
    """
    listed: list[Mapping[str, Any]] = [bound for part in claim["parts"] for bound in part.get("bounds", ())]
    bounds = [bound for bound in listed if bound["mean"] is not None]

    def strength(bound: Mapping[str, Any]) -> float:
        return Bound(stored_interval(bound), bound["side"], bound["threshold"]).strength

    contradicted = [bound for bound in bounds if bound["outcome"] is False]
    if contradicted:
        return max(contradicted, key=strength)
    unsure = [bound for bound in bounds if bound["outcome"] is None]
    return min(unsure or bounds, key=strength, default=None)


def deciding_words(claim: Mapping[str, Any]) -> str:
    """Return the two numbers that decide a stored verdict, such as ``0.87 (≥ 0.9)``: a mean, and what is demanded.

    Without a stored threshold they are the first number and its control, ``0.12 (vs 0.25)``; empty if there is none.
    """
    bound = deciding_bound(claim)
    if bound is not None:
        mean = in_brief(stored_interval(bound))
        return f"{mean} ({SIGNS.get(bound['side'], bound['side'])} {bound['threshold']:.2g})"
    numbers = (x for x in claim["numbers"] if x["mean"] is not None and x["control"] is not None)
    return next((f"{in_brief(stored_interval(x))} (vs {x['control']:.2g})" for x in numbers), "")
