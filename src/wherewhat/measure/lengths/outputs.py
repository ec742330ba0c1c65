"""Whether attention outputs stay where they were in training: their distribution beyond it against that inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measure.distance.ranks import centred_ranks, cosine


@dataclass(frozen=True)
class Reference:
    """Attention outputs of one layer at positions that training has seen.

    Attributes:
        mean: Mean output, ``(heads, d)`` float64.
        covariance: Their covariance, ``(heads, d, d)``.
        spread: Root of its trace, ``(heads,)``: the size of deviations from the mean.
        far: Deviation that 1 % of them exceed, ``(heads,)``.
    """

    mean: Tensor
    covariance: Tensor
    spread: Tensor
    far: Tensor

    @classmethod
    def of(cls, output: Tensor) -> Reference:
        """From outputs ``(n, heads, d)``."""
        x = output.double().transpose(0, 1)  # (heads, n, d)
        mean = x.mean(1)
        centred = x - mean[:, None]
        covariance = centred.mT @ centred / x.shape[1]
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        return cls(mean, covariance, spread, centred.norm(dim=-1).quantile(0.99, dim=-1))


@dataclass(frozen=True)
class Shift:
    """How outputs elsewhere differ, per head.

    Attributes:
        mean: Distance of the means in units of the reference's spread, ``(heads,)``.
        covariance: Distance of the covariances (Frobenius) relative to the reference's size, ``(heads,)``.
        outliers: Share of outputs farther from the reference's mean than 99 % of its own, ``(heads,)``: 0.01 is none.
    """

    mean: Tensor
    covariance: Tensor
    outliers: Tensor


def shift(reference: Reference, output: Tensor) -> Shift:
    """Outputs ``(n, heads, d)`` against the reference."""
    x = output.double().transpose(0, 1)
    mean = x.mean(1)
    centred = x - mean[:, None]
    covariance = centred.mT @ centred / x.shape[1]
    size = reference.covariance.norm(dim=(-1, -2)).clamp_min(1e-300)
    away = (x - reference.mean[:, None]).norm(dim=-1)
    return Shift(
        mean=((mean - reference.mean).norm(dim=-1) / reference.spread.clamp_min(1e-300)).cpu(),
        covariance=((covariance - reference.covariance).norm(dim=(-1, -2)) / size).cpu(),
        outliers=(away > reference.far[:, None]).double().mean(-1).cpu(),
    )


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of two ``(n,)``; NaN for fewer than 3."""
    return float(cosine(centred_ranks(x), centred_ranks(y))) if len(x) >= 3 else torch.nan
