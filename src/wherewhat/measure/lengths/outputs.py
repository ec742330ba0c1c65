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
        outliers: Share of outputs farther from the reference's mean than 99 % of its own, ``(heads,)``.

    None of them is what it would be of infinitely many outputs (0, 0 and 0.01) where nothing differs but the draw: read
    them beside those of outputs that cannot have shifted, as many and against the same reference.
    """

    mean: Tensor
    covariance: Tensor
    outliers: Tensor

    def heads(self) -> dict[str, Tensor]:
        """The three by metric."""
        return {"output_shift": self.mean, "output_covariance": self.covariance, "output_outliers": self.outliers}


class ShiftSums:
    """Outputs against a reference, added part by part."""

    def __init__(self, reference: Reference) -> None:
        """Begin with none."""
        self._reference = reference
        self._count = 0
        self._sums = torch.zeros_like(reference.mean)
        self._products = torch.zeros_like(reference.covariance)
        self._outliers = torch.zeros_like(reference.far)

    def add(self, output: Tensor) -> None:
        """Add outputs ``(n, heads, d)``."""
        away = output.double().transpose(0, 1) - self._reference.mean[:, None]  # (heads, n, d)
        self._count += away.shape[1]
        self._sums += away.sum(1)
        self._products += away.mT @ away
        self._outliers += (away.norm(dim=-1) > self._reference.far[:, None]).sum(-1)

    def result(self) -> Shift:
        """How they differ, all together."""
        reference = self._reference
        moved = self._sums / self._count
        covariance = self._products / self._count - moved[:, :, None] * moved[:, None]
        size = reference.covariance.norm(dim=(-1, -2)).clamp_min(1e-300)
        return Shift(
            mean=(moved.norm(dim=-1) / reference.spread.clamp_min(1e-300)).cpu(),
            covariance=((covariance - reference.covariance).norm(dim=(-1, -2)) / size).cpu(),
            outliers=(self._outliers / self._count).cpu(),
        )


def shift(reference: Reference, output: Tensor) -> Shift:
    """Outputs ``(n, heads, d)`` against the reference."""
    sums = ShiftSums(reference)
    sums.add(output)
    return sums.result()


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of two ``(n,)``; NaN for fewer than 3."""
    return float(cosine(centred_ranks(x), centred_ranks(y))) if len(x) >= 3 else torch.nan
