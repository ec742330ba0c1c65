"""How much of the vectors at a place belongs to the place: position and content over many documents.

A vector x[t, i] of document t at position i is ``p_i + u[t, i]``: what all documents have there on average, and the
rest. Positions are fixed, documents are drawn independently; tokens inside a document may depend on each other in any
way, as they do.

The mean over D documents still holds 1/D of the content, so its variance is too large. What is unbiased is what two
*different* documents have in common at the same positions: with y = x less its document's mean over positions,

    P = mean over t ≠ s of Σ_i y[t, i] · y[s, i],      E P = Σ_i |p_i - p̄|².

That is the ANOVA estimate (MS_position - MS_interaction) / D of a position × document table. The one-way estimate,
which takes the variance inside positions for MS_interaction, counts what is constant in a document as noise of the mean
as well and comes out too small by a D-th of it. Shuffling the positions inside every document leaves the denominator as
it is and makes P zero in expectation, exactly: the shuffled control is already subtracted.

What is not quadratic in the mean, such as logits, needs another way to keep the content out: see :class:`Others`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError


@dataclass(frozen=True)
class Estimate:
    """A number per head, and what it would be without each of the documents.

    Attributes:
        value: The number, ``(heads,)``.
        left_out: The number without each document, ``(documents, heads)``.
    """

    value: Tensor
    left_out: Tensor

    @property
    def error(self) -> Tensor:
        """Standard error over documents, ``(heads,)``."""
        return jackknife_error(self.left_out)


def jackknife_error(left_out: Tensor) -> Tensor:
    """Jackknife standard error from estimates without each document, ``(documents, ...)``; NaN for fewer than 3.

    √((D - 1)/D · Σ_t (θ_t - θ̄)²), which is on average no smaller than the true one (Efron & Stein, Annals of
    Statistics 9, 1981); for shares of position near zero it is up to about 1.5 times as large.
    """
    count = left_out.shape[0]
    if count < 3:
        return torch.full_like(left_out[0], torch.nan)
    return ((count - 1) * (left_out - left_out.mean(0)).square().mean(0)).sqrt()


@dataclass(frozen=True)
class PositionShare:
    """How much of the variance of vectors is position, one entry per head.

    Attributes:
        share: Position's share of the variance around the grand mean, corrected as the module says. Not clamped: where
            there is no position it is zero on average, so below zero half of the time. NaN where all vectors are alike.
        raw: The same with the variance of the mean over documents as it is, ``(heads,)``.
        shuffled: What raw is on average after shuffling the positions inside every document, ``(heads,)``, exactly.
    """

    share: Estimate
    raw: Tensor
    shuffled: Tensor


@dataclass(frozen=True)
class Others:
    """A position part as the documents other than one tell it, with a sample of its noise.

    Of m documents, ``mean`` is the mean and ``noise`` is Σ_s w_s x_s / m with weights that sum to zero and whose
    squares sum to m. So ``mean + i · noise`` holds the position part once, and the content of document s with the
    complex weight (1 + i w_s) / m. The squares of these weights sum to zero: in a product of two such sums the squares
    of the contents cancel, and on average its real part is that of the true position parts.

    Attributes:
        mean: Real part, ``(heads, n, d)``.
        noise: Imaginary part, ``(heads, n, d)``.
    """

    mean: Tensor
    noise: Tensor


class PositionSums:
    """Sums over documents in two passes, so that no document is kept: memory 2 · heads · n · d in float64.

    First every document goes through :meth:`add`, then again through :meth:`compare`, in the same order.
    """

    def __init__(self, documents: int) -> None:
        """Begin, knowing how many documents will come."""
        if documents < 2:
            raise MeasureError(f"documents={documents} cannot be split: at least 2 are needed, 8 or more are better")
        # Weights of documents in the noise: sum 0, squares sum to their number. Slow in t, so that texts which come in
        # turn from two sources do not end up on different sides.
        self._weights = [math.sqrt(2) * math.cos(math.tau * t / documents + math.pi / 6) for t in range(documents)]
        self._total: Tensor | None = None
        self._noise: Tensor | None = None
        self._means: list[Tensor] = []  # per document, (heads, d)
        self._squares: list[Tensor] = []  # per document, around its mean, (heads,)
        self._with_all: list[Tensor] = []  # per document, products with the sum over documents, (heads,)

    @property
    def documents(self) -> int:
        """Documents added."""
        return len(self._means)

    def add(self, x: Tensor) -> None:
        """First pass over a document's vectors ``(heads, n, d)``."""
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
        """Second pass over a document's vectors ``(heads, n, d)``: returns the others' position part, float64.

        With two documents the noise of the only other one cannot be told, and is given as NaN.
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
        """Position's share of the variance, after both passes over all documents."""
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
    """Position's share of the variance of vectors that are all at hand.

    Args:
        x: Vectors of every document, ``(documents, heads, n, d)``.
    """
    sums = PositionSums(len(x))
    for document in x:
        sums.add(document)
    for document in x:
        sums.compare(document)
    return sums.share()


def _share(common: Tensor, within: Tensor, between: Tensor, count: int) -> Tensor:
    """Share of position, from sums over ``count`` documents of squares.

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
