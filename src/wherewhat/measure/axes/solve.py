"""Least squares for any subset of the three axes, from the margins of the logits alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measure.axes.conjugate import conjugate_gradients
from wherewhat.measure.axes.region import Band
from wherewhat.measure.axes.triangle import Triangle

SUBSETS = ("a", "b", "c", "ab", "ac", "bc", "abc")
_DOWNWARDS = (
    *(("ab", "abc", "c"), ("ac", "abc", "b"), ("bc", "abc", "a")),
    *(("a", "ab", "b"), ("b", "ab", "a"), ("c", "ac", "a"), ("", "a", "a")),
)


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
        sse: Sum of squared errors by subset, ``(heads,)``.
        tss: Sum of squares around the mean, ``(heads,)``.
        mean: Mean of the matrix, ``(heads,)``.
        terms: Best terms of all three axes, packed, ``(heads, size)``.
    """

    sse: dict[str, Tensor]
    tss: Tensor
    mean: Tensor
    terms: Tensor


def fit_subsets(margins: Margins, offset: Tensor) -> SubsetFits:
    """Fit a matrix that is the sum of one with known margins and a known additive one.

    In closed form on the whole triangle, by conjugate gradients on a band.

    Args:
        margins: Margins of the first matrix.
        offset: Terms of the second, packed, ``(heads, size)``. They are kept apart because they would only cancel:
            an axis of a subset absorbs its own offset, so only those of the other axes are left to be explained.
    """
    band = margins.band
    mean = (band.unpack(margins.sums + band.normal(offset))[1].sum(-1)) / band.pairs
    a, b, c = band.unpack(offset)
    zero_a, zero = torch.zeros_like(a), torch.zeros_like(b)
    parts = torch.stack(
        [band.pack(a, zero, zero), band.pack(zero_a, b - mean[:, None], zero), band.pack(zero_a, zero, c)]
    )
    images = dict(zip("abc", band.normal(parts), strict=True))
    left = dict(zip("abc", parts, strict=True))
    # From the full set down: a subset's sums are those of a larger one and the offset of the axis it lacks.
    sums, offsets = {"abc": margins.sums}, {"abc": torch.zeros_like(offset)}
    for subset, larger, lacking in _DOWNWARDS:
        sums[subset] = sums[larger] + images[lacking]
        offsets[subset] = offsets[larger] + left[lacking]
    squares = {s: margins.squares + (offsets[s] * (margins.sums + sums[s])).sum(-1) for s in sums}
    solve = _triangle_terms if band.width == band.n else _band_terms
    terms = solve(band, sums)
    shift = band.pack(zero_a, zero + mean[:, None], zero)
    return SubsetFits(
        # With the terms of least squares the fit is orthogonal to the error: SSE is what the fit does not take.
        sse={s: (squares[s] - (terms[s] * sums[s]).sum(-1)).clamp_min(0) for s in SUBSETS},
        tss=(squares[""] - band.unpack(sums[""])[1].sum(-1).square() / band.pairs).clamp_min(0),
        mean=mean,
        terms=terms["abc"] + parts.sum(0) + shift,
    )


def _triangle_terms(band: Band, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Terms by subset in closed form."""
    triangle = Triangle(band.n, band.device)
    means = {}
    for subset in SUBSETS:
        a, b, c = band.unpack(sums[subset] / band.counts)
        means[subset] = {"a": a, "b": b.flip(-1), "c": c}  # queries counted from the end
    pairs = [s for s in SUBSETS if len(s) == 2]
    first, second = triangle.pair(*(torch.stack([means[s][s[side]] for s in pairs]) for side in (0, 1)))
    found = {s: {s: means[s][s]} for s in "abc"}
    found |= {s: {s[0]: first[index], s[1]: second[index]} for index, s in enumerate(pairs)}
    found["abc"] = dict(zip("abc", triangle.triple(torch.stack(list(means["abc"].values()))), strict=True))
    nothing = torch.zeros_like(means["a"]["a"])
    return {
        s: band.pack(f.get("a", nothing), f.get("b", nothing).flip(-1), f.get("c", nothing)) for s, f in found.items()
    }


def _band_terms(band: Band, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Terms by subset, by conjugate gradients."""
    return {s: conjugate_gradients(band, sums[s], s) for s in SUBSETS}
