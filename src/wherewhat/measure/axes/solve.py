"""Least squares for every subset of the three axes, from the margins of the logits alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from wherewhat.measure.axes.conjugate import conjugate_gradients
from wherewhat.measure.axes.region import Band
from wherewhat.measure.axes.triangle import Triangle

SUBSETS = ("a", "b", "c", "ab", "ac", "bc", "abc")
_PAIRS = ("ab", "ac", "bc")


@dataclass(frozen=True)
class Margins:
    """All that least squares needs to know of a matrix of logits: its sums and the sum of its squares.

    Attributes:
        band: Where the matrix is looked at.
        sums: Sums along diagonals, rows and columns, packed as :meth:`Band.pack` does, ``(heads, size)`` float64.
        squares: Sum of squares, ``(heads,)`` float64.
    """

    band: Band
    sums: Tensor
    squares: Tensor


@dataclass(frozen=True)
class SubsetFits:
    """Least squares for every subset of the axes.

    Attributes:
        sse: Sum of squared errors of every subset, in the order of :data:`SUBSETS`, ``(subsets, heads)``.
        tss: Sum of squares around the mean, ``(heads,)``.
        mean: Mean of the matrix, ``(heads,)``.
        reach: Squares of all that was added up to the matrix, ``(heads,)``: what rounding is relative to.
        terms: Best terms of all three axes by distance, query and key.
    """

    sse: Tensor
    tss: Tensor
    mean: Tensor
    reach: Tensor
    terms: tuple[Tensor, Tensor, Tensor]


def fit_subsets(margins: Margins, offset: Tensor) -> SubsetFits:
    """Fit a matrix that is the sum of one with known margins and a known additive one.

    In closed form on the whole triangle, by conjugate gradients on a band.

    Args:
        margins: Margins of the first matrix.
        offset: Terms of the second, packed, ``(heads, size)``. They are kept apart because they would only cancel:
            an axis of a subset absorbs its own offset, so only those of the other axes are left to be explained.
    """
    whole = margins.band.width == margins.band.n
    return _fit_triangle(margins, offset) if whole else _fit_band(margins, offset)


def _fit_triangle(margins: Margins, offset: Tensor) -> SubsetFits:
    band = margins.band
    triangle = _triangle(band.n, band.device)
    (a, b, c), (offset_a, offset_b, offset_c) = band.unpack(margins.sums), band.unpack(offset)
    # On the simplex queries are counted from the end, and the three axes are alike: (3, heads, n).
    means = torch.stack([a, b.flip(-1), c]) / triangle.weight
    offsets = torch.stack([offset_a, offset_b.flip(-1), offset_c])
    mean = (triangle.mean(means[0]) + triangle.mean(offsets).sum(0))[:, 0]
    offsets[1] -= mean[:, None]
    expected = triangle.expect(offsets)
    # Offsets with one another and with the matrix: all that the squares of a subset need.
    own = triangle.dot(offsets, offsets + 2 * means)
    mixed = 2 * triangle.dot(_chosen(offsets, (0, 0, 1)), _chosen(expected, (1, 2, 2)))
    squares = margins.squares + _left_out(band.device) @ torch.cat([own, mixed])
    # What a pair of axes sees: its own means, and those of the offset of the axis left out.
    left = expected.flip(0)
    x, y = _chosen(means, (0, 0, 1)) + left, _chosen(means, (1, 2, 2)) + left
    alone = torch.stack([x[0], x[2], y[1]]) + expected.roll(-1, 0)
    terms = triangle.triple(means)
    whole = triangle.dot(terms, means).sum(0, keepdim=True)
    explained = torch.cat([triangle.dot(alone, alone), triangle.explained_by_pair(x, y), whole])
    terms += offsets
    terms[1] += mean[:, None]
    return SubsetFits(
        # At least squares the fit is orthogonal to the error: SSE is what the fit does not explain.
        sse=(squares[1:] - explained).clamp_min_(0),
        tss=squares[0].clamp_min(0),
        mean=mean,
        reach=margins.squares + triangle.dot(offsets, offsets).sum(0) + mean.square() * band.pairs,
        terms=(terms[0], terms[1].flip(-1), terms[2]),
    )


@lru_cache(maxsize=1)
@torch.inference_mode(False)  # what is kept must serve outside of it too
def _triangle(n: int, device: torch.device) -> Triangle:
    """The operators of the last size asked for: layer after layer of a text asks for the same."""
    return Triangle(n, device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _left_out(device: torch.device) -> Tensor:
    """Which products of two offsets the squares of a subset hold, those of the axes it leaves out, float64.

    A row for no axis and for each of :data:`SUBSETS`, a column for each axis with itself and each of the pairs.
    """
    products = ("a", "b", "c", *_PAIRS)
    rows = [[float(not set(product) & set(subset)) for product in products] for subset in ("", *SUBSETS)]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _chosen(x: Tensor, indices: Iterable[int]) -> Tensor:
    """``x[indices]`` without an index tensor, which a GPU would have to be sent."""
    return torch.stack([x[index] for index in indices])


def _fit_band(margins: Margins, offset: Tensor) -> SubsetFits:
    band = margins.band
    a, b, c = band.unpack(offset)
    reach = margins.squares + offset.square() @ band.counts
    nothing_a, nothing = torch.zeros_like(a), torch.zeros_like(b)
    mean = band.unpack(margins.sums + band.normal(offset))[1].sum(-1) / band.pairs
    parts = {
        "a": band.pack(a, nothing, nothing),
        "b": band.pack(nothing_a, b - mean[:, None], nothing),
        "c": band.pack(nothing_a, nothing, c),
    }
    sse, terms = [], margins.sums
    tss = margins.squares
    for subset in ("", *SUBSETS):
        left = sum((part for axis, part in parts.items() if axis not in subset), torch.zeros_like(offset))
        sums = margins.sums + band.normal(left)
        squares = margins.squares + (left * (margins.sums + sums)).sum(-1)
        if subset:
            terms = conjugate_gradients(band, sums, subset)
            # The quadratic form itself: its error is quadratic in that of the iteration.
            rest = 2 * sums - band.normal(terms)
            sse.append((squares - (terms * rest).sum(-1)).clamp_min(0))
        else:
            tss = squares.clamp_min(0)
    terms = terms + sum(parts.values(), torch.zeros_like(offset))
    a, b, c = band.unpack(terms)
    return SubsetFits(sse=torch.stack(sse), tss=tss, mean=mean, reach=reach, terms=(a, b + mean[:, None], c))
