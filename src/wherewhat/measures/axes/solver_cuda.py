"""Triton kernels that solve the three-axis fit; imported only where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 26
"""Sums of a head: mean, then three each of own, mixed, alone, pair, whole, reach, sums of the matrix and of the terms,
then the product of the key term with the distance from the middle."""

SCORES = (
    *("r_a", "r_b", "r_c", "r_ab", "r_ac", "r_bc", "r_abc", "own_a", "own_b", "own_c"),
    *("unique_a", "unique_b", "unique_c", "r_behaviour", "adjusted_r2", "sse", "tss", "mean"),
)
"""Names of the scores of a fit, in the order in which :func:`_scores` stores them."""


@triton.jit
def _axis(x, head, axis, t, n):
    """Values of one axis of packed ``x`` (heads, 3n), zero beyond the text; queries are counted from the end."""
    place = tl.where(axis == 1, n - 1 - t, t)
    return tl.load(x + (head * 3 + axis).to(tl.int64) * n + place, mask=t < n, other=0.0)


@triton.jit
def _weight(t, n):
    """Number of pairs at each value of a coordinate; 1 beyond the text."""
    return tl.where(t < n, n - t, 1).to(tl.float64)


@triton.jit
def _expect(out, f, before, t, n):
    """Store a block of P f, see ``Triangle.expect``, and return the sum of ``f`` up to its end from that before it."""
    tl.store(out + (n - 1 - t), (tl.cumsum(f, 0) + before) / (t + 1).to(tl.float64), mask=t < n)
    return before + tl.sum(f, 0)


@triton.jit
def _offset_means(sums, offset, table, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of the matrix and its offsets, one head a program."""
    head = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        offsets = _axis(offset, head, 0, t, n) + _axis(offset, head, 1, t, n) + _axis(offset, head, 2, t, n)
        total += _axis(sums, head, 0, t, n) + _weight(t, n) * offsets
    size = tl.cast(n, tl.float64)
    tl.store(table + head * COLUMNS, tl.sum(total, 0) / (size * (size + 1) / 2))


@triton.jit
def _offset_sums(sums, offset, expected, table, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Expectation of the offset of one axis given values of another, and its products with itself and the matrix."""
    axis, head = tl.program_id(0), tl.program_id(1)
    shift = tl.where(axis == 1, tl.load(table + head * COLUMNS), 0.0)
    own = tl.zeros((BLOCK,), tl.float64)
    reach = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    before = tl.full((), 0.0, tl.float64)
    here = expected + (head * 3 + axis).to(tl.int64) * n
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        o = tl.where(t < n, _axis(offset, head, axis, t, n) - shift, 0.0)
        s = _axis(sums, head, axis, t, n)
        squares = _weight(t, n) * o * o
        reach += squares
        own += squares + 2 * o * s
        total += s
        before = _expect(here, o, before, t, n)
    tl.store(table + head * COLUMNS + 1 + axis, tl.sum(own, 0))
    tl.store(table + head * COLUMNS + 16 + axis, tl.sum(reach, 0))
    tl.store(table + head * COLUMNS + 19 + axis, tl.sum(total, 0))


@triton.jit
def _pair_sums(sums, offset, expected, means, table, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares explained by one axis and by one pair of axes, see ``Triangle.explained_by_pair``."""
    pair, head = tl.program_id(0), tl.program_id(1)
    first = tl.where(pair == 2, 1, 0)
    second = tl.where(pair == 0, 1, 2)
    shift = tl.where(first == 1, tl.load(table + head * COLUMNS), 0.0)
    rows = expected + head.to(tl.int64) * (3 * n)
    left = rows + (2 - pair).to(tl.int64) * n  # the offset of the axis left out
    mean = means + (head * 3 + pair).to(tl.int64) * n
    squares = tl.zeros((BLOCK,), tl.float64)
    mixed = tl.zeros((BLOCK,), tl.float64)
    alone = tl.zeros((BLOCK,), tl.float64)
    before = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = t < n
        w = _weight(t, n)
        y = _axis(sums, head, second, t, n) / w + tl.load(left + t, mask=inside, other=0.0)
        squares += w * y * y
        o = tl.where(inside, _axis(offset, head, first, t, n) - shift, 0.0)
        mixed += w * o * tl.load(rows + second.to(tl.int64) * n + t, mask=inside, other=0.0)
        z = _axis(sums, head, pair, t, n) / w
        z += tl.load(rows + ((pair + 1) % 3).to(tl.int64) * n + t, mask=inside, other=0.0)
        z += tl.load(rows + ((pair + 2) % 3).to(tl.int64) * n + t, mask=inside, other=0.0)
        alone += w * z * z
        before = _expect(mean, y, before, t, n)
    tl.debug_barrier()  # the means are read in another order
    products = tl.zeros((BLOCK,), tl.float64)
    crossed = tl.zeros((BLOCK,), tl.float64)
    constant = tl.zeros((BLOCK,), tl.float64)
    flown = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = t < n
        w = _weight(t, n)
        h = _axis(sums, head, first, t, n) / w + tl.load(left + t, mask=inside, other=0.0)
        h -= tl.load(mean + t, mask=inside, other=0.0)
        squares += w * h * h
        through = tl.cumsum(w * h, 0) + flown
        flown += tl.sum(w * h, 0)
        x = (t + 1).to(tl.float64)
        flow = tl.where(t < n - 1, 1.0 / (x * tl.where(t < n - 1, w - 1, 1.0) * w), 0.0)
        smaller = x * (w + n) / 2
        products += through * through * flow
        crossed += through * smaller * flow
        constant += smaller * smaller * flow
    size = tl.cast(n, tl.float64)
    excess = flown / (size * (size + 1) / 2)
    explained = tl.sum(squares, 0) - excess * flown
    explained += tl.sum(products, 0) - 2 * excess * tl.sum(crossed, 0) + excess * excess * tl.sum(constant, 0)
    tl.store(table + head * COLUMNS + 4 + pair, 2 * tl.sum(mixed, 0))
    tl.store(table + head * COLUMNS + 7 + pair, tl.sum(alone, 0))
    tl.store(table + head * COLUMNS + 10 + pair, explained)


@triton.jit
def _together(sums, head, t, n):
    """Sum of the means of the three axes at each value, zero beyond the text."""
    total = _axis(sums, head, 0, t, n) + _axis(sums, head, 1, t, n) + _axis(sums, head, 2, t, n)
    return total / _weight(t, n)


@triton.jit
def _common(sums, inverse, both, common, table, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """What the three axes share, see ``Triangle.triple``: the expectation of the sum of their terms."""
    head = tl.program_id(1)
    size = tl.cast(n, tl.float64)
    pairs = size * (size + 1) / 2
    totals = table + head * COLUMNS + 19
    mean = (tl.load(totals) + tl.load(totals + 1) + tl.load(totals + 2)) / pairs
    inverse += head.to(tl.int64) * n
    both += head.to(tl.int64) * n
    common += head.to(tl.int64) * n
    weighed = tl.zeros((BLOCK,), tl.float64)
    weights = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        w = _weight(t, n)
        w_1 = tl.where(t < n - 1, (t + 1).to(tl.float64) * (w - 1) * w, 0.0)
        weighed += w_1 * (_together(sums, head, t + 1, n) - _together(sums, head, t, n))
        weights += w_1
    weight = tl.sum(weights, 0)
    slope = tl.sum(weighed, 0) / weight
    weighed = tl.zeros((BLOCK,), tl.float64)
    means = tl.zeros((BLOCK,), tl.float64)
    flown = tl.full((), 0.0, tl.float64)
    bent = tl.full((), 0.0, tl.float64)
    risen = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        w = _weight(t, n)
        x = (t + 1).to(tl.float64)
        w_1 = tl.where(t < n - 1, x * (w - 1) * w, 0.0)
        steep = w_1 * (_together(sums, head, t + 1, n) - _together(sums, head, t, n) - slope)
        flow = x * (x + 1) * (w - 2) * (w - 1) * w
        bend = tl.where(t < n - 2, -(tl.cumsum(steep, 0) + flown) / tl.where(t < n - 2, flow, 1.0), 0.0)
        flown += tl.sum(steep, 0)
        rise = tl.where(t < n - 1, tl.cumsum(bend, 0) + bent - bend, 0.0)
        bent += tl.sum(bend, 0)
        weighed += w_1 * rise
        value = tl.cumsum(rise, 0) + risen - rise
        risen += tl.sum(rise, 0)
        means += tl.where(t < n, w * value, 0.0)
        tl.store(inverse + t, value, mask=t < n)
    slope = tl.sum(weighed, 0) / weight
    shift = (tl.sum(means, 0) - slope * size * (size - 1) * (size + 1) / 6) / pairs
    tl.debug_barrier()
    before = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = t < n
        value = tl.load(inverse + t, mask=inside, other=0.0) - slope * t.to(tl.float64) - shift
        value = tl.where(inside, _together(sums, head, t, n) - mean + 4 * value, 0.0)
        tl.store(inverse + t, value, mask=inside)
        before = _expect(both, value, before, t, n)
    tl.debug_barrier()
    before = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        value = tl.load(inverse + t, mask=t < n, other=0.0) - 2 * tl.load(both + t, mask=t < n, other=0.0)
        before = _expect(common, value, before, t, n)


@triton.jit
def _pairs_and_common(
    sums, offset, expected, means, inverse, both, common, table, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What pairs of axes explain and what all three share, at once: each alone leaves most of the GPU idle."""
    if tl.program_id(0) < 3:
        _pair_sums(sums, offset, expected, means, table, n, COLUMNS, BLOCK)
    else:
        _common(sums, inverse, both, common, table, n, COLUMNS, BLOCK)


@triton.jit
def _axis_terms(
    sums, offset, common, parts, means, terms, table, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Terms of one axis with its offset, laid out (3, heads, n), and their product with the matrix."""
    axis, head = tl.program_id(0), tl.program_id(1)
    size = tl.cast(n, tl.float64)
    pairs = size * (size + 1) / 2
    totals = table + head * COLUMNS + 19
    everything = (tl.load(totals) + tl.load(totals + 1) + tl.load(totals + 2)) / pairs
    common += head.to(tl.int64) * n
    row = (head * 3 + axis).to(tl.int64) * n
    part = parts + row
    mean = means + row
    term = terms + (axis * tl.num_programs(1) + head).to(tl.int64) * n
    sum_h = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        sum_h += _axis(sums, head, axis, t, n) - tl.where(t < n, _weight(t, n), 0.0) * tl.load(
            common + t, mask=t < n, other=0.0
        )
    excess = tl.sum(sum_h, 0) / pairs
    flown = tl.full((), 0.0, tl.float64)
    stepped = tl.full((), 0.0, tl.float64)
    sum_y = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        w = _weight(t, n)
        h = _axis(sums, head, axis, t, n) / w - tl.load(common + t, mask=t < n, other=0.0) - excess
        h = tl.where(t < n, h, 0.0)
        flow = (t + 1).to(tl.float64) * (w - 1) * w
        step = tl.where(t < n - 1, -(tl.cumsum(w * h, 0) + flown) / tl.where(t < n - 1, flow, 1.0), 0.0)
        flown += tl.sum(w * h, 0)
        y = tl.where(t < n, h + tl.cumsum(step, 0) + stepped - step, 0.0)
        stepped += tl.sum(step, 0)
        sum_y += w * y
        tl.store(part + t, y, mask=t < n)
    excess = tl.sum(sum_y, 0) / pairs
    tl.debug_barrier()
    before = tl.full((), 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        value = tl.where(t < n, tl.load(part + t, mask=t < n, other=0.0) - excess, 0.0)
        before = _expect(mean, value, before, t, n)
    tl.debug_barrier()
    whole = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    sloped = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, n, BLOCK):
        t = start + tl.arange(0, BLOCK)
        value = tl.load(part + t, mask=t < n, other=0.0) - excess + tl.load(mean + t, mask=t < n, other=0.0)
        value += everything / 9  # the operators leave out constants; a third of the mean goes to each axis
        whole += value * _axis(sums, head, axis, t, n)
        value = tl.where(t < n, value + _axis(offset, head, axis, t, n), 0.0)
        total += value
        sloped += value * (t - (size - 1) / 2)
        tl.store(term + tl.where(axis == 1, n - 1 - t, t), value, mask=t < n)
    tl.store(table + head * COLUMNS + 13 + axis, tl.sum(whole, 0))
    tl.store(table + head * COLUMNS + 22 + axis, tl.sum(total, 0))
    if axis == 2:
        tl.store(table + head * COLUMNS + 25, tl.sum(sloped, 0))


@triton.jit
def _chosen(x, index):
    """One of eight values."""
    return tl.sum(tl.where(tl.arange(0, 8) == index, x, 0.0), 0)


@triton.jit
def _clipped(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _scores(table, squares, scores, head, heads, n, COLUMNS: tl.constexpr):
    """All scores of one head, see ``fit._scores``: vectors of no axis and the seven subsets."""
    table += head * COLUMNS
    size = tl.cast(n, tl.float64)
    pairs = size * (size + 1) / 2
    mean = tl.load(table)
    subset = tl.arange(0, 8)
    axes = tl.where(subset == 3, 4, tl.where(subset == 4, 3, subset))  # one bit for each axis
    # Products of offsets are in the order of the subsets; those of axes that a subset leaves out remain.
    products = tl.load(table + subset, mask=(subset > 0) & (subset < 7), other=0.0)
    left_out = (axes[:, None] & axes[None, :]) == 0
    remaining = tl.sum(tl.where(left_out, products[None, :], 0.0), 1)
    explained = tl.load(table + 6 + subset, mask=(subset > 0) & (subset < 7), other=0.0)
    three = tl.load(table + 13) + tl.load(table + 14) + tl.load(table + 15)
    explained = tl.where(subset == 7, three, explained)
    total = tl.load(squares + head)
    reach = total + tl.load(table + 16) + tl.load(table + 17) + tl.load(table + 18) + mean * mean * pairs
    sse = tl.maximum(total + remaining - explained, 0.0)
    tss, by_query, whole = _chosen(sse, 0), _chosen(sse, 2), _chosen(sse, 7)
    varies = tss > 1e-12 * tl.maximum(reach, 1e-300)
    share = _clipped(1 - sse / tl.maximum(tss, 1e-300))
    all_three = _chosen(share, 7)
    behaviour = tl.sqrt(_clipped(1 - whole / tl.maximum(by_query, 1e-300)))
    adjusted = 1 - (1 - all_three) * ((pairs - 1) / tl.maximum(pairs - 3 * size + 3, 1.0))
    nothing = float("nan")
    row = scores + head
    tl.store(row + (subset - 1) * heads, tl.where(varies, tl.sqrt(share), nothing), mask=subset > 0)
    tl.store(row + (subset + 6) * heads, tl.where(varies, share, nothing), mask=(subset > 0) & (subset < 4))
    unique = tl.where(varies, tl.maximum(all_three - share, 0.0), nothing)
    tl.store(row + (16 - subset) * heads, unique, mask=(subset > 3) & (subset < 7))
    tl.store(row + 13 * heads, tl.where(varies & (by_query > 1e-12 * reach), behaviour, nothing))
    tl.store(row + 14 * heads, tl.where(varies, adjusted, nothing))
    tl.store(row + 15 * heads, whole)
    tl.store(row + 16 * heads, tss)
    tl.store(row + 17 * heads, mean)


@triton.jit
def _scores_and_curves(table, squares, terms, scores, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Scores of one head, and a block of its terms in the canonical gauge, see ``fit.canonical``."""
    axis, head, heads = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if tl.program_id(0) == 0 and axis == 0:
        _scores(table, squares, scores, head, heads, n, COLUMNS)
    table += head * COLUMNS + 22
    size = tl.cast(n, tl.float64)
    middle = (size - 1) / 2
    mean_b, mean_c = tl.load(table + 1) / size, tl.load(table + 2) / size
    slope = tl.load(table + 3) / (size * (size * size - 1) / 12)
    slope = tl.where(axis == 1, slope, -slope)
    shift = tl.where(axis == 1, -mean_b, tl.where(axis == 2, -mean_c, mean_b + mean_c + slope * middle))
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    term = terms + (axis * heads + head).to(tl.int64) * n + t
    tl.store(term, tl.load(term, mask=t < n) + slope * (t - middle) + shift, mask=t < n)


def fit_triangle(sums: Tensor, squares: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of a fit by :data:`SCORES`, ``(scores, heads)``, and its curves ``(3, heads, n)``.

    Four kernels that each read a head from beginning to end do what ``Triangle.solve`` does. A fifth one replaces about
    fifty operations on a few numbers a head, whose launches take longer than they do.

    Args:
        sums: Sums of the matrix along diagonals, rows and columns, packed, ``(heads, 3n)`` float64.
        squares: Sums of its squares, ``(heads,)``.
        offset: Known additive terms, packed like ``sums``.
    """
    heads, n = len(sums), sums.shape[1] // 3
    sums, offset = sums.contiguous(), offset.contiguous()
    table = torch.empty(heads, _COLUMNS, dtype=torch.float64, device=sums.device)
    scores = torch.empty(len(SCORES), heads, dtype=torch.float64, device=sums.device)
    expected, parts, means, terms, shared = torch.empty(5, heads, 3, n, dtype=torch.float64, device=sums.device)
    inverse, both, common = shared.view(3, heads, n)
    block = min(2048, max(256, triton.next_power_of_2(n)))
    shape: dict[str, Any] = {"COLUMNS": _COLUMNS, "BLOCK": block, "num_warps": max(4, block // 128)}
    _offset_means[(heads,)](sums, offset, table, n, **shape)
    _offset_sums[(3, heads)](sums, offset, expected, table, n, **shape)
    _pairs_and_common[(4, heads)](sums, offset, expected, means, inverse, both, common, table, n, **shape)
    _axis_terms[(3, heads)](sums, offset, common, parts, means, terms, table, n, **shape)
    shape |= {"BLOCK": 1024, "num_warps": 4}
    _scores_and_curves[(-(-n // 1024), 3, heads)](table, squares, terms, scores, n, **shape)
    return scores, terms.view(3, heads, n)
