"""Goals of a plan: the smallest share of units that reaches them, and the selectors that do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from wherewhat.measures.variants import LEAST_GAIN
from wherewhat.plans.costs import PlanOutcome
from wherewhat.plans.request import PlanRequest
from wherewhat.plans.selectors import Selector

_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
"""Shares among which the smallest that reaches a goal is searched."""


@dataclass(frozen=True)
class Attempt:
    """What a selector reaches at a share.

    Attributes:
        selector: How units are chosen.
        share: The share of them that sees the whole text.
        rise: Mean rise of the loss, nats.
        part: Mean gain from planted sequences, relative to that of the unchanged model; None if that is hardly any.
        missed: By how much the goal is missed, nats: the rise above the largest that is allowed, plus the retrieval
            that is missing; 0 if the goal is reached.
        costs: Rise plus lost retrieval of each document, nats.
    """

    selector: Selector
    share: float
    rise: float
    part: float | None
    missed: float
    costs: tuple[float, ...] = field(repr=False)

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.missed <= 0

    @property
    def in_words(self) -> str:
        """Rise and retrieval in words."""
        retrieved = "" if self.part is None else f" and {100 * self.part:z.3g}% of the retrieval"
        return f"a rise of {self.rise:z.3f} nats{retrieved}"

    @property
    def row(self) -> dict[str, Any]:
        """What a plan stores of it."""
        names = ("selector", "share", "rise", "part", "reached")
        return {name: getattr(self, name) for name in names}


def distinct_shares(units: int) -> list[float]:
    """Return the shares to search, of whole units and ascending: 1 of 3 units is a share of 1/3."""
    return [count / units for count in sorted({round(share * units) for share in _SHARES})]


def attempt(
    request: PlanRequest, selector: Selector, share: float, base: Sequence[PlanOutcome], own: Sequence[PlanOutcome]
) -> Attempt:
    """Return what a selector reaches, from the outcomes of the unchanged model and its own on the same documents."""
    rise = fmean(x.loss for x in own) - fmean(x.loss for x in base)
    gain, found = (fmean(x.found for x in outcomes) for outcomes in (base, own))
    missed = 0.0
    # A number that is not finite misses the goal, so it has to come first in max.
    if request.max_rise is not None:
        missed += max(rise - request.max_rise, 0.0)
    if request.min_found is not None:
        missed += max(request.min_found * gain - found, 0.0)
    part = found / gain if gain > LEAST_GAIN else None
    costs = tuple(y.loss - x.loss + x.found - y.found for x, y in zip(base, own, strict=True))
    return Attempt(selector, share, rise, part, missed, costs)


def search_share(
    names: Sequence[Selector],
    shares: Sequence[float],
    measure: Callable[[float, Sequence[Selector]], Sequence[Attempt]],
) -> list[Attempt]:
    """Return what was measured to find the smallest share that a selector reaches the goal with.

    The search is a bisection for all selectors together. A larger share is assumed to reach what a smaller one does, so
    a selector that misses the goal where another reaches it is not measured at smaller shares.

    Args:
        names: The selectors.
        shares: The shares, ascending.
        measure: Returns what selectors reach at a share.
    """
    low, high = 0, len(shares)
    made: list[Attempt] = []
    while low < high:
        middle = (low + high) // 2
        tried = measure(shares[middle], names)
        made += tried
        if any(x.reached for x in tried):
            names, high = [x.selector for x in tried if x.reached], middle
        else:
            low = middle + 1
    return made
