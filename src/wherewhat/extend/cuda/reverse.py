"""Rows in reverse order, in one pass: torch's ``flip`` looks every number's place up by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64


@triton.jit
def _reverse(x, out, strides, out_strides, chunks, heads, size, d, ROWS: tl.constexpr, D: tl.constexpr):
    """Some rows of one head in one chunk."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    head = (tl.program_id(1) % heads).to(tl.int64)
    chunk = (tl.program_id(1) // heads % chunks).to(tl.int64)
    batch = (tl.program_id(1) // heads // chunks).to(tl.int64)
    inside = (row < size)[:, None] & (dim < d)[None, :]
    source = x + batch * strides[0] + chunk * strides[1] + head * strides[2]
    target = out + batch * out_strides[0] + chunk * out_strides[1] + head * out_strides[2]
    values = tl.load(source + (size - 1 - row)[:, None] * strides[3] + dim * strides[4], mask=inside)
    tl.store(target + row[:, None] * out_strides[3] + dim * out_strides[4], values, mask=inside)


def reversed_rows(x: Tensor) -> Tensor:
    """``x`` ``(batch, chunks, heads, rows, d)`` with its rows in reverse order, on memory of its own."""
    batch, chunks, heads, size, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(size, _ROWS), batch * chunks * heads)
    _reverse[grid](
        x, out, x.stride(), out.stride(), chunks, heads, size, d, ROWS=_ROWS, D=triton.next_power_of_2(d), num_warps=4
    )
    return out
