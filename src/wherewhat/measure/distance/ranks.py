"""Rank correlation on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def centred_ranks(x: Tensor) -> Tensor:
    """Ranks along the last dimension of ``x`` ``(..., m)``, around zero, float64; equal values share a mean rank."""
    m = x.shape[-1]
    ordered, order = x.sort(-1)
    place = torch.arange(m, device=x.device).expand(x.shape)
    step = ordered[..., 1:] != ordered[..., :-1]
    if bool(step.all()):
        ranks = place.double() - (m - 1) / 2
        return torch.empty_like(ranks).scatter_(-1, order, ranks)
    first = torch.nn.functional.pad(step, (1, 0), value=True)
    last = torch.nn.functional.pad(step, (0, 1), value=True)
    # Every run of equal values gets the mean of its first and its last place.
    start = torch.where(first, place, 0).cummax(-1).values
    end = torch.where(last, place, m - 1).flip(-1).cummin(-1).values.flip(-1)
    ranks = (start + end).double() / 2 - (m - 1) / 2
    return torch.empty_like(ranks).scatter_(-1, order, ranks)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between ``x`` and ``y`` along the last dimension; NaN where one of them is zero."""
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    return torch.where(norms > 0, ((x * y).sum(-1) / norms).clamp(-1, 1), torch.nan)
