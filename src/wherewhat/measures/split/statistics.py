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
from collections.abc import Callable
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
    """Position parts estimated from all documents but one, with a sample of their noise, for each document left out.

    Over m documents, ``mean`` is the mean and ``noise`` is Σ_s w_s x_s / m with weights that sum to zero and whose
    squares sum to m. So ``mean + i · noise`` contains the position part once, and the content of document s with the
    complex weight (1 + i w_s) / m. The squares of these weights sum to zero: in a product of two such sums the squares
    of the contents cancel, and the expectation of its real part is that of the true position parts.

    Attributes:
        parts: Real and imaginary part side by side, ``(documents, heads, n, 2 · d)``.
        flat: Mean of the real part over positions, before rotation, ``(documents, heads, 1, d)``.
    """

    parts: Tensor
    flat: Tensor

    @property
    def mean(self) -> Tensor:
        """Real part, ``(documents, heads, n, d)``, a view."""
        return self.parts[..., : self.flat.shape[-1]]

    @property
    def noise(self) -> Tensor:
        """Imaginary part, ``(documents, heads, n, d)``, a view."""
        return self.parts[..., self.flat.shape[-1] :]


class PositionSums:
    """Sums over documents in two passes, in memory for 2 · heads · n · d float64 numbers.

    First :meth:`add` all documents, then :meth:`compare` all documents in the same order, any number at a time.
    """

    def __init__(self, documents: int) -> None:
        """Start with no documents, given their number."""
        if documents < 2:
            raise MeasureError(f"documents={documents} cannot be split: at least 2 are needed, 8 or more are better")
        self._documents = documents
        self._total: Tensor | None = None
        self._noise: Tensor | None = None
        self._means: list[Tensor] = []  # (some documents, heads, d)
        self._squares: list[Tensor] = []  # around the document's mean, (some documents, heads)
        self._with_all: list[Tensor] = []  # products with the sum over documents, (some documents, heads)

    def add(self, x: Tensor) -> None:
        """Add vectors ``(documents, heads, n, d)`` of some documents in the first pass."""
        x = x.double()
        if self._total is not None and self._total.shape != x.shape[1:]:
            raise MeasureError(
                f"a document's vectors are {tuple(x.shape[1:])} after {tuple(self._total.shape)}: cut all to one length"
            )
        mean = x.mean(2)
        weights = self._weights(_count(self._means), len(x), x.device)
        total, noise = x.sum(0), (weights @ x.flatten(1)).view(x.shape[1:])
        self._total = total if self._total is None else self._total + total
        self._noise = noise if self._noise is None else self._noise + noise
        self._means.append(mean)
        self._squares.append(torch.linalg.vector_norm(x - mean[:, :, None], dim=(2, 3)).square())

    def compare(
        self, x: Tensor, turned: Tensor | None = None, turn: Callable[[Tensor], Tensor] = torch.clone
    ) -> Others:
        """Add vectors of some documents in the second pass; return the position parts of the others for each.

        With two documents the noise of the only other one is unknown, and NaN.

        Args:
            x: The vectors, ``(documents, heads, n, d)``.
            turned: The same after a rotation; with it, position parts are after the rotation too.
            turn: That rotation. It is linear, so that sums over documents are rotated, not every document.
        """
        total, noise = self._sums()
        first, rest = _count(self._with_all), self._documents - 1
        means = torch.cat(self._means)
        centred = total - means.sum(0)[:, None]  # its sum over positions is zero
        self._with_all.append((x * centred).sum((2, 3)))
        weights = self._weights(first, len(x), x.device)[:, None, None, None]
        # Without one document the weights neither sum to zero nor have squares that sum to the number.
        left = 1 - weights.square() / rest if rest > 1 else torch.full_like(weights, torch.nan)
        factor = (rest / (left * self._documents)).sqrt() / rest
        if turned is not None:
            x, total, noise = turned, turn(total), turn(noise)
        flat = (means.sum(0) - means[first : first + len(x)]) / rest
        others = Others(total.new_empty(*x.shape[:-1], 2 * x.shape[-1]), flat[:, :, None])
        torch.sub(total, x, out=others.mean).div_(rest)
        others.noise.copy_(noise).addcmul_(others.mean, weights).addcmul_(x.double(), weights, value=-1).mul_(factor)
        return others

    def share(self) -> PositionShare:
        """Return the share of position in the variance, after both passes over all documents."""
        count, n = self._documents, self._sums()[0].shape[1]
        means, squares, with_all = (torch.cat(x) for x in (self._means, self._squares, self._with_all))
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

    def _weights(self, first: int, count: int, device: torch.device) -> Tensor:
        """Return weights of documents in the noise: they sum to 0, their squares to the number of documents.

        They vary slowly in t, so that texts that alternate between two sources do not get opposite weights.
        """
        t = torch.arange(first, first + count, dtype=torch.float64, device=device)
        return math.sqrt(2) * (math.tau / self._documents * t + math.pi / 6).cos()


def _count(parts: list[Tensor]) -> int:
    """Return the number of documents in tensors ``(some documents, ...)``."""
    return sum(map(len, parts))


def position_share(x: Tensor) -> PositionShare:
    """Return the share of position in the variance of the vectors ``(documents, heads, n, d)`` of every document."""
    sums = PositionSums(len(x))
    check_vectors(x)
    sums.add(x)
    sums.compare(x)
    return sums.share()


def check_vectors(*vectors: Tensor) -> None:
    """Raise an error for vectors that are not finite."""
    if not all(bool(x.isfinite().all()) for x in vectors):
        raise MeasureError("vectors hold NaN or Inf: the model's activations overflow")


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
