"""Declaration of a claim, the verdict that follows from the statements of its rule, and how a verdict is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from wherewhat.measures.statistics import Interval, in_words
from wherewhat.models.source import Weights
from wherewhat.rules.rule import Item, Judged, Number, Rule, Statement
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

_MORE = "more documents, prompts or tokens where an interval includes a threshold"


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
        statement: The claim in one sentence.
        source: arXiv number or other reference of the paper.
        change: What would change the verdict.
        rule: Yields its parts, which are statements, and numbers; None if it is not judged on a pretrained model.
        rotary: Whether it applies only to models that rotate queries and keys.
        reason: Why it is not judged.
    """

    number: int
    statement: str
    source: str
    change: str = ""
    rule: Rule[Any] | None = None
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
    judged: Judged = field(default_factory=Judged)
    runs: tuple[str, ...] = ()


def claim(
    number: int, *needs: str, source: str, change: str, also: tuple[str, ...] = (), rotary: bool = False
) -> Callable[[Callable[[Evidence], Iterable[Item]]], Claim]:
    """Turn a function into a :class:`Claim` with that rule; the statement is the docstring of the function."""

    def declare(judge: Callable[[Evidence], Iterable[Item]]) -> Claim:
        statement = " ".join((judge.__doc__ or "").split())
        return Claim(number, statement, source, change, Rule(judge, needs, also=also), rotary)

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
        "statement": claim.statement,
        "source": claim.source,
        "verdict": verdict.verdict,
        "condition": verdict.condition,
        "numbers": [_number_json(number) for number in judged.numbers],
        "parts": [{"statement": part.text, "outcome": part.outcome} for part in judged.statements],
        "notes": list(judged.notes),
        "change": f"{claim.change}; {_MORE}" if verdict.verdict == "cannot be told" else claim.change,
        "runs": list(verdict.runs),
    }


def _number_json(number: Number) -> dict[str, Any]:
    value = {name: _finite(getattr(number.value, name)) for name in ("mean", "low", "high")}
    control = {"control": _finite(number.control), "control_title": number.control_title}
    return {"title": number.title, **value, "n": number.value.n, **control}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def verdict_words(claim: Mapping[str, Any]) -> str:
    """Return the stored verdict on a claim in words, with the condition or the reason."""
    verdict, condition = claim["verdict"], claim["condition"]
    return f"{verdict} {condition}" if verdict == "holds if" else f"{verdict}: {condition}" if condition else verdict


def number_words(number: Mapping[str, Any]) -> str:
    """Return a stored number of a claim with its interval in words."""
    if number["mean"] is None:
        return "undefined"
    return in_words(Interval(number["mean"], number["low"], number["high"], number["n"]))
