"""Triton kernels for sums over products and over triangles in float64; imported only where there is a GPU.

They read each entry once, where operations of PyTorch write and read it again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _triangle(x, out, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Sum of squares and sum of the entries on and below the diagonal, one matrix a program."""
    matrix = tl.program_id(0).to(tl.int64)
    x += matrix * (SIZE * SIZE)
    column = tl.arange(0, PADDED)[None, :]
    squares = tl.zeros((ROWS, PADDED), tl.float64)
    entries = tl.zeros((ROWS, PADDED), tl.float64)
    for start in range(0, SIZE, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        values = tl.load(x + row * SIZE + column, mask=(row < SIZE) & (column <= row), other=0.0)
        squares += values * values
        entries += values
    tl.store(out + 2 * matrix, tl.sum(tl.sum(squares, 1), 0))
    tl.store(out + 2 * matrix + 1, tl.sum(tl.sum(entries, 1), 0))


@triton.jit
def _dots(x, y, out, n, matrix_stride, row_stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the products of two matrices (n, D), one pair a program; those of ``y`` have strides."""
    matrix = tl.program_id(0).to(tl.int64)
    x += matrix * n * D
    y += matrix * matrix_stride
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n * D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(y + (i // D) * row_stride + i % D, mask=i < n * D, other=0.0)
        total += values * tl.load(x + i, mask=i < n * D, other=0.0)
    tl.store(out + matrix, tl.sum(total, 0))


def triangle_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of squares and of entries on and below the diagonal of ``x`` ``(..., n, n)`` float64, ``(...)``."""
    *lead, size, _ = x.shape
    out = x.new_empty(*lead, 2)
    if out.numel():
        padded = triton.next_power_of_2(size)
        rows = max(1, min(padded, 2048 // padded))
        _triangle[(out.numel() // 2,)](x.contiguous(), out, SIZE=size, PADDED=padded, ROWS=rows, num_warps=4)
    return out[..., 0], out[..., 1]


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of products of matrices ``(count, n, d)`` float64, ``(count,)``; rows of ``y`` are contiguous."""
    count, n, d = x.shape
    out = x.new_empty(count)
    if out.numel():
        assert y.stride(2) == 1
        _dots[(count,)](x.contiguous(), y, out, n, y.stride(0), y.stride(1), D=d, BLOCK=2048, num_warps=8)
    return out
