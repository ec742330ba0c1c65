"""How many directions tokens use: effective rank and rank-one share, with what Gaussian noise gives."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def effective_rank(x: Tensor) -> Tensor:
    """Effective rank of ``x`` ``(..., n, d)``: exponential of the entropy of its normalised singular values.

    Between 1 (all tokens alike) and min(n, d). Roy & Vetterli, EUSIPCO 2007. Computed from the d×d Gram matrix in
    float64. Zero tensors give 0.
    """
    values = _squared_singular_values(x).sqrt()
    total = values.sum(-1, keepdim=True)
    shares = values / total.clamp_min(1e-300)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def rank_one_share(x: Tensor, *, centred: bool = False) -> Tensor:
    """Share of the sum of squares of ``x`` ``(..., n, d)`` that its best rank-one approximation holds.

    The largest squared singular value over the sum of all: between 1 / min(n, d) and 1 (all tokens on one line).
    Computed from the d×d Gram matrix in float64.

    Args:
        x: Tokens.
        centred: Take the mean token out first; what is left is how tokens differ. NaN where they do not.
    """
    x = x.double()
    size = x.square().sum((-1, -2))
    if centred:
        x = x - x.mean(-2, keepdim=True)
    values = _squared_singular_values(x)
    total = values.sum(-1)
    # Taking the mean out of equal tokens leaves rounding, whose rank says nothing.
    return torch.where(total > 1e-24 * size, values[..., -1] / total, torch.nan)


@functools.lru_cache(maxsize=64)
def gaussian_rank(n: int, d: int, *, draws: int = 4) -> float:
    """Mean effective rank of independent Gaussian tokens ``(n, d)``, the rank of tokens that share nothing."""
    return float(effective_rank(_gaussian(n, d, draws)).mean())


@functools.lru_cache(maxsize=64)
def gaussian_rank_one_share(n: int, d: int, *, draws: int = 4) -> float:
    """Mean rank-one share of independent Gaussian tokens ``(n, d)``; taking their mean out hardly changes it."""
    return float(rank_one_share(_gaussian(n, d, draws)).mean())


def _squared_singular_values(x: Tensor) -> Tensor:
    """Squared singular values of ``x`` ``(..., n, d)`` in float64, ascending, ``(..., d)``."""
    x = x.double()
    values: Tensor = torch.linalg.eigvalsh(x.mT @ x)
    return values.clamp_min(0)


def _gaussian(n: int, d: int, draws: int) -> Tensor:
    return torch.randn(draws, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
