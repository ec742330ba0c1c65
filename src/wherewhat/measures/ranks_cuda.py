"""Triton kernel for ranks of many short rows; imported only where there is a GPU.

A sort of float64 rows of 512 numbers with their indices takes several times longer than comparing all pairs in
registers, which is also exact for ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ENTRIES = 4096
"""Longest rows for which all pairs are compared faster than rows are sorted."""


@triton.jit
def _ranks(x, out, m, M: tl.constexpr, STEP: tl.constexpr):
    """Rank the finite entries of one row: half of the number of smaller ones less that of larger ones."""
    row = tl.program_id(0).to(tl.int64) * m
    i = tl.arange(0, M)
    own = tl.load(x + row + i, mask=i < m, other=float("inf"))
    shown = own < float("inf")
    last = tl.max(tl.where(shown, i, -1), 0) + 1  # after it, all entries are infinite
    excess = tl.zeros((M,), tl.int32)
    for start in range(0, last, STEP):
        for step in tl.static_range(STEP):
            j = start + step
            other = tl.load(x + row + j, mask=j < m, other=float("inf"))
            excess += tl.where(own > other, 1, 0) - tl.where(own < other, 1, 0)
    # Infinite entries among those compared were counted as larger.
    infinite = (last + STEP - 1) // STEP * STEP - tl.sum(tl.where(shown, 1, 0), 0)
    tl.store(out + row + i, tl.where(shown, (excess + infinite).to(tl.float64) / 2, 0.0), mask=i < m)


def counted_ranks(x: Tensor) -> Tensor:
    """Return centred ranks along the last dimension of ``x`` ``(..., m)`` float64; ties share their mean rank.

    Rows have at most :data:`MOST_ENTRIES`, without NaN. Entries of +inf are not ranked, and get 0.
    """
    m = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        size = triton.next_power_of_2(m)
        _ranks[(x.numel() // m,)](x, out, m, M=size, STEP=8, num_warps=max(1, min(16, size // 128)))
    return out
