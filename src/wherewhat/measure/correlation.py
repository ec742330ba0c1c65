"""Pearson correlation over heads."""

from __future__ import annotations

import torch
from torch import Tensor


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson correlation of two ``(n,)`` where both are defined; NaN for fewer than 3, or if one is constant."""
    known = ~(x.isnan() | y.isnan())
    if int(known.sum()) < 3:
        return torch.nan
    both = torch.stack([x[known], y[known]]).double()
    both = both - both.mean(1, keepdim=True)
    size = both.square().sum(1).prod().sqrt()
    return float(both.prod(0).sum() / size) if float(size) > 0 else torch.nan
