"""Cumulative sums of few long rows on a GPU, where torch gives each row to one block of threads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Entries one program sums up."""


@triton.jit
def _totals(x, totals, n, blocks, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of each block of ``x`` (rows, n), times n - t where WEIGHTED."""
    block, row = tl.program_id(0), tl.program_id(1)
    t = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row.to(tl.int64) * n + t, mask=t < n, other=0.0).to(tl.float64)
    if WEIGHTED:
        values *= (n - t).to(tl.float64)
    tl.store(totals + row * blocks + block, tl.sum(values, 0))


@triton.jit
def _scan(x, before, out, n, blocks, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Cumulative sum in a block; with MEAN over t + 1, and from the end to the beginning."""
    block, row = tl.program_id(0), tl.program_id(1)
    t = block * BLOCK + tl.arange(0, BLOCK)
    first = row.to(tl.int64) * n
    values = tl.load(x + first + t, mask=t < n, other=0.0).to(tl.float64)
    if WEIGHTED:
        values *= (n - t).to(tl.float64)
    values = tl.cumsum(values, 0) + tl.load(before + row * blocks + block)
    if MEAN:
        tl.store(out + first + (n - 1 - t), values / (t + 1).to(tl.float64), mask=t < n)
    else:
        tl.store(out + first + t, values, mask=t < n)


def cumulative_sum(x: Tensor, *, weighted: bool = False, mean: bool = False) -> Tensor:
    """Cumulative sum over the last dimension of ``x`` ``(..., n)``, float64.

    Args:
        x: What to add up.
        weighted: Multiply entry t by n - t first.
        mean: Divide sum t by t + 1, and put it at n - 1 - t.
    """
    n = x.shape[-1]
    flat = x.contiguous().view(-1, n)
    blocks = -(-n // BLOCK)
    grid = (blocks, flat.shape[0])
    totals = torch.empty(flat.shape[0], blocks, dtype=torch.float64, device=x.device)
    _totals[grid](flat, totals, n, blocks, WEIGHTED=weighted, BLOCK=BLOCK, num_warps=4)
    before = totals.cumsum(-1) - totals
    out = torch.empty(flat.shape, dtype=torch.float64, device=x.device)
    _scan[grid](flat, before, out, n, blocks, WEIGHTED=weighted, MEAN=mean, BLOCK=BLOCK, num_warps=4)
    return out.view(x.shape)
