"""Shares of hits with intervals that hold for small numbers too."""

from __future__ import annotations

import torch
from torch import Tensor

_Z = 1.959964
"""95 % of a normal distribution lie so many standard deviations around its mean."""


def wilson(hits: Tensor, counts: Tensor) -> Tensor:
    """95 % score interval of shares (Wilson 1927), ``(..., 2)`` float64; NaN where nothing was counted.

    Args:
        hits: Number of hits, any shape.
        counts: Out of how many, broadcastable to the same shape.
    """
    n = counts.double().expand(hits.shape)
    share = hits.double() / n
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    reach = _Z / (1 + _Z**2 / n) * (share * (1 - share) / n + _Z**2 / (4 * n**2)).sqrt()
    return torch.stack([middle - reach, middle + reach], -1).clamp(0, 1)
