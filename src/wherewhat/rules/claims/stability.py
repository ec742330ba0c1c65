"""Verdicts under resampling: how often would a claim be judged otherwise on other documents, or with another control?

Documents are drawn with replacement (bootstrap, Efron 1979), and the rule of the claim is applied to the numbers of
those that were drawn. Nothing is measured again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from wherewhat.measures.measurement import ChoicesMeasurement, QuestionMeasurement
from wherewhat.models.source import Weights
from wherewhat.progress import counted
from wherewhat.rules.claims.claim import Claim, ClaimVerdict, Evidence, Stability, Verdict, judge, percent
from wherewhat.rules.rule import LEAST_DOCUMENTS
from wherewhat.runs.resampling import ResampledRun
from wherewhat.runs.results import StoredRun

RESAMPLES = 500
"""Number of resamples: the standard error of a share of 10 % is 1.3 %."""

MOST_CHANGED = 0.1
"""Largest share of resamples with another verdict at which a verdict stands."""

DECIDED: tuple[Verdict, ...] = ("holds", "holds if", "does not hold")
"""Verdicts that must be stable."""

Counts = tuple[tuple[str, int], ...]
"""How often each document was drawn."""


@dataclass(frozen=True)
class ResampledEvidence(Evidence):
    """Evidence of runs on drawn documents.

    Attributes:
        counts: How often each document was drawn; None for the runs as they are.
        draw: Which of the random control models was drawn.
        seen: The finished runs that rules asked for, by name and weights.
        resampled: The same on the drawn documents.
    """

    counts: Counts | None = None
    draw: int = 0
    seen: dict[tuple[str, Weights | None], StoredRun] = field(default_factory=dict)
    resampled: dict[tuple[str, Weights | None], StoredRun] = field(default_factory=dict)

    def find(self, name: str, weights: Weights | None = None, *, draw: int = 0) -> StoredRun | None:
        """Return the run of that name, on the drawn documents."""
        run = super().find(name, weights, draw=self.draw if weights == "random" else draw)
        if run is None:
            return None
        key = name, weights
        self.seen[key] = run
        if self.counts is not None and key not in self.resampled:
            self.resampled[key] = ResampledRun(run, dict(self.counts))
        return run if self.counts is None else self.resampled[key]


def judge_stably(
    claims: Sequence[Claim], evidence: Evidence, *, seed: int = 0, resamples: int = RESAMPLES
) -> list[ClaimVerdict]:
    """Judge claims by finished runs, and each again by resamples of their documents.

    A decided verdict of which more than :data:`MOST_CHANGED` of the resamples differ becomes "cannot be told".

    Args:
        claims: The claims.
        evidence: Finished runs.
        seed: Seed of the resamples.
        resamples: Their number.
    """
    verdicts: dict[int, ClaimVerdict] = {}
    groups: dict[tuple[object, ...], list[Claim]] = {}
    seen: dict[tuple[object, ...], list[StoredRun]] = {}
    for claim in claims:
        recorded = _with(evidence)
        verdicts[claim.number] = judge(claim, recorded)
        key = (claim.drawn, *sorted(recorded.seen, key=str))
        # Claims that read the same runs share their resamples.
        groups.setdefault(key, []).append(claim)
        seen[key] = list(recorded.seen.values())
    for key, group in groups.items():
        judged = [claim for claim in group if verdicts[claim.number].verdict != "not judged"]
        if judged:
            found = _stability(judged, verdicts, evidence, seen[key], seed=seed, resamples=resamples)
            verdicts |= {number: stable(verdicts[number], stability) for number, stability in found.items()}
    return [verdicts[claim.number] for claim in claims]


def stable(verdict: ClaimVerdict, stability: Stability) -> ClaimVerdict:
    """Return a verdict with its stability; one that changes too often cannot be told."""
    verdict = replace(verdict, stability=stability)
    if verdict.verdict not in DECIDED or stability.changed is None or stability.changed <= MOST_CHANGED:
        return verdict
    reason = (
        f"{words(verdict)} by the rule, but {percent(stability.changed)} of {stability.resamples:,} resamples of "
        f"{stability.over} give another verdict"
    )
    return replace(verdict, verdict="cannot be told", condition=reason)


def words(verdict: ClaimVerdict) -> str:
    """Return a verdict, "holds if" with its condition."""
    return f"{verdict.verdict} {verdict.condition}" if verdict.verdict == "holds if" else verdict.verdict


def strata(runs: Collection[StoredRun]) -> list[list[str]]:
    """Return the documents of runs in groups, within which they are exchanged for one another.

    Documents of a group are in the same runs, so that each run keeps its number of documents; prompts are also of the
    same kind and size.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    kinds = [_kinds(run) for run in runs]
    for name in dict.fromkeys(name for run in runs for name in run.documents):
        groups.setdefault(tuple(kind.get(name) for kind in kinds), []).append(name)
    return list(groups.values())


def draws(groups: Sequence[Sequence[str]], controls: int, *, seed: int, resamples: int) -> Counter[tuple[Counts, int]]:
    """Return how often documents, and one of the control models, were drawn together."""
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    drawn: Counter[tuple[Counts, int]] = Counter()
    for _ in range(resamples):
        counts = Counter(name for group in groups for name in generator.choices(group, k=len(group)))
        (control,) = generator.choices(range(controls))
        drawn[tuple(sorted(counts.items())), control] += 1
    return drawn


def _stability(
    claims: Sequence[Claim],
    verdicts: Mapping[int, ClaimVerdict],
    evidence: Evidence,
    runs: Sequence[StoredRun],
    *,
    seed: int,
    resamples: int,
) -> dict[int, Stability]:
    """Return how often the verdicts on claims that read the same runs change."""
    groups = strata(runs)
    fewest = min((len(run.documents) for run in runs), default=0)
    over = _units(runs)
    if fewest < LEAST_DOCUMENTS:
        reason = f"{counted(fewest, 'document')}, and at least {LEAST_DOCUMENTS} are needed"
        return {claim.number: Stability(reason) for claim in claims}
    controls = evidence.controls if claims[0].drawn else 1
    if claims[0].drawn:
        over += " with one random control model" if controls == 1 else f" and {controls} random control models"

    def judged(documents: Counts, draw: int) -> list[ClaimVerdict]:
        resampled = _with(evidence, counts=documents, draw=draw)
        return [judge(claim, resampled) for claim in claims]

    return stabilities(verdicts, draws(groups, controls, seed=seed, resamples=resamples), judged, over=over)


def stabilities(
    verdicts: Mapping[int, ClaimVerdict],
    drawn: Counter[tuple[Counts, int]],
    judged: Callable[[Counts, int], Iterable[ClaimVerdict]],
    *,
    over: str,
) -> dict[int, Stability]:
    """Return how often verdicts change, of the claims that ``judged`` judges on what was drawn.

    Args:
        verdicts: The verdicts on everything, by number of the claim.
        drawn: How often each draw was made, see :func:`draws`.
        judged: Judges the claims on one draw.
        over: What was drawn, in words.
    """
    found: dict[int, Counter[str]] = {}
    for draw, times in drawn.items():
        for verdict in judged(*draw):
            found.setdefault(verdict.claim.number, Counter())[words(verdict)] += times
    resamples = drawn.total()
    return {
        number: Stability(
            over,
            words(verdicts[number]),
            1 - counts[words(verdicts[number])] / resamples,
            resamples,
            {verdict: times / resamples for verdict, times in sorted(counts.items(), key=lambda x: (-x[1], x[0]))},
        )
        for number, counts in found.items()
    }


def _with(evidence: Evidence, *, counts: Counts | None = None, draw: int = 0) -> ResampledEvidence:
    own = {known.name: getattr(evidence, known.name) for known in fields(Evidence)}
    return ResampledEvidence(**own, counts=counts, draw=draw)


def _kinds(run: StoredRun) -> dict[str, object]:
    """Return what a document must share with another one in its place: of a prompt the metrics that it has."""
    if not isinstance(run.measurement, QuestionMeasurement):
        return dict.fromkeys(run.documents, True)
    named: dict[str, set[str]] = {name: set() for name in run.documents}
    for metric, numbers in run.numbers.items():
        for place in set(numbers.of_documents.document.tolist()):
            named[str(numbers.documents[place])].add(metric)
    return {name: frozenset(metrics) for name, metrics in named.items()}


def _units(runs: Collection[StoredRun]) -> str:
    """Return the number of documents, prompts and items of runs in words."""
    kinds: dict[str, set[str]] = {}
    for run in runs:
        measurement = run.measurement
        questions, items = (isinstance(measurement, kind) for kind in (QuestionMeasurement, ChoicesMeasurement))
        kinds.setdefault("prompt" if questions else "item" if items else "document", set()).update(run.documents)
    return " and ".join(counted(len(names), kind) for kind, names in kinds.items())
