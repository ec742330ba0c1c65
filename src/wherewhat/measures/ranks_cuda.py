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
def _excess(x, out, m, M: tl.constexpr, STEP: tl.constexpr):
    """Count, for every entry of one row, the smaller ones less the larger ones; one program for each row."""
    row = tl.program_id(0).to(tl.int64) * m
    i = tl.arange(0, M)
    own = tl.load(x + row + i, mask=i < m, other=float("inf"))
    shown = own < float("inf")
    last = tl.max(tl.where(shown, i, -1), 0) + 1  # after it, all entries are infinite
    count = tl.zeros((M,), tl.int32)
    for start in range(0, last, STEP):
        for step in tl.static_range(STEP):
            j = start + step
            other = tl.load(x + row + j, mask=j < m, other=float("inf"))
            count += tl.where(own > other, 1, 0) - tl.where(own < other, 1, 0)
    compared = (last + STEP - 1) // STEP * STEP
    tl.store(out + row + i, count - (m - compared), mask=i < m)


def counted_excess(x: Tensor) -> Tensor:
    """Return how many entries of its row are smaller, less how many are larger, in the shape of ``x`` ``(..., m)``.

    Of int32, for float64 rows of at most :data:`MOST_ENTRIES`, without NaN; undefined for infinite entries.
    """
    m = x.shape[-1]
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    if x.numel():
        size = triton.next_power_of_2(m)
        _excess[(x.numel() // m,)](x, out, m, M=size, STEP=8, num_warps=max(1, min(16, size // 128)))
    return out
