"""When something happened while a model learned: the step at which half of its change was behind it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LASTING = 0.25
"""Share of a curve's range that it must end away from where it began to have changed at all."""


def half_step(steps: Tensor, curve: Tensor, *, for_good: bool = False) -> float:
    """The step at which a curve has first gone half of the way from its first value to its last.

    Between two records it is taken to be straight over log(1 + step), as records are spaced. NaN if it ends within a
    quarter of its range of where it began, so that there is no change to be half-way of, or is not defined there.

    Args:
        steps: Steps of the records, ascending, the first 0, ``(records,)``.
        curve: Value at each, ``(records,)``; those that are not defined are passed over.
        for_good: The step after which it never falls back behind that half, in place of the first.
    """
    known = curve.isfinite()
    if len(curve) < 2 or not bool(known[0] & known[-1]):
        return math.nan
    x, y = torch.log1p(steps[known].double()), curve[known].double()
    change = y[-1] - y[0]
    if float(change) == 0 or float(change.abs()) < LASTING * float(y.max() - y.min()):
        return math.nan
    way = (y - y[0]) / change
    # The first record's way is 0 and the last one's 1, so both lie between records.
    after = int((way < 0.5).nonzero()[-1, 0]) + 1 if for_good else int((way >= 0.5).nonzero()[0, 0])
    before = after - 1
    share = (0.5 - way[before]) / (way[after] - way[before])
    return float(torch.expm1(x[before] + share * (x[after] - x[before])))
