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
    centred = both - both.mean(1, keepdim=True)
    squares = centred.square().sum(1)
    if bool((squares <= 1e-28 * both.square().sum(1)).any()):  # of a constant, rounding is left
        return torch.nan
    return float(centred.prod(0).sum() / squares.prod().sqrt())
