"""Triton kernels for the eigenvalues of many small symmetric matrices; imported only where there is a GPU.

``torch.linalg.eigvalsh`` takes about 0.7 ms for each matrix of a batch on a GPU. Here each matrix is a program: it is
held in registers, made tridiagonal by Householder reflections, and its eigenvalues are bisected by Sturm counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 128
"""Largest dimension of a matrix that fits into the registers of a program."""

_HALVINGS = 60
"""Halvings of the interval that contains all eigenvalues; float64 has 53 bits."""


@triton.jit
def _tridiagonal(matrices, diagonal, beside, d, D: tl.constexpr):
    """Reduce one matrix a program to its diagonal and the entries beside it."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    inside = i < d
    a = tl.load(
        matrices + matrix * d * d + i[:, None] * d + i[None, :], mask=inside[:, None] & inside[None, :], other=0.0
    )
    for k in range(0, d):
        column = tl.sum(tl.where(i[None, :] == k, a, 0.0), 1)
        x = tl.where(i > k, column, 0.0)
        squares = tl.sum(x * x, 0)
        first = tl.sum(tl.where(i == k + 1, x, 0.0), 0)
        # The reflection takes x to a multiple of the first unit vector, with the sign that avoids cancellation.
        beta = tl.where(first > 0, -tl.sqrt(squares), tl.sqrt(squares))
        v = tl.where(i == k + 1, x - beta, x)
        size = squares - first * beta
        tau = tl.where(size > 0, 1.0 / tl.where(size > 0, size, 1.0), 0.0)
        p = tau * tl.sum(a * v[None, :], 1)
        w = p - 0.5 * tau * tl.sum(p * v, 0) * v
        a -= v[:, None] * w[None, :] + w[:, None] * v[None, :]
        tl.store(diagonal + matrix * d + k, tl.sum(tl.where(i == k, column, 0.0), 0))
        tl.store(beside + matrix * d + k, beta)


@triton.jit
def _bisection(diagonal, beside, values, d, D: tl.constexpr, HALVINGS: tl.constexpr):
    """Find all eigenvalues of one tridiagonal matrix a program, ascending."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    inside = i < d
    middle = tl.load(diagonal + matrix * d + i, mask=inside, other=0.0)
    after = tl.abs(tl.load(beside + matrix * d + i, mask=i < d - 1, other=0.0))
    before = tl.abs(tl.load(beside + matrix * d + i - 1, mask=(i > 0) & inside, other=0.0))
    reach = after + before
    lowest = tl.min(tl.where(inside, middle - reach, float("inf")), 0)
    highest = tl.max(tl.where(inside, middle + reach, float("-inf")), 0)
    # A pivot of zero is replaced by the smallest number that rounding leaves beside the largest eigenvalue.
    tiny = tl.maximum(tl.maximum(tl.abs(lowest), tl.abs(highest)) * 1e-18, 1e-300)
    low = tl.zeros((D,), tl.float64) + lowest
    high = tl.zeros((D,), tl.float64) + highest
    for _ in range(HALVINGS):
        point = 0.5 * (low + high)
        pivot = tl.load(diagonal + matrix * d) - point
        pivot = tl.where(tl.abs(pivot) < tiny, -tiny, pivot)
        below = (pivot < 0).to(tl.int32)
        for k in range(1, d):
            entry = tl.load(beside + matrix * d + k - 1)
            pivot = tl.load(diagonal + matrix * d + k) - point - entry * entry / pivot
            pivot = tl.where(tl.abs(pivot) < tiny, -tiny, pivot)
            below += (pivot < 0).to(tl.int32)
        high = tl.where(below > i, point, high)
        low = tl.where(below > i, low, point)
    tl.store(values + matrix * d + i, 0.5 * (low + high), mask=inside)


def symmetric_eigenvalues(matrices: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric ``matrices`` ``(m, d, d)`` on a GPU in float64, ascending, ``(m, d)``."""
    matrices = matrices.double().contiguous()
    count, d = matrices.shape[:2]
    padded = max(16, triton.next_power_of_2(d))
    values: Tensor
    diagonal, beside, values = torch.empty(3, count, d, dtype=torch.float64, device=matrices.device)
    if count:
        _tridiagonal[(count,)](matrices, diagonal, beside, d, D=padded, num_warps=4 if padded < LARGEST else 16)
        _bisection[(count,)](diagonal, beside, values, d, D=padded, HALVINGS=_HALVINGS, num_warps=max(1, padded // 32))
    return values
