"""Margins of any logits, a block of queries at a time: time n², memory one block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wherewhat.measure.axes.region import Band
from wherewhat.measure.axes.solve import Margins

Logits = Callable[[int, int, int, int], Tensor]
"""``logits(i0, i1, j0, j1)``: rows i0…i1 and columns j0…j1 of the matrix, ``(heads, …, …)``, a new tensor."""


def blocked_margins(logits: Logits, heads: int, n: int, width: int, *, device: torch.device, block: int) -> Margins:
    """Margins of a matrix that is made a block at a time.

    Args:
        logits: Makes a block.
        heads: Number of matrices.
        n: Side of the triangle.
        width: Number of distances.
        device: Where the blocks are.
        block: Rows of a block.
    """
    band = Band(n, width, device)
    sums = torch.zeros(heads, sum(band.sizes), dtype=torch.float64, device=device)
    by_distance, by_query, by_key = band.unpack(sums)
    squares = torch.zeros(heads, dtype=torch.float64, device=device)
    for i0 in range(0, n, block):
        i1 = min(n, i0 + block)
        j0 = max(0, i0 - width + 1)
        w = logits(i0, i1, j0, i1).tril_(i0 - j0)
        if i1 - j0 > width:
            w.triu_(i0 - j0 - width + 1)
        by_query[:, i0:i1] = w.sum(-1)
        by_key[:, j0:i1] += w.sum(-2)
        diagonals = _diagonal_sums(w)  # from distance i1-1-j0 down to i0-(i1-1)
        largest = i1 - 1 - j0
        kept = diagonals.flip(-1)[:, i1 - 1 - i0 :]  # distances 0 … largest
        by_distance[:, : min(width, largest + 1)] += kept[:, :width]
        squares += w.square_().sum((-1, -2))
    return Margins(band, sums, squares)


def _diagonal_sums(w: Tensor) -> Tensor:
    """Sums along diagonals of ``(heads, rows, columns)``, from the lower left corner to the upper right.

    A row more of padding per line makes each diagonal of the matrix a column of its storage.
    """
    heads, rows, columns = w.shape
    padded = torch.nn.functional.pad(w.flip(1), (0, rows))
    skewed = padded.reshape(heads, -1)[:, : rows * (rows + columns - 1)].view(heads, rows, rows + columns - 1)
    return skewed.sum(1)
