"""Triton kernel for sums over all swaps of two keys; imported only where there is a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 128
"""Largest dimension of keys whose tiles fit into the shared memory of a GPU."""

_NARROW = 8
"""Dimensions of keys up to which products are added up one by one; a matrix product would be mostly padding."""


@triton.jit
def _tanh(x):
    """Hyperbolic tangent of any number, without overflow."""
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(x < 0, e - 1, 1 - e) / (1 + e)


@triton.jit
def _keys(x, place, inside, D: tl.constexpr, PADDED: tl.constexpr):
    """Rows of ``x`` (n, D) at places, zero where they are not inside, padded to a power of two."""
    d = tl.arange(0, PADDED)
    return tl.load(x + place[:, None] * D + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _swaps(
    contents,
    placed,
    order,
    before,
    rise,
    fall,
    sums,
    rows,
    keys,
    count,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    TAUS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Sums over the swaps of a tile of keys j with all keys i before them in the order, of one query a program."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    contents += row // rows * keys * D
    placed += row * count * D
    order += row * count
    before += row * count
    column = tl.arange(0, COLUMNS)
    j = tile * SIDE + tl.arange(0, SIDE)
    in_j = j < count
    place_j = tl.load(order + j, mask=in_j, other=0)
    before_j = tl.load(before + j, mask=in_j, other=0.0)
    middle = tl.zeros((SIDE, COLUMNS), tl.float32)
    apart = tl.zeros((SIDE, COLUMNS), tl.float32)
    for start in range(0, tile * SIDE + SIDE, SIDE):
        i = start + tl.arange(0, SIDE)
        in_i = i < count
        place_i = tl.load(order + i, mask=in_i, other=0)
        before_i = tl.load(before + i, mask=in_i, other=0.0)
        if NARROW:
            moved = tl.zeros((SIDE, SIDE), tl.float32)
            for d in tl.static_range(D):
                there = tl.load(contents + place_j * D + d, mask=in_j, other=0.0)
                there = there[:, None] * tl.load(placed + place_i * D + d, mask=in_i, other=0.0)[None, :]
                here = tl.load(placed + place_j * D + d, mask=in_j, other=0.0)
                here = here[:, None] * tl.load(contents + place_i * D + d, mask=in_i, other=0.0)[None, :]
                moved += there - here
        else:
            # Three products of tensor cores have nearly the precision of float32.
            there = tl.dot(
                _keys(contents, place_j, in_j, D, PADDED),
                tl.trans(_keys(placed, place_i, in_i, D, PADDED)),
                input_precision="tf32x3",
            )
            here = tl.dot(
                _keys(placed, place_j, in_j, D, PADDED),
                tl.trans(_keys(contents, place_i, in_i, D, PADDED)),
                input_precision="tf32x3",
            )
            moved = there - here
        first = _tanh(before_i[None, :] - before_j[:, None])
        second = _tanh(0.5 * moved)
        size = tl.rsqrt((1 + first * first) * (1 + second * second))
        size = tl.where((i[None, :] < j[:, None]) & in_j[:, None], size, 0.0)
        difference = first * second * size
        for tau in tl.static_range(TAUS):
            factor = tl.load(fall + (row * TAUS + tau) * count + i, mask=in_i, other=0.0)[None, :]
            middle += tl.where(column[None, :] == tau, tl.sum(size * factor, 1)[:, None], 0.0)
            apart += tl.where(column[None, :] == tau, tl.sum(difference * factor, 1)[:, None], 0.0)
    used = column < TAUS
    factors = tl.load(
        rise + (row * TAUS + column[None, :]) * count + j[:, None], mask=in_j[:, None] & used[None, :], other=0.0
    ).to(tl.float64)
    out = sums + ((row * tl.num_programs(1) + tile) * 2) * TAUS + column
    tl.store(out, tl.sum(middle.to(tl.float64) * factors, 0), mask=used)
    tl.store(out + TAUS, tl.sum(apart.to(tl.float64) * factors, 0), mask=used)


def swap_sums(contents: Tensor, placed: Tensor, order: Tensor, before: Tensor, rise: Tensor, fall: Tensor) -> Tensor:
    """Return sums of α times both parts of the cosines over all swaps, ``(2, queries, temperatures)`` float64.

    No matrix of logits is stored.

    Args:
        contents: Keys of each group, ``(groups, keys, d)`` float32; queries are ordered by group.
        placed: Queries rotated to the positions of the keys, ``(queries, keys, d)``.
        order: Keys in ascending order of their weights, ``(queries, keys)``.
        before: Half the logits in this order, ``(queries, keys)``.
        rise: Factors of α of the larger weights in this order, ``(queries, temperatures, keys)``.
        fall: Factors of the smaller weights.
    """
    queries, count, d = placed.shape
    taus, narrow = rise.shape[1], d <= _NARROW
    side = 64 if narrow else 32
    tiles = triton.cdiv(count, side)
    sums = torch.empty(queries, tiles, 2, taus, dtype=torch.float64, device=placed.device)
    _swaps[(queries, tiles)](
        *(x.contiguous() for x in (contents, placed, order, before, rise, fall)),
        sums,
        queries // len(contents),
        contents.shape[1],
        count,
        D=d,
        PADDED=max(16, triton.next_power_of_2(d)),
        TAUS=taus,
        COLUMNS=max(2, triton.next_power_of_2(taus)),
        NARROW=narrow,
        SIDE=side,
        num_warps=4,
        num_stages=1,  # four tiles of keys must fit into shared memory
    )
    return sums.sum(1).movedim(1, 0)
