"""The same items answered twice: how far the share of right answers moved, and whether that can be chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.measure.intervals import change_bounds, change_error


@dataclass(frozen=True)
class Paired:
    """Right answers before and after.

    Attributes:
        change: Share of right answers after, less that before.
        low: Lower end of its 95 % interval over items (Bonett & Price 2012).
        high: Upper end.
        error: Their standard error, above 0 also where no answer changed.
        p: Chance of a split at least as uneven if changes to right and to wrong were as likely: exact McNemar test.
    """

    change: float
    low: float
    high: float
    error: float
    p: float


def paired(before: Sequence[float], after: Sequence[float]) -> Paired:
    """Compare answers, 1 for right and 0 for wrong, item by item."""
    n = len(before)
    gained = sum(1 for one, other in zip(before, after, strict=True) if other > one)
    lost = sum(1 for one, other in zip(before, after, strict=True) if other < one)
    low, high = change_bounds(gained, lost, n)
    return Paired((gained - lost) / n, low, high, change_error(gained, lost, n), mcnemar(gained, lost))


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact McNemar test: of gained + lost changed answers, each is a gain with probability one half."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))
