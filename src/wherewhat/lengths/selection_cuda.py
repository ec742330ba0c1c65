"""Triton kernels that find the keys with the largest content; imported only on machines with a GPU.

All of them work on the far pairs of a text, a triangle: row t is a query, and sees the keys 0 to t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_LENGTH = tl.constexpr(8.0)
"""Norm of a query's sketch: its entries, and those of keys, are far from the limits of float16."""

_ROUNDING = tl.constexpr(1.25 * 2.0**-10)
"""Bound of the rounding of a product of two sketches, relative to the product of their norms.

Rounding the factors to float16 contributes 2**-10, and sums in float32 much less than the rest.
"""

_UP = tl.constexpr(1 + 2.0**-10)
"""Factor by which the last entry of a sketch grows, so that rounding does not make it smaller."""

_SMALLEST = tl.constexpr(2.0**-8)
"""Squared norm that a sketch is assumed to have at least: entries below the normal range are rounded absolutely."""

_BLOCK = tl.constexpr(16)
"""Keys in a block, and blocks in a tile; block b of a tile has its keys b, b + 16, b + 32, …"""

_TILE = tl.constexpr(256)

_EMPTY = tl.constexpr(-32768)
"""Level of a block without visible keys."""

KEPT = torch.float32
"""Dtype of the rotated keys with which contents are computed; in float16, a few queries in 1,000 choose another key."""

LEVELS = 32000.0
"""Largest level, to which an upper bound of all products is mapped."""


@dataclass(frozen=True)
class Turned:
    """Queries or keys, and the rotation to apply to them when they are read.

    An entry x, with x' that of the other dimension of its plane, becomes ``x (r c + i s) + x' (i c - r s)``.

    Attributes:
        x: Tensor ``(batch, heads, n, d)``.
        cos: c, the cosine of the angle at each token, ``(batch or 1, n or 1, d)`` float32.
        sin: s, its sine, negative in the first dimension of each plane.
        real: r, the real part of a factor on each plane, ``(d,)`` float32.
        imag: i, its imaginary part, negative in the first dimension of each plane.
        partner: The other dimension of each plane, ``(d,)`` int32.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    real: Tensor
    imag: Tensor
    partner: Tensor

    @property
    def angle_strides(self) -> tuple[int, int, int]:
        """Strides of ``cos`` and ``sin``, zero where they are shared."""
        batch, n, _ = self.cos.shape
        strides = self.cos.stride()
        return (strides[0] if batch > 1 else 0, strides[1] if n > 1 else 0, strides[2])


@dataclass(frozen=True)
class Sketch:
    """Queries or keys in few dimensions; a product of two sketches is an upper bound of the product of the originals.

    Attributes:
        parts: Sketches ``(batch * heads, rows, width)`` float16, with rows padded to whole tiles.
        size: Norm of each key's sketch, or the factor by which each query was scaled, ``(batch * heads, rows)``.
    """

    parts: Tensor
    size: Tensor


@triton.jit
def _turn(x, other, cos, sin, real, imag):
    """Rotate entries of queries or keys."""
    return x * (real * cos + imag * sin) + other * (imag * cos - real * sin)


@triton.jit
def _sketch(
    x, cos, sin, real, imag, partner, order, shift, factor, heads, out, size, kept,
    x_strides, angle_strides, listed, kv_heads, group, start, count, padded, d,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the sketches of some rows of one head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.program_id(1).to(tl.int64)
    batch = index // listed
    head = tl.load(heads + index % listed).to(tl.int64)
    source = batch * kv_heads + head // group
    column = tl.arange(0, D)
    inside = (row < count)[:, None] & (column < d)[None, :]
    # Columns are in descending order of their energy.
    dim = tl.load(order + source * d + column, mask=column < d, other=0)
    token = (start + row).to(tl.int64)
    base = x + batch * x_strides[0] + head * x_strides[1] + token[:, None] * x_strides[2]
    y = tl.load(base + dim[None, :] * x_strides[3], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(base + tl.load(partner + dim)[None, :] * x_strides[3], mask=inside, other=0.0).to(tl.float32)
    angle = batch * angle_strides[0] + token[:, None] * angle_strides[1] + dim[None, :] * angle_strides[2]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    y = _turn(y, other, c, s, tl.load(real + dim)[None, :], tl.load(imag + dim)[None, :])
    if KEYS:
        narrow = y.to(kept.dtype.element_ty)
        tl.store(kept + (index * count + row[:, None]) * d + dim[None, :], narrow, mask=inside)
        y = narrow.to(tl.float32) - tl.load(shift + source * d + dim)[None, :]
    y = tl.where(inside, y * tl.load(factor + source * d + dim)[None, :], 0.0)
    total = tl.sum(y * y, 1)
    if not KEYS:
        unit = _LENGTH / tl.sqrt(tl.maximum(total, 1e-30))
        y = y * unit[:, None]
        total = total * unit * unit
    rest = tl.sum(tl.where((column < WIDTH - 1)[None, :], 0.0, y * y), 1)
    bound = tl.sqrt(rest + _ROUNDING * (total + _SMALLEST)) * _UP
    y = tl.where((column == WIDTH - 1)[None, :], bound[:, None], y)
    target = out + (index * padded + row[:, None]) * WIDTH + column[None, :]
    tl.store(target, y.to(tl.float16), mask=(row < padded)[:, None] & (column < WIDTH)[None, :])
    if KEYS:
        tl.store(size + index * count + row, tl.sqrt(total - rest + bound * bound), mask=row < count)
    else:
        tl.store(size + index * count + row, unit, mask=row < count)


@triton.jit
def _tile_maxima(
    part, keys, blocks, tops, base, row, step, t, tile, tiles,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the largest bounds of the blocks of one tile of keys, as levels."""
    key = tile * _TILE + tl.arange(0, _TILE)
    theirs = tl.load(keys + key[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    u = tl.dot(part, theirs)
    if MASKED:
        u = tl.where(key[None, :] <= t[:, None], u, float("-inf"))
    # Keys of a block are 16 apart, so that a thread has all of them in its registers.
    best = tl.max(tl.reshape(u, (ROWS, _BLOCK, _BLOCK)), 1)
    # Levels are above the bounds by at least 0.49.
    level = tl.minimum(tl.maximum(best * step + 32769.5, 1.0), 65535.0)
    level = tl.where(best == float("-inf"), 0.0, level).to(tl.int32) - 32768
    block = tile * _BLOCK + tl.arange(0, _BLOCK)
    tl.store(blocks + (base + row)[:, None] * (tiles * _BLOCK) + block[None, :], level.to(tl.int16))
    tl.store(tops + (base + row) * tiles + tile, tl.max(level, 1).to(tl.int16))


@triton.jit
def _maxima(
    queries, keys, steps, heads, blocks, tops,
    listed, kv_heads, group, start, rows, query_rows, key_rows, tiles,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store the largest bounds of blocks of keys, for some rows of one head and some tiles of keys."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.program_id(1).to(tl.int64)
    head = tl.load(heads + index % listed).to(tl.int64)
    source = index // listed * kv_heads + head // group
    t = start + row
    lowest = start + tl.program_id(0) * ROWS
    begin = tl.program_id(2) * SPLIT
    end = tl.minimum(tl.minimum(begin + SPLIT, (lowest + ROWS + _TILE - 1) // _TILE), tiles)
    whole = tl.minimum((lowest + 1) // _TILE, end)
    if begin < end:
        part = tl.load(queries + (index * query_rows + t)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        step = tl.load(steps + source)
        mine = keys + source * key_rows * WIDTH
        base = index * rows
        for tile in range(begin, whole):
            _tile_maxima(part, mine, blocks, tops, base, row, step, t, tile, tiles, False, WIDTH, ROWS)
        for tile in range(tl.maximum(begin, whole), end):
            _tile_maxima(part, mine, blocks, tops, base, row, step, t, tile, tiles, True, WIDTH, ROWS)


@triton.jit
def _attend_best(
    q, cos, sin, real, imag, seen_real, seen_imag, partner, units, query_parts, key_parts, kept, shift, key_units,
    key_rests, steps, heads, blocks, tops, value, out, lse,
    q_strides, angle_strides, value_strides, out_strides, lse_strides,
    listed, kv_heads, group, first, query_start, start, rows, count, query_rows, key_rows, tiles, top, scale, d,
    WIDTH: tl.constexpr, TILES: tl.constexpr, TOP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Find the keys of one query by their content, best bound first, and add them to its output."""
    row = tl.program_id(0)
    t = start + row
    index = tl.program_id(1).to(tl.int64)
    batch = index // listed
    head = tl.load(heads + index % listed).to(tl.int64)
    kv = head // group
    source = batch * kv_heads + kv
    dim = tl.arange(0, D)
    real_dim = dim < d
    token = (query_start + t).to(tl.int64)
    base = q + batch * q_strides[0] + head * q_strides[1] + token * q_strides[2]
    x = tl.load(base + dim * q_strides[3], mask=real_dim, other=0.0).to(tl.float32)
    pair = tl.load(partner + dim, mask=real_dim, other=0)
    other = tl.load(base + pair * q_strides[3], mask=real_dim, other=0.0).to(tl.float32)
    angle = batch * angle_strides[0] + token * angle_strides[1] + dim * angle_strides[2]
    c = tl.load(cos + angle, mask=real_dim, other=0.0)
    s = tl.load(sin + angle, mask=real_dim, other=0.0)
    r = tl.load(real + dim, mask=real_dim, other=0.0)
    i = tl.load(imag + dim, mask=real_dim, other=0.0)
    # Contents are compared in units of the sketches, relative to the mean key.
    unit = tl.load(units + index * count + t) * tl.load(key_units + source)
    content = _turn(x, other, c, s, r, i) * unit
    mean = tl.load(shift + source * d + dim, mask=real_dim, other=0.0)
    width = tl.arange(0, WIDTH)
    part = tl.load(query_parts + (index * query_rows + t) * WIDTH + width).to(tl.float32)
    theirs = key_parts + source * key_rows * WIDTH
    exact_keys = kept + source * count * d
    height = 1.0 / tl.load(steps + source)

    slot = tl.arange(0, _BLOCK)
    tile_lane = tl.arange(0, TILES)
    lane = tl.arange(0, TOP)
    best = tl.where(lane < top, tl.full([TOP], float("-inf"), tl.float32), float("inf"))
    chosen = tl.full([TOP], -1, tl.int32)
    bar = tl.min(best, 0)
    # A block is known by 16 times its level, and its index: no two blocks of a tile have the same number. The state of
    # a tile is the largest number that its next block can have.
    at_row = index * rows + row
    state = tl.load(tops + at_row * tiles + tile_lane, mask=tile_lane <= t // _TILE, other=_EMPTY).to(tl.int32)
    state = state * _BLOCK + (_BLOCK - 1)
    # As many tiles as keys are chosen have a key with this bound or a larger one, and no content is further below its
    # bound than twice the product of the last entries of the sketches.
    rest = state
    for _ in range(1, top):
        highest = tl.max(rest, 0)
        same = tl.min(tl.where(rest == highest, tile_lane, TILES), 0)
        rest = tl.where(tile_lane == same, _EMPTY * _BLOCK, rest)
    reached = tl.max(rest, 0) >> 4
    slack = 2.0 * tl.load(key_rests + source) * tl.sum(tl.where(width == WIDTH - 1, part, 0.0), 0)
    floor = tl.where(reached == _EMPTY, float("-inf"), (reached - 2).to(tl.float32) * height - slack)

    highest = tl.max(state, 0)
    bound = tl.where(highest >> 4 == _EMPTY, float("-inf"), (highest >> 4).to(tl.float32) * height)
    while bound > tl.maximum(bar, floor):
        tile = tl.min(tl.where(state == highest, tile_lane, TILES), 0)
        level = tl.load(blocks + at_row * (tiles * _BLOCK) + tile * _BLOCK + slot).to(tl.int32)
        number = level * _BLOCK + (_BLOCK - 1) - slot
        current = tl.max(tl.where(number <= highest, number, _EMPTY * _BLOCK), 0)
        block = (_BLOCK - 1) - (current & (_BLOCK - 1))
        following = tl.max(tl.where(number < current, number, _EMPTY * _BLOCK), 0)
        state = tl.where(tile_lane == tile, following, state)
        key = tile * _TILE + block + _BLOCK * slot
        sketch = tl.load(theirs + key[:, None] * WIDTH + width[None, :]).to(tl.float32)
        u = tl.where(key <= t, tl.sum(sketch * part[None, :], 1), float("-inf"))
        largest = tl.max(u, 0)
        while largest > tl.maximum(bar, floor):
            place = tl.min(tl.where(u == largest, slot, _BLOCK), 0)
            candidate = tile * _TILE + block + _BLOCK * place
            k = tl.load(exact_keys + candidate * d + dim, mask=real_dim, other=0.0).to(tl.float32)
            exact = tl.sum((k - mean) * content, 0)
            worst = tl.min(tl.where(best == bar, lane, TOP), 0)
            enters = (lane == worst) & (exact > bar)
            best = tl.where(enters, exact, best)
            chosen = tl.where(enters, candidate, chosen)
            bar = tl.min(best, 0)
            u = tl.where(slot == place, float("-inf"), u)
            largest = tl.max(u, 0)
        highest = tl.max(state, 0)
        bound = tl.where(highest >> 4 == _EMPTY, float("-inf"), (highest >> 4).to(tl.float32) * height)

    r = tl.load(seen_real + dim, mask=real_dim, other=0.0)
    i = tl.load(seen_imag + dim, mask=real_dim, other=0.0)
    seen = _turn(x, other, c, s, r, i)
    there = chosen >= 0
    inside = there[:, None] & real_dim[None, :]
    k = tl.load(exact_keys + chosen[:, None] * d + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(there, tl.sum(k * seen[None, :], 1) * scale, float("-inf"))
    at_values = value + batch * value_strides[0] + kv * value_strides[1]
    at_values += (first + chosen).to(tl.int64)[:, None] * value_strides[2] + dim[None, :] * value_strides[3]
    values = tl.load(at_values, mask=inside, other=0.0).to(tl.float32)
    near_lse = tl.load(lse + batch * lse_strides[0] + head * lse_strides[1] + token * lse_strides[2])
    target = out + batch * out_strides[0] + head * out_strides[1] + token * out_strides[2] + dim * out_strides[3]
    near = tl.load(target, mask=real_dim, other=0.0).to(tl.float32)
    most = tl.maximum(near_lse, tl.max(scores, 0))
    weights = tl.exp(scores - most)
    mine = tl.exp(near_lse - most)
    result = (near * mine + tl.sum(values * weights[:, None], 0)) / (mine + tl.sum(weights, 0))
    tl.store(target, result.to(out.dtype.element_ty), mask=real_dim)


_SKETCH_ROWS = 32
_QUERY_ROWS, _KEY_ROWS, _WARPS, _STAGES = 128, 256, 8, 3
_SPLIT = 32
"""Tiles of keys of one program: enough programs that all processors have work until the end."""


def sketches(
    turned: Turned,
    *,
    heads: Tensor,
    group: int,
    order: Tensor,
    factor: Tensor,
    start: int,
    count: int,
    width: int,
    shift: Tensor | None = None,
) -> tuple[Sketch, Tensor]:
    """Compute sketches of queries, or of keys if ``shift`` is given.

    Args:
        turned: Queries or keys, and how they are rotated.
        heads: Heads for which to compute them, ``(listed,)`` int32.
        group: Number of these heads that share one row of ``order``, ``factor`` and ``shift``.
        order: Dimensions in descending order of their energy, ``(batch * kv_heads, d)`` int32.
        factor: Factor on each dimension, ``(batch * kv_heads, d)`` float32.
        start: First token.
        count: Number of tokens.
        width: Dimensions of the sketches, a power of two.
        shift: Mean key, which is subtracted, of the same shape as ``factor``; None for queries.

    Returns:
        The sketches, and the rotated keys ``(batch * listed, count, d)``, empty for queries.
    """
    x = turned.x
    batch, all_heads, _, d = x.shape
    listed, kv_heads = len(heads), all_heads // group
    padded = triton.cdiv(count, _KEY_ROWS) * _KEY_ROWS
    parts = torch.empty(batch * listed, padded, width, dtype=torch.float16, device=x.device)
    size = torch.empty(batch * listed, count, dtype=torch.float32, device=x.device)
    kept = torch.empty(0 if shift is None else batch * listed, count, d, dtype=KEPT, device=x.device)
    tensors = (order, factor if shift is None else shift, factor, heads, parts, size, kept)
    _sketch[triton.cdiv(padded, _SKETCH_ROWS), batch * listed](
        x, turned.cos, turned.sin, turned.real, turned.imag, turned.partner, *tensors,
        x.stride(), turned.angle_strides, listed, kv_heads, group, start, count, padded, d,
        KEYS=shift is not None, WIDTH=width, ROWS=_SKETCH_ROWS, D=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
    return Sketch(parts, size), kept


def block_maxima(
    queries: Sketch, keys: Sketch, steps: Tensor, *, heads: Tensor, kv_heads: int, group: int, start: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Compute the largest bounds of blocks of 16 keys and of tiles of 256.

    Args:
        queries: Sketches of the queries of the listed heads.
        keys: Sketches of the keys of all key heads.
        steps: Levels per unit of a product of sketches, ``(batch * kv_heads,)``.
        heads: The listed heads, ``(listed,)`` int32.
        kv_heads: Number of key heads.
        group: Number of query heads that share a key head.
        start: First row.
        rows: Number of rows, a multiple of 128 within the padded ones.

    Returns:
        Levels ``(batch * listed, rows, tiles, 16)`` and ``(batch * listed, rows, tiles)``, int16; tiles without visible
        keys are left uninitialised.
    """
    many, query_rows, width = queries.parts.shape
    tiles = min(triton.cdiv(start + rows, _KEY_ROWS), keys.parts.shape[1] // _KEY_ROWS)
    blocks = torch.empty(many, rows, tiles, 16, dtype=torch.int16, device=steps.device)
    tops = torch.empty(many, rows, tiles, dtype=torch.int16, device=steps.device)
    _maxima[rows // _QUERY_ROWS, many, triton.cdiv(tiles, _SPLIT)](
        queries.parts, keys.parts, steps, heads, blocks, tops,
        len(heads), kv_heads, group, start, rows, query_rows, keys.parts.shape[1], tiles,
        WIDTH=width, ROWS=_QUERY_ROWS, SPLIT=_SPLIT, num_warps=_WARPS, num_stages=_STAGES if width < 128 else 2,
    )  # fmt: skip
    return blocks, tops


@dataclass(frozen=True)
class Search:
    """Tensors of a layer whose queries look for far keys.

    Attributes:
        queries: Queries as they are compared with keys.
        seen: Factor on each plane with which chosen keys are seen, as ``real`` and ``imag`` of :class:`Turned`.
        value: Values ``(batch, kv_heads, n, d)``.
        heads: The listed heads, ``(listed,)`` int32.
        first: First token that is a far key.
        window: Distance from which on a key is far.
        top: Number of keys to choose.
        scale: Factor on dot products.
        query_parts: Sketches of queries.
        key_parts: Sketches of keys.
        keys: Rotated keys ``(batch * kv_heads, count, d)``.
        shift: Mean key, ``(batch * kv_heads, d)``.
        key_units: Factor in the sketches of keys, ``(batch * kv_heads,)``.
        key_rests: Largest last entry of the sketches of keys, ``(batch * kv_heads,)`` float32.
        steps: See :func:`block_maxima`.
    """

    queries: Turned
    seen: tuple[Tensor, Tensor]
    value: Tensor
    heads: Tensor
    first: int
    window: int
    top: int
    scale: float
    query_parts: Sketch
    key_parts: Sketch
    keys: Tensor
    shift: Tensor
    key_units: Tensor
    key_rests: Tensor
    steps: Tensor


def add_best(search: Search, out: Tensor, lse: Tensor, *, start: int, rows: int) -> None:
    """Add the far keys with the largest content to the output of some rows, in place.

    Args:
        search: The layer.
        out: Output ``(batch, heads, n, d)`` over the keys near each query.
        lse: Its log-sum-exp ``(batch, heads, n)``, float32; it stays as it is.
        start: First row, counted from the first query with a far key; a multiple of 128.
        rows: Number of rows.
    """
    q, value, turned = search.queries.x, search.value, search.queries
    batch, heads, _, d = q.shape
    kv_heads, count = value.shape[1], search.keys.shape[1]
    group, listed = heads // kv_heads, len(search.heads)
    padded = triton.cdiv(rows, _QUERY_ROWS) * _QUERY_ROWS
    blocks, tops = block_maxima(
        search.query_parts, search.key_parts, search.steps,
        heads=search.heads, kv_heads=kv_heads, group=group, start=start, rows=padded,
    )  # fmt: skip
    query_rows, width = search.query_parts.parts.shape[1:]
    key_rows = search.key_parts.parts.shape[1]
    all_tiles = triton.next_power_of_2(key_rows // _KEY_ROWS)
    _attend_best[rows, batch * listed](
        q, turned.cos, turned.sin, turned.real, turned.imag, *search.seen, turned.partner, search.query_parts.size,
        search.query_parts.parts, search.key_parts.parts, search.keys, search.shift, search.key_units,
        search.key_rests, search.steps, search.heads, blocks, tops, value, out, lse,
        q.stride(), turned.angle_strides, value.stride(), out.stride(), lse.stride(),
        listed, kv_heads, group, search.first, search.first + search.window, start, padded, count, query_rows, key_rows,
        tops.shape[-1], search.top, search.scale, d,
        WIDTH=width, TILES=all_tiles, TOP=triton.next_power_of_2(search.top), D=triton.next_power_of_2(d),
        num_warps=1 if all_tiles <= 1024 else 4,
    )  # fmt: skip
