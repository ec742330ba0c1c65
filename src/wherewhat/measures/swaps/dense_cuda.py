"""Triton kernels for sums over all swaps of two blocks of keys; imported only where there is a GPU.

Weights and logits are those of :mod:`~wherewhat.measures.swaps.dense`. No matrix of logits is stored, and no query at
the positions of its keys. Logits of swaps are in base 2, whose exponential a GPU computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 1024
"""Blocks whose factors are computed at a time."""

_LEFT_OUT = tl.constexpr(2.0**-24)
"""Largest share of α of the swaps that are left out: half of the rounding of a score in float32."""


@triton.jit
def _factors(
    values,
    logits,
    order,
    counts,
    scales,
    before,
    rise,
    fall,
    later,
    total,
    effective,
    rows,
    width,
    sink,
    COLUMNS: tl.constexpr,
    SINK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NEGLIGIBLE: tl.constexpr,
    PART: tl.constexpr,
):
    """Factors of α of one query at one temperature a program, their sum over all swaps and its entropy."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    count = tl.load(counts + row % rows)
    scale = tl.load(scales + column)
    values += row * width
    logits += row * width
    order += row * width
    before += row * width
    rise += (row * COLUMNS + column) * width
    fall += (row * COLUMNS + column) * width
    later += (row * COLUMNS + column) * width
    first = 0
    if SINK:  # the last column is that without the sink
        first = tl.where(column == COLUMNS - 1, sink, 0)
    part = tl.arange(0, PART)
    highest = tl.full((), float("-inf"), tl.float64)
    lowest = tl.full((), float("inf"), tl.float64)
    for start in range(0, count, PART):
        i = start + part
        inside = i < count
        place = tl.load(order + i, mask=inside, other=0)
        taken = inside & (place >= first)
        value = tl.load(values + place, mask=inside, other=0.0)
        highest = tl.maximum(highest, tl.max(tl.where(taken, value, float("-inf")), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(taken, value, float("inf")), 0))
    top = highest
    mass = tl.full((), 0.0, tl.float64)
    if SOFTMAX:
        for start in range(0, count, PART):
            i = start + part
            inside = i < count
            place = tl.load(order + i, mask=inside, other=0)
            taken = inside & (place >= first)
            value = tl.load(values + place, mask=inside, other=0.0)
            mass += tl.sum(tl.where(taken, tl.exp(value - top), 0.0), 0)
        highest = 1 / mass
        lowest = tl.exp(lowest - top) / mass
    # Sums over the blocks before a part: of their factors, and of these times their logarithms.
    smaller = tl.full((), 0.0, tl.float64)
    smaller_logs = tl.full((), 0.0, tl.float64)
    alpha = tl.full((), 0.0, tl.float64)
    alpha_logs = tl.full((), 0.0, tl.float64)
    last = tl.maximum(count - 1, 0)
    largest = tl.load(logits + tl.load(order + last))
    left = tl.full((), 0.0, tl.float64)
    for start in range(0, count, PART):
        i = start + part
        inside = i < count
        place = tl.load(order + i, mask=inside, other=0)
        taken = inside & (place >= first)
        value = tl.load(values + place, mask=inside, other=0.0)
        logit = tl.load(logits + place, mask=inside, other=0.0)
        if SOFTMAX:
            value = tl.exp(value - top) / mass
        # Relative to the largest one, because logits may be large. All columns store the same.
        tl.store(before + i, ((logit - largest) * 1.4426950408889634).to(tl.float32), mask=inside)
        up_log = tl.maximum(tl.minimum((value - highest) * scale, 0.0), -NEGLIGIBLE)
        down_log = tl.maximum(tl.minimum((lowest - value) * scale, 0.0), -NEGLIGIBLE)
        up = tl.where(taken & (up_log > -NEGLIGIBLE), tl.exp(up_log), 0.0)
        down = tl.where(taken & (down_log > -NEGLIGIBLE), tl.exp(down_log), 0.0)
        tl.store(rise + i, up.to(tl.float32), mask=inside)
        tl.store(fall + i, down.to(tl.float32), mask=inside)
        left += tl.sum(down.to(tl.float32).to(tl.float64), 0)
        down_logs = down * down_log
        earlier = smaller + tl.cumsum(down, 0) - down
        earlier_logs = smaller_logs + tl.cumsum(down_logs, 0) - down_logs
        alpha += tl.sum(up * earlier, 0)
        alpha_logs += tl.sum(up * (up_log * earlier + earlier_logs), 0)
        smaller += tl.sum(down, 0)
        smaller_logs += tl.sum(down_logs, 0)
    tl.store(total + row * COLUMNS + column, alpha)
    tl.debug_barrier()  # what other threads stored is read
    for start in range(0, count, PART):
        i = start + part
        down = tl.load(fall + i, mask=i < count, other=0.0).to(tl.float64)
        tl.store(later + i, (left - tl.cumsum(down, 0) + down).to(tl.float32), mask=i < count)
        left -= tl.sum(down, 0)
    if column == 0:
        entropy = tl.log(alpha) - alpha_logs / alpha
        number = tl.where(entropy > 0, tl.exp(entropy), 1.0)
        tl.store(effective + row, tl.where(count > 1, number, float("nan")))


@triton.jit
def _rows(x, place, inside, plane, PLANES: tl.constexpr):
    """Real and imaginary parts of rows of ``x`` (n, 2, PLANES), zero where they are not inside."""
    mask = inside[:, None] & (plane[None, :] < PLANES)
    x += place[:, None] * (2 * PLANES) + plane[None, :]
    return tl.load(x, mask=mask, other=0.0), tl.load(x + PLANES, mask=mask, other=0.0)


@triton.jit
def _placed(q, turns, place, inside, plane, PLANES: tl.constexpr):
    """Real and imaginary parts of the query at positions: times conjugate rotations."""
    real, imaginary = _rows(turns, place, inside, plane, PLANES)
    q_real = tl.load(q + plane, mask=plane < PLANES, other=0.0)[None, :]
    q_imaginary = tl.load(q + PLANES + plane, mask=plane < PLANES, other=0.0)[None, :]
    return q_real * real + q_imaginary * imaginary, q_imaginary * real - q_real * imaginary


@triton.jit
def _products(total, x_real, x_imaginary, y_real, y_imaginary, PRECISION: tl.constexpr):
    """Add the products of vectors x with vectors y."""
    total = tl.dot(x_real, tl.trans(y_real), total, input_precision=PRECISION)
    return tl.dot(x_imaginary, tl.trans(y_imaginary), total, input_precision=PRECISION)


@triton.jit
def _add_exp2(highest, total, x):
    """Add ``2^x`` to ``2^highest · total``."""
    larger = tl.maximum(highest, x)
    return larger, total * tl.exp2(highest - larger) + tl.exp2(x - larger)


@triton.jit
def _cosines(gap, moved, counted):
    """Cosines of the weights of two blocks with those after their swap, and of these in the other order.

    Weights are ``2^gap`` and 1 before, ``2^moved`` and 1 after. Beyond 2^30 the cosines no longer change.
    """
    u = tl.exp2(tl.minimum(gap, 30.0))
    v = tl.exp2(tl.minimum(moved, 30.0))
    size = tl.where(counted, tl.rsqrt((1 + u * u) * (1 + v * v)), 0.0)
    return (1 + u * v) * size, (u + v) * size


@triton.jit
def _needed(rise, later, total, j, count, width, tiles, COLUMNS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr):
    """Number of blocks i before which no swap with blocks j is left out, a multiple of ``STEP``."""
    i = tl.arange(0, STEPS) * STEP
    steps = 0
    for column in tl.static_range(COLUMNS):
        up = tl.sum(tl.load(rise + column * width + j, mask=j < count, other=0.0), 0)
        down = tl.load(later + column * width + i, mask=i < count, other=0.0)
        allowed = (tl.load(total + column) * (_LEFT_OUT / tiles)).to(tl.float32)
        steps = tl.maximum(steps, tl.sum((up * down > allowed).to(tl.int32), 0))
    return steps * STEP


@triton.jit
def _swaps(
    contents,
    turns,
    q,
    order,
    before,
    rise,
    fall,
    later,
    total,
    counts,
    sums,
    rows,
    keys,
    turned,
    width,
    PLANES: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    NARROW: tl.constexpr,
    KEPT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over the swaps of a tile of blocks j with all blocks i before them in the order, of one query a program."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.num_programs(1)
    tile = tiles - 1 - tl.program_id(1)  # those that take longest first
    count = tl.load(counts + row % rows)
    contents += row // rows * keys * (2 * PLANES)
    turns += row // rows * turned
    q += row * (2 * PLANES)
    order += row * width
    before += row * width
    rise += row * COLUMNS * width
    fall += row * COLUMNS * width
    later += row * COLUMNS * width
    column = tl.arange(0, PADDED_COLUMNS)
    j = tile * SIDE + tl.arange(0, SIDE)
    in_j = j < count
    place_j = tl.load(order + j, mask=in_j, other=0) * SIZE
    before_j = tl.load(before + j, mask=in_j, other=0.0)
    same = tl.zeros((SIDE, PADDED_COLUMNS), tl.float32)
    reverse = tl.zeros((SIDE, PADDED_COLUMNS), tl.float32)
    # With one or two columns, sums over i are taken once, after all steps.
    same_0 = tl.zeros((SIDE, STEP), tl.float32)
    reverse_0 = tl.zeros((SIDE, STEP), tl.float32)
    same_1 = tl.zeros((SIDE, STEP), tl.float32)
    reverse_1 = tl.zeros((SIDE, STEP), tl.float32)
    plane = tl.arange(0, CHUNK)
    if NARROW:
        q_real = tl.load(q)
        q_imaginary = tl.load(q + 1)
        there_real = tl.load(contents + 2 * place_j, mask=in_j, other=0.0)[:, None]
        there_imaginary = tl.load(contents + 2 * place_j + 1, mask=in_j, other=0.0)[:, None]
        turn_real = tl.load(turns + 2 * place_j, mask=in_j, other=0.0)[:, None]
        turn_imaginary = tl.load(turns + 2 * place_j + 1, mask=in_j, other=0.0)[:, None]
        here_real = q_real * turn_real + q_imaginary * turn_imaginary
        here_imaginary = q_imaginary * turn_real - q_real * turn_imaginary
    elif KEPT:
        there_real, there_imaginary = _rows(contents, place_j, in_j, plane, PLANES)
        here_real, here_imaginary = _placed(q, turns, place_j, in_j, plane, PLANES)
    end = tl.where(tile * SIDE < count, tl.minimum(tile * SIDE + SIDE, count), 0)
    end = tl.minimum(end, _needed(rise, later, total + row * COLUMNS, j, count, width, tiles, COLUMNS, STEP, STEPS))
    for start in range(0, end, STEP):
        i = start + tl.arange(0, STEP)
        in_i = i < count
        place_i = tl.load(order + i, mask=in_i, other=0) * SIZE
        before_i = tl.load(before + i, mask=in_i, other=0.0)
        moved = tl.zeros((SIDE, STEP), tl.float32)
        if NARROW:
            real = tl.load(turns + 2 * place_i, mask=in_i, other=0.0)[None, :]
            imaginary = tl.load(turns + 2 * place_i + 1, mask=in_i, other=0.0)[None, :]
            moved += there_real * (q_real * real + q_imaginary * imaginary)
            moved += there_imaginary * (q_imaginary * real - q_real * imaginary)
            moved -= here_real * tl.load(contents + 2 * place_i, mask=in_i, other=0.0)[None, :]
            moved -= here_imaginary * tl.load(contents + 2 * place_i + 1, mask=in_i, other=0.0)[None, :]
        elif KEPT:
            real, imaginary = _placed(q, turns, place_i, in_i, plane, PLANES)
            moved = _products(moved, there_real, there_imaginary, real, imaginary, PRECISION)
            real, imaginary = _rows(contents, place_i, in_i, plane, PLANES)
            moved = _products(moved, -here_real, -here_imaginary, real, imaginary, PRECISION)
        elif SIZE == 1:
            for chunk in range(0, PADDED, CHUNK):
                x_real, x_imaginary = _rows(contents, place_j, in_j, chunk + plane, PLANES)
                real, imaginary = _placed(q, turns, place_i, in_i, chunk + plane, PLANES)
                moved = _products(moved, x_real, x_imaginary, real, imaginary, PRECISION)
                x_real, x_imaginary = _placed(q, turns, place_j, in_j, chunk + plane, PLANES)
                real, imaginary = _rows(contents, place_i, in_i, chunk + plane, PLANES)
                moved = _products(moved, -x_real, -x_imaginary, real, imaginary, PRECISION)
        else:
            most_there = tl.full((SIDE, STEP), float("-inf"), tl.float32)
            most_here = tl.full((SIDE, STEP), float("-inf"), tl.float32)
            sum_there = tl.zeros((SIDE, STEP), tl.float32)
            sum_here = tl.zeros((SIDE, STEP), tl.float32)
            for token in range(0, SIZE):
                there = tl.zeros((SIDE, STEP), tl.float32)
                here = tl.zeros((SIDE, STEP), tl.float32)
                for chunk in range(0, PADDED, CHUNK):
                    x_real, x_imaginary = _rows(contents, place_j + token, in_j, chunk + plane, PLANES)
                    real, imaginary = _placed(q, turns, place_i + token, in_i, chunk + plane, PLANES)
                    there = _products(there, x_real, x_imaginary, real, imaginary, PRECISION)
                    x_real, x_imaginary = _placed(q, turns, place_j + token, in_j, chunk + plane, PLANES)
                    real, imaginary = _rows(contents, place_i + token, in_i, chunk + plane, PLANES)
                    here = _products(here, x_real, x_imaginary, real, imaginary, PRECISION)
                most_there, sum_there = _add_exp2(most_there, sum_there, there)
                most_here, sum_here = _add_exp2(most_here, sum_here, here)
            moved = (most_there - most_here) + tl.log2(sum_there / sum_here)
        cosine, other = _cosines(before_i[None, :] - before_j[:, None], moved, i[None, :] < j[:, None])
        if COLUMNS <= 2:
            factor = tl.load(fall + i, mask=in_i, other=0.0)[None, :]
            same_0 += cosine * factor
            reverse_0 += other * factor
            if COLUMNS == 2:
                factor = tl.load(fall + width + i, mask=in_i, other=0.0)[None, :]
                same_1 += cosine * factor
                reverse_1 += other * factor
        else:
            for number in tl.static_range(COLUMNS):
                factor = tl.load(fall + number * width + i, mask=in_i, other=0.0)[None, :]
                same += tl.where(column[None, :] == number, tl.sum(cosine * factor, 1)[:, None], 0.0)
                reverse += tl.where(column[None, :] == number, tl.sum(other * factor, 1)[:, None], 0.0)
    if COLUMNS <= 2:
        same += tl.where(column[None, :] == 0, tl.sum(same_0, 1)[:, None], tl.sum(same_1, 1)[:, None])
        reverse += tl.where(column[None, :] == 0, tl.sum(reverse_0, 1)[:, None], tl.sum(reverse_1, 1)[:, None])
    used = column < COLUMNS
    factors = tl.load(rise + column[None, :] * width + j[:, None], mask=in_j[:, None] & used[None, :], other=0.0).to(
        tl.float64
    )
    out = sums + ((row * tiles + tile) * 2) * COLUMNS + column
    tl.store(out, tl.sum(same.to(tl.float64) * factors, 0), mask=used)
    tl.store(out + COLUMNS, tl.sum(reverse.to(tl.float64) * factors, 0), mask=used)


@dataclass(frozen=True)
class Factors:
    """Blocks of queries in ascending order of their weights; those that are not seen come last and are not defined.

    Attributes:
        order: Index of the blocks, ``(queries, blocks)``.
        before: Logits in base 2, relative to that of the largest weight, ``(queries, blocks)`` float32.
        rise: Factors of α of the larger weights, ``(queries, columns, blocks)`` float32.
        fall: Factors of the smaller weights.
        later: Sum of these of each block and all after it, ``(queries, columns, blocks)`` float32.
        total: Sum of α over all swaps, ``(queries, columns)`` float64.
        effective: Effective number of swaps in the first column, ``(queries,)`` float64.
    """

    order: Tensor
    before: Tensor
    rise: Tensor
    fall: Tensor
    later: Tensor
    total: Tensor
    effective: Tensor

    @classmethod
    def of(
        cls, weights: Tensor | None, logits: Tensor, counts: Tensor, scales: Tensor, sink: int, negligible: float
    ) -> Factors:
        """Return the factors of queries, in groups that have the same numbers of blocks.

        Args:
            weights: Weights of blocks, ``(groups, rows, blocks)`` float64; None for the softmax of the logits, of all
                blocks and in the last column of those after the sink.
            logits: Their logits, ``(groups, rows, blocks)`` float64.
            counts: Number of blocks of each row, ``(rows,)``.
            scales: Inverse temperature of each column, ``(columns, 1)`` float64.
            sink: Number of first blocks that the last column leaves out.
            negligible: Factors below ``e^-negligible`` are 0.
        """
        rows, width = logits.shape[1:]
        hidden = torch.arange(width, device=logits.device) >= counts[:, None]
        logits = logits.contiguous()
        values = logits if weights is None else weights.contiguous()
        # Order matters where all weights are alike. There float32, which is sorted sooner, tells differences of logits.
        keys = values if weights is not None else (values - values[..., :1]).float()
        order = keys.masked_fill(hidden, torch.inf).flatten(0, 1).sort().indices
        queries, columns, device = len(order), len(scales), logits.device
        before = torch.empty(queries, width, dtype=torch.float32, device=device)
        rise, fall, later = torch.empty(3, queries, columns, width, dtype=torch.float32, device=device)
        total = torch.empty(queries, columns, dtype=torch.float64, device=device)
        effective = torch.empty(queries, dtype=torch.float64, device=device)
        _factors[(queries, columns)](
            values,
            logits,
            order,
            counts,
            scales,
            before,
            rise,
            fall,
            later,
            total,
            effective,
            rows,
            width,
            sink,
            COLUMNS=columns,
            SINK=sink > 0,
            SOFTMAX=weights is None,
            NEGLIGIBLE=negligible,
            PART=min(_PART, triton.next_power_of_2(width)),
            num_warps=4,
        )
        return cls(order, before, rise, fall, later, total, effective)


def swap_sums(
    q: Tensor,
    k: Tensor,
    turns: Tensor,
    counts: Tensor,
    factors: Factors,
    size: int,
    *,
    side: int = 64,
    step: int | None = None,
    chunk: int = 32,
    warps: int = 4,
    stages: int = 2,
    precision: str = "tf32x3",
) -> Tensor:
    """Return sums of α times both cosines over all swaps, ``(2, queries, columns)`` float64.

    Args:
        q: Queries, ``(groups, rows, planes)`` complex64.
        k: Keys, ``(groups, keys, planes)``.
        turns: Rotations of their positions, ``(groups or 1, keys, planes)``.
        counts: Number of blocks of each row, ``(rows,)``.
        factors: Blocks in the order of their weights.
        size: Keys per block.
        side: Blocks with larger weights in a tile.
        step: Blocks with smaller weights that are taken at a time; by default fewer for one plane.
        chunk: Planes that are taken at a time.
        warps: Warps of a program.
        stages: Steps whose keys are read ahead.
        precision: Precision of products: ``ieee`` is float32; ``tf32x3`` is nearly the same, on tensor cores.
    """
    (queries, width), planes, columns = factors.order.shape, k.shape[-1], factors.rise.shape[1]
    narrow = planes == 1 and size == 1  # a matrix product would be mostly padding
    smallest = max(16, triton.next_power_of_2(width))
    side, step = (min(smallest, x) for x in (side, step or (16 if narrow else 32)))
    padded = max(16, triton.next_power_of_2(planes))
    tiles = triton.cdiv(width, side)
    contents, turns, q = (torch.stack([x.real, x.imag], -2) for x in (k, turns.resolve_conj(), q * math.log2(math.e)))
    sums = torch.empty(queries, tiles, 2, columns, dtype=torch.float64, device=k.device)
    _swaps[(queries, tiles)](
        contents,
        turns,
        q,
        factors.order,
        factors.before,
        factors.rise,
        factors.fall,
        factors.later,
        factors.total,
        counts,
        sums,
        q.shape[1],
        k.shape[1],
        0 if len(turns) == 1 else turns[0].numel(),
        width,
        PLANES=planes,
        PADDED=padded,
        CHUNK=min(padded, chunk),
        SIZE=size,
        NARROW=narrow,
        KEPT=size == 1 and padded <= chunk,
        COLUMNS=columns,
        PADDED_COLUMNS=max(2, triton.next_power_of_2(columns)),
        SIDE=side,
        STEP=step,
        STEPS=triton.next_power_of_2(triton.cdiv(width, step)),
        PRECISION=precision,
        num_warps=warps,
        num_stages=stages,
    )
    return sums.sum(1).movedim(1, 0)
