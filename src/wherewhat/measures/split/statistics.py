"""Share of position in the variance of vectors over many documents.

A vector x[t, i] of document t at position i is ``p_i + u[t, i]``: the mean over documents at that position, and the
rest. Positions are fixed, documents are independent; tokens inside a document may depend on each other.

The mean over D documents still contains 1/D of the content, so its variance is too large. Products of two *different*
documents at the same position are unbiased: with y = x minus its document's mean over positions,

    P = mean over t ≠ s of Σ_i y[t, i] · y[s, i],      E P = Σ_i |p_i - p̄|².

This is the ANOVA estimate (MS_position - MS_interaction) / D of a position × document table. The one-way estimate,
which uses the variance inside positions for MS_interaction, also counts what is constant in a document as noise of the
mean and is too small by a D-th of it. Shuffling the positions inside every document leaves the denominator unchanged
and makes the expectation of P exactly zero: the shuffled control is already subtracted.

Quantities that are not quadratic in the mean, such as logits, need another correction: see :class:`Others`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError


@dataclass(frozen=True)
class Estimate:
    """An estimate per head, with its jackknife (leave-one-out) estimates.

    Attributes:
        value: The estimate, ``(heads,)``.
        left_out: The estimate without each document, ``(documents, heads)``.
    """

    value: Tensor
    left_out: Tensor

    @property
    def error(self) -> Tensor:
        """Standard error over documents, ``(heads,)``."""
        return jackknife_error(self.left_out)


def jackknife_error(left_out: Tensor) -> Tensor:
    """Return the jackknife standard error of leave-one-out estimates ``(documents, ...)``; NaN for fewer than 3.

    √((D - 1)/D · Σ_t (θ_t - θ̄)²), which is on average not smaller than the true error (Efron & Stein, Annals of
    Statistics 9, 1981); for shares of position near zero it is up to about 1.5 times as large.
    """
    count = left_out.shape[0]
    if count < 3:
        return torch.full_like(left_out[0], torch.nan)
    return ((count - 1) * (left_out - left_out.mean(0)).square().mean(0)).sqrt()


@dataclass(frozen=True)
class PositionShare:
    """Share of position in the variance of vectors, one entry per head.

    Attributes:
        share: Share of position in the variance around the grand mean, with the correction of this module. Not clamped:
            a share of zero is estimated below zero half of the time. NaN where all vectors are equal.
        raw: The share without the correction, ``(heads,)``.
        shuffled: Exact expectation of ``raw`` after shuffling the positions inside every document, ``(heads,)``.
    """

    share: Estimate
    raw: Tensor
    shuffled: Tensor


@dataclass(frozen=True)
class Others:
    """A position part estimated from all documents but one, with a sample of its noise.

    Over m documents, ``mean`` is the mean and ``noise`` is Σ_s w_s x_s / m with weights that sum to zero and whose
    squares sum to m. So ``mean + i · noise`` contains the position part once, and the content of document s with the
    complex weight (1 + i w_s) / m. The squares of these weights sum to zero: in a product of two such sums the squares
    of the contents cancel, and the expectation of its real part is that of the true position parts.

    Attributes:
        mean: Real part, ``(heads, n, d)``.
        noise: Imaginary part, ``(heads, n, d)``.
    """

    mean: Tensor
    noise: Tensor


class PositionSums:
    """Sums over documents in two passes, in memory for 2 · heads · n · d float64 numbers.

    First :meth:`add` every document, then :meth:`compare` every document in the same order.
    """

    def __init__(self, documents: int) -> None:
        """Start with no documents, given their number."""
        if documents < 2:
            raise MeasureError(f"documents={documents} cannot be split: at least 2 are needed, 8 or more are better")
        # Weights of documents in the noise: they sum to 0, their squares to the number of documents. They vary slowly
        # in t, so that texts that alternate between two sources do not get opposite weights.
        self._weights = [math.sqrt(2) * math.cos(math.tau * t / documents + math.pi / 6) for t in range(documents)]
        self._total: Tensor | None = None
        self._noise: Tensor | None = None
        self._means: list[Tensor] = []  # per document, (heads, d)
        self._squares: list[Tensor] = []  # per document, around its mean, (heads,)
        self._with_all: list[Tensor] = []  # per document, products with the sum over documents, (heads,)

    @property
    def documents(self) -> int:
        """Number of documents added."""
        return len(self._means)

    def add(self, x: Tensor) -> None:
        """Add a document's vectors ``(heads, n, d)`` in the first pass."""
        if not bool(x.isfinite().all()):
            raise MeasureError("vectors hold NaN or Inf: the model's activations overflow")
        x = x.double()
        mean = x.mean(1)
        if self._total is None or self._noise is None:
            self._total, self._noise = torch.zeros_like(x), torch.zeros_like(x)
        if self._total.shape != x.shape:
            raise MeasureError(
                f"a document's vectors are {tuple(x.shape)} after {tuple(self._total.shape)}: cut all to one length"
            )
        self._total += x
        self._noise.add_(x, alpha=self._weights[self.documents])
        self._means.append(mean)
        self._squares.append((x - mean[:, None]).square().sum((1, 2)))

    def compare(self, x: Tensor) -> Others:
        """Add a document's vectors ``(heads, n, d)`` in the second pass; return the other documents' position part.

        With two documents the noise of the only other one is unknown, and NaN.
        """
        index = len(self._with_all)
        total, noise = self._sums()
        x = x.double()
        centred = total - torch.stack(self._means).sum(0)[:, None]
        self._with_all.append(((x - self._means[index][:, None]) * centred).sum((1, 2)))
        rest, weight = self.documents - 1, self._weights[index]
        others = total - x
        # Without one document the weights neither sum to zero nor have squares that sum to the number.
        left = 1 - weight**2 / rest if rest > 1 else math.nan
        factor = math.sqrt(rest / (left * self.documents))
        return Others(others / rest, factor / rest * (noise - weight * x + weight / rest * others))

    def share(self) -> PositionShare:
        """Return the share of position in the variance, after both passes over all documents."""
        count, n = self.documents, self._sums()[0].shape[1]
        means, squares, with_all = (torch.stack(x) for x in (self._means, self._squares, self._with_all))
        offsets = (means - means.mean(0)).square().sum(-1) * n  # (documents, heads)
        total = squares.sum(0)
        common = with_all.sum(0)  # Σ_i |Σ_t y[t, i]|²
        between = offsets.sum(0)
        everything = total + between
        varies = everything > 1e-12 * (everything + count * n * means.square().sum(-1).mean(0)).clamp_min(1e-300)
        value = _share(common, total, between, count)
        without = _share(
            common - 2 * with_all + squares,
            total - squares,
            between - offsets * (count / (count - 1)),
            count - 1,
        )
        nothing = torch.full_like(value, torch.nan)
        return PositionShare(
            share=Estimate(torch.where(varies, value, nothing), torch.where(varies, without, nothing)),
            raw=torch.where(varies, common / count / everything, nothing),
            shuffled=torch.where(varies, total / count / everything, nothing),
        )

    def _sums(self) -> tuple[Tensor, Tensor]:
        assert self._total is not None, "the first pass comes first"
        assert self._noise is not None
        return self._total, self._noise


def position_share(x: Tensor) -> PositionShare:
    """Return the share of position in the variance of the vectors ``(documents, heads, n, d)`` of every document."""
    sums = PositionSums(len(x))
    for document in x:
        sums.add(document)
    for document in x:
        sums.compare(document)
    return sums.share()


def _share(common: Tensor, within: Tensor, between: Tensor, count: int) -> Tensor:
    """Return the share of position from sums of squares over ``count`` documents.

    Args:
        common: Σ_i |Σ_t y[t, i]|².
        within: Σ_t Σ_i |y[t, i]|².
        between: n · Σ_t |mean of document t - grand mean|².
        count: Number of documents.
    """
    if count < 2:
        return torch.full_like(common, torch.nan)
    position = (common - within) / (count * (count - 1))
    variance = within / count + between / (count - 1)
    return position / variance
