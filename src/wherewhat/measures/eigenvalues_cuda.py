"""Triton kernels for the eigenvalues of many small symmetric matrices; imported only where there is a GPU.

``torch.linalg.eigvalsh`` takes about 0.7 ms for each matrix of a batch on a GPU. Here each matrix is a program: it is
held in registers, made tridiagonal by Householder reflections, and its eigenvalues are enclosed by Sturm counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 128
"""Largest dimension of a matrix that fits into the registers of a program."""

_SMALLEST = 16
"""Smallest dimension of a program."""

_HALVINGS = 54
"""Halvings of the interval that contains all eigenvalues; float64 has 53 bits."""

_STEPS = 8
"""Leading minors computed before they are scaled: each has at most 8 times the size of the two before it, and at least
1e-18 of that of the one before."""


@triton.jit
def _tridiagonal(matrices, rest, diagonal, beside, d, steps, stride, D: tl.constexpr):
    """Reduce the first rows of one matrix a program to their diagonal and the entries beside it; store the rest of it.

    Columns are read as rows, and all sums over the matrix are over rows: a thread holds parts of all rows, so that
    these sums need no exchange within a warp.
    """
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    inside = i < d
    a = tl.load(
        matrices + matrix * d * d + i[:, None] * d + i[None, :], mask=inside[:, None] & inside[None, :], other=0.0
    )
    for k in range(0, steps):
        column = tl.sum(tl.where(i[:, None] == k, a, 0.0), 0)
        x = tl.where(i > k, column, 0.0)
        squares = tl.sum(x * x, 0)
        first = tl.sum(tl.where(i == k + 1, x, 0.0), 0)
        # The reflection takes x to a multiple of the first unit vector, with the sign that avoids cancellation.
        beta = tl.where(first > 0, -tl.sqrt(squares), tl.sqrt(squares))
        v = tl.where(i == k + 1, x - beta, x)
        size = squares - first * beta
        tau = tl.where(size > 0, 1.0 / tl.where(size > 0, size, 1.0), 0.0)
        p = tau * tl.sum(a * v[:, None], 0)
        w = p - 0.5 * tau * tl.sum(p * v, 0) * v
        a -= v[:, None] * w[None, :] + w[:, None] * v[None, :]
        tl.store(diagonal + matrix * stride + k, tl.sum(tl.where(i == k, column, 0.0), 0))
        tl.store(beside + matrix * stride + k, beta)
    left = d - steps
    j = i - steps
    kept = (j >= 0) & (j < left)
    tl.store(rest + matrix * left * left + j[:, None] * left + j[None, :], a, mask=kept[:, None] & kept[None, :])


@triton.jit
def _power(x):
    """Return the power of two by which a positive number is at least 1 and less than 2."""
    exponent = x.to(tl.int64, bitcast=True) >> 52
    return ((2046 - exponent) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _reach(diagonal, beside, matrix, d, i):
    """Return a power of two that scales a tridiagonal matrix, and the bounds of its scaled eigenvalues, within ±2."""
    inside = i < d
    middle = tl.load(diagonal + matrix * d + i, mask=inside, other=0.0)
    after = tl.abs(tl.load(beside + matrix * d + i, mask=i < d - 1, other=0.0))
    before = tl.abs(tl.load(beside + matrix * d + i - 1, mask=(i > 0) & inside, other=0.0))
    reach = after + before
    lowest = tl.min(tl.where(inside, middle - reach, float("inf")), 0)
    highest = tl.max(tl.where(inside, middle + reach, float("-inf")), 0)
    scale = _power(tl.minimum(tl.maximum(tl.maximum(tl.abs(lowest), tl.abs(highest)), 1e-300), 1e300))
    return scale, lowest * scale, highest * scale


@triton.jit
def _below(diagonal, beside, matrix, d, scale, point, STEPS: tl.constexpr):
    """Return the number of eigenvalues of a scaled tridiagonal matrix below each point.

    It is the number of sign changes among its leading minors. Each follows from the two before it without a division,
    for which most of the time would be spent; a few steps cannot overflow, and then both are scaled by a power of two.
    """
    minor = tl.zeros_like(point) + 1.0
    last = tl.zeros_like(point)
    below = tl.zeros(point.shape, tl.int32)
    for first in range(0, d, STEPS):
        for step in tl.static_range(STEPS):
            k = first + step
            inside = k < d
            entry = scale * tl.load(beside + matrix * d + k - 1, mask=inside & (k > 0), other=0.0)
            middle = scale * tl.load(diagonal + matrix * d + k, mask=inside, other=0.0)
            shifted = tl.where(inside, middle - point, 1.0)
            following = shifted * minor - (entry * entry) * last
            # A ratio of zero is replaced by the smallest number that rounding leaves beside the largest eigenvalue.
            following = tl.where(tl.abs(following) < 1e-18 * tl.abs(minor), -1e-18 * minor, following)
            below += ((following < 0) != (minor < 0)).to(tl.int32)
            last, minor = minor, following
        power = _power(tl.maximum(tl.abs(minor), tl.abs(last)))
        last *= power
        minor *= power
    return below


@triton.jit
def _halved(diagonal, beside, values, d, D: tl.constexpr, ROUNDS: tl.constexpr, STEPS: tl.constexpr):
    """Find all eigenvalues of one tridiagonal matrix a program, ascending, each in one half of an interval a round.

    More parts a round need fewer rounds, and take longer: there are enough matrices to keep the GPU busy.
    """
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    scale, lowest, highest = _reach(diagonal, beside, matrix, d, i)
    low = tl.zeros((D,), tl.float64) + lowest
    high = tl.zeros((D,), tl.float64) + highest
    for _ in range(ROUNDS):
        point = 0.5 * (low + high)
        beyond = _below(diagonal, beside, matrix, d, scale, point, STEPS) > i
        high = tl.where(beyond, point, high)
        low = tl.where(beyond, low, point)
    tl.store(values + matrix * d + i, 0.5 * (low + high) / scale, mask=i < d)


@triton.jit
def _largest(diagonal, beside, values, d, D: tl.constexpr, ROUNDS: tl.constexpr, STEPS: tl.constexpr):
    """Find the largest eigenvalue of one tridiagonal matrix a program, in one of D + 1 parts of an interval a round."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    scale, low, high = _reach(diagonal, beside, matrix, d, i)
    for _ in range(ROUNDS):
        point = low + (high - low) * ((i + 1).to(tl.float64) / (D + 1))
        beyond = _below(diagonal, beside, matrix, d, scale, point, STEPS) == d
        upper = tl.min(tl.where(beyond, point, high), 0)
        low = tl.max(tl.where(beyond, low, point), 0)
        high = upper
    tl.store(values + matrix, 0.5 * (low + high) / scale)


def symmetric_eigenvalues(matrices: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric ``matrices`` ``(m, d, d)`` on a GPU in float64, ascending, ``(m, d)``."""
    diagonal, beside = _reduced(matrices)
    (count, d), padded = diagonal.shape, _padded(diagonal.shape[1])
    values = torch.empty_like(diagonal)
    if count:
        shape = {"D": padded, "ROUNDS": _HALVINGS, "STEPS": _STEPS}
        _halved[(count,)](diagonal, beside, values, d, **shape, num_warps=max(1, padded // 32))
    return values


def largest_eigenvalues(matrices: Tensor) -> Tensor:
    """Return the largest eigenvalue of each symmetric matrix ``(m, d, d)`` on a GPU in float64, ``(m,)``."""
    diagonal, beside = _reduced(matrices)
    (count, d), padded = diagonal.shape, _padded(diagonal.shape[1])
    values = diagonal.new_empty(count)
    if count:
        rounds = math.ceil(_HALVINGS / math.log2(padded + 1))
        shape = {"D": padded, "ROUNDS": rounds, "STEPS": _STEPS}
        _largest[(count,)](diagonal, beside, values, d, **shape, num_warps=max(1, padded // 32))
    return values


def _reduced(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return diagonals of tridiagonal matrices with the same eigenvalues, and the entries beside, ``(m, d)`` each."""
    matrices = matrices.double().contiguous()
    count, d = matrices.shape[:2]
    diagonal, beside = torch.empty(2, count, d, dtype=torch.float64, device=matrices.device)
    for begin, size, steps in _programs(d) if count else ():
        rest = matrices.new_empty(count, size - steps, size - steps)
        padded = _padded(size)
        _tridiagonal[(count,)](
            *(matrices, rest, diagonal[:, begin:], beside[:, begin:], size, steps, d), D=padded, num_warps=padded // 16
        )
        matrices = rest
    return diagonal, beside


def _padded(size: int) -> int:
    """Return the dimension of the program of a matrix."""
    padded: int = max(_SMALLEST, triton.next_power_of_2(size))
    return padded


def _programs(d: int) -> Iterator[tuple[int, int, int]]:
    """Yield first row, size and number of steps of each program that reduces a matrix ``(d, d)``.

    A program that is half done continues as a smaller one, which holds a quarter of the entries.
    """
    begin = 0
    while begin < d:
        size = d - begin
        steps = size if _padded(size) == _SMALLEST else size - _padded(size) // 2
        yield begin, size, steps
        begin += steps
