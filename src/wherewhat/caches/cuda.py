"""Triton kernels of length methods; imported only on machines with a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_REVERSED_ROWS = 64


@triton.jit
def _reverse(x, out, strides, out_strides, chunks, heads, size, d, ROWS: tl.constexpr, D: tl.constexpr):
    """Reverse some rows of one head in one chunk."""
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
    """Return a copy of ``x`` ``(batch, chunks, heads, rows, d)`` with its rows in reverse order."""
    batch, chunks, heads, size, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(size, _REVERSED_ROWS), batch * chunks * heads)
    sizes = {"ROWS": _REVERSED_ROWS, "D": triton.next_power_of_2(d)}
    _reverse[grid](x, out, x.stride(), out.stride(), chunks, heads, size, d, **sizes, num_warps=4)
    return out


_ROWS, _WARPS = 64, 4


@dataclass(frozen=True)
class FarTensors:
    """The few keys beyond the window, and the queries that see them.

    Attributes:
        q: Rotated queries, ``(batch, heads, n, d)``.
        cos: Cosine of the angle by which each query is rotated, ``(n, d)`` or ``(batch, n, d)``; None for no rotation.
        sin: Its sine.
        keys: Keys rotated to their positions, ``(batch, kv_heads, c, d)`` float16.
        turned: Keys rotated by 90°; None like ``cos``.
        value: Their values, ``(batch, kv_heads, c, d)``.
        window: Keys at a smaller distance are not far.
    """

    q: Tensor
    cos: Tensor | None
    sin: Tensor | None
    keys: Tensor
    turned: Tensor | None
    value: Tensor
    window: int


@triton.jit
def _merge(
    own, own_lse, back, back_lse, q, cos, sin, keys, turned, value, out, lse,
    own_strides, own_lse_strides, back_strides, back_lse_strides, q_strides, turn_strides, key_strides, turned_strides,
    value_strides, out_strides, lse_strides,
    chunks, size, n, first, start, window, count, group, scale, d,
    BACK: tl.constexpr, FAR: tl.constexpr, TURN: tl.constexpr, LSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge some rows of one head in one chunk."""
    # Heads first: programs that run at the same time read the same cosines and sines.
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    batch, chunk = (tl.program_id(2) // chunks).to(tl.int64), (tl.program_id(2) % chunks).to(tl.int64)
    token = start + chunk * size + row
    here = (row < size) & (token < n)
    dim = tl.arange(0, D)
    inside = here[:, None] & (dim < d)[None, :]
    near = own + batch * own_strides[0] + chunk * own_strides[1] + head * own_strides[2]
    total = tl.load(near + row[:, None] * own_strides[3] + dim * own_strides[4], mask=inside, other=0.0).to(tl.float32)
    near_lse = own_lse + batch * own_lse_strides[0] + chunk * own_lse_strides[1] + head * own_lse_strides[2]
    top = tl.load(near_lse + row * own_lse_strides[3], mask=here, other=0.0)
    weight = tl.full([ROWS], 1.0, tl.float32)
    if BACK and chunk >= first:
        # Row r is at index size - 2 - r; the last row sees nothing of the chunk before.
        reverse = size - 2 - row
        there = here & (reverse >= 0)
        behind = back + batch * back_strides[0] + (chunk - first) * back_strides[1] + head * back_strides[2]
        other = tl.load(
            behind + reverse[:, None] * back_strides[3] + dim * back_strides[4],
            mask=there[:, None] & (dim < d)[None, :],
            other=0.0,
        ).to(tl.float32)
        behind_lse = back_lse + batch * back_lse_strides[0] + (chunk - first) * back_lse_strides[1]
        behind_lse += head * back_lse_strides[2]
        other_top = tl.load(behind_lse + reverse * back_lse_strides[3], mask=there, other=float("-inf"))
        highest = tl.maximum(top, other_top)
        mine, others = tl.exp(top - highest), tl.exp(other_top - highest)
        total = total * mine[:, None] + other * others[:, None]
        weight = mine + others
        top = highest
    if FAR and start + chunk * size + (tl.program_id(1) + 1) * ROWS > window:
        column = tl.arange(0, COLUMNS)
        known = (column < count)[:, None] & (dim < d)[None, :]
        asking = q + batch * q_strides[0] + head * q_strides[1]
        query = tl.load(asking + token[:, None] * q_strides[2] + dim * q_strides[3], mask=inside, other=0.0)
        query = query.to(tl.float32)
        kv = head // group
        there_keys = keys + batch * key_strides[0] + kv * key_strides[1]
        far = tl.load(there_keys + column[:, None] * key_strides[2] + dim * key_strides[3], mask=known, other=0.0)
        if TURN:
            angle = batch * turn_strides[0] + token[:, None] * turn_strides[1] + dim * turn_strides[2]
            turned_query = query * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
            scores = tl.dot(turned_query.to(tl.float16), tl.trans(far))
            there_keys = turned + batch * turned_strides[0] + kv * turned_strides[1]
            far = tl.load(
                there_keys + column[:, None] * turned_strides[2] + dim * turned_strides[3], mask=known, other=0.0
            )
            turned_query = query * tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
            scores += tl.dot(turned_query.to(tl.float16), tl.trans(far))
        else:
            scores = tl.dot(query.to(tl.float16), tl.trans(far))
        seen = (token[:, None] - column[None, :] >= window) & (column < count)[None, :]
        scores = tl.where(seen, scores * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        mine, weights = tl.exp(top - highest), tl.exp(scores - highest[:, None])
        there_values = value + batch * value_strides[0] + kv * value_strides[1]
        values = tl.load(
            there_values + column[:, None] * value_strides[2] + dim * value_strides[3], mask=known, other=0.0
        )
        total = total * mine[:, None] + tl.dot(weights.to(values.dtype), values)
        weight = weight * mine + tl.sum(weights, 1)
        top = highest
    if LSE:
        sums = lse + batch * lse_strides[0] + head * lse_strides[1] + token * lse_strides[2]
        tl.store(sums, top + tl.log(weight), mask=here)
    target = out + batch * out_strides[0] + head * out_strides[1]
    result = total / weight[:, None]
    tl.store(
        target + token[:, None] * out_strides[2] + dim * out_strides[3], result.to(out.dtype.element_ty), mask=inside
    )


def merge_parts(
    out: Tensor,
    own: tuple[Tensor, Tensor],
    back: tuple[Tensor, Tensor] | None,
    far: FarTensors | None,
    *,
    start: int,
    scale: float,
    lse: Tensor | None = None,
) -> None:
    """Write rows of the output from attention to parts of the keys.

    Args:
        out: Output ``(batch, heads, n, d)``; rows from ``start`` on, as many as the chunks have, are written.
        own: Attention of each query to its own chunk ``(batch, chunks, heads, size, d)``, and its log-sum-exp.
        back: Attention to the chunk before, ``(batch, chunks or one less, heads, size - 1, d)`` with rows in reverse
            order; where there is one less, the first chunk has none before it. None if no chunk has.
        far: The keys beyond the window; None for none.
        start: First row.
        scale: Factor on dot products.
        lse: Tensor ``(batch, heads, n)`` float32 for the log-sum-exp of the logits; None to leave it out.
    """
    attended, own_lse = own
    batch, chunks, heads, size, d = attended.shape
    behind, behind_lse = own if back is None else back
    columns = 16 if far is None else max(16, triton.next_power_of_2(far.keys.shape[2]))
    turn = far is not None and far.cos is not None
    nothing = attended
    q, keys, value = (nothing,) * 3 if far is None else (far.q, far.keys, far.value)
    cos, sin, turned = (nothing,) * 3
    if far is not None and far.cos is not None and far.sin is not None and far.turned is not None:
        cos, sin, turned = far.cos, far.sin, far.turned
    turn_strides = (cos.stride(0) if cos.ndim == 3 else 0, *cos.stride()[-2:])
    sums = torch.empty(1, 1, 1, device=out.device) if lse is None else lse
    tensors = (attended, own_lse, behind, behind_lse, q, cos, sin, keys, turned, value, out, sums)
    strides = (*(x.stride() for x in tensors[:5]), turn_strides, *(x.stride() for x in tensors[7:]))
    window, count, group = (0, 0, 1) if far is None else (far.window, keys.shape[2], heads // keys.shape[1])
    sizes = (chunks, size, out.shape[2], chunks - behind.shape[1], start, window, count, group, scale, d)
    shapes = {"ROWS": _ROWS, "COLUMNS": columns, "D": triton.next_power_of_2(d)}
    _merge[heads, triton.cdiv(size, _ROWS), batch * chunks](
        *tensors,
        *strides,
        *sizes,
        BACK=back is not None,
        FAR=far is not None,
        TURN=turn,
        LSE=lse is not None,
        **shapes,
        num_warps=_WARPS,
    )


_SPLITS = 64
"""Largest number of programs among which the keys of one group are divided."""

_SHORTEST = 256
"""Smallest number of keys of such a program."""

_COLUMNS = 128
"""Largest number of keys that it reads at a time."""


# Values that change from token to token must not select another version of the kernel.
@triton.jit(
    do_not_specialize=[
        "q", "k", "v", "scale", "stored", "slots", "count", "ring_slots", "ring_count", "ring_slot", "chunk",
    ]
)  # fmt: skip
def _decode(
    q, k, v, all_keys, all_values, ring_keys, ring_values, places, parts, out,
    scale, stored, slots, count, ring_slots, ring_count, ring_slot, chunk,
    SIZE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attend from one token's queries of a group to some of its keys; the last program of a group merges all."""
    split, group, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, groups = tl.num_programs(0), tl.num_programs(1)
    place = tl.load(places + group)
    if place < stored:
        base = (batch * stored + place).to(tl.int64) * slots * d
        keys, values = all_keys + base, all_values + base
        length, slot = count, count - 1
    else:
        base = (batch * (groups - stored) + place - stored).to(tl.int64) * ring_slots * d
        keys, values = ring_keys + base, ring_values + base
        length, slot = ring_count, ring_slot
    first = split * chunk
    if first >= length:
        return
    last = tl.minimum(first + chunk, length)
    row, dim = tl.arange(0, ROWS), tl.arange(0, D)
    wide = dim < d
    inside = (row < SIZE)[:, None] & wide[None, :]
    pair = batch * groups + group
    head = pair * SIZE + row
    query = tl.load(q + head[:, None] * d + dim[None, :], mask=inside, other=0.0)
    # The new key is not read from the buffer, into which one program writes it while others read.
    key = tl.load(k + pair * d + dim, mask=wide, other=0.0)
    value = tl.load(v + pair * d + dim, mask=wide, other=0.0)
    new = (slot >= first) & (slot < last)
    if new:
        tl.store(keys + slot * d + dim, key, mask=wide)
        tl.store(values + slot * d + dim, value, mask=wide)
    own = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    top = tl.where(new, own, float("-inf"))
    weight = tl.zeros([ROWS], tl.float32) + new.to(tl.float32)
    total = tl.zeros([ROWS, D], tl.float32) + tl.where(new, value.to(tl.float32), 0.0)[None, :]
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = (token < last) & (token != slot)
        stored_here = seen[:, None] & wide[None, :]
        cells = token[:, None] * d + dim[None, :]
        scores = tl.dot(query, tl.trans(tl.load(keys + cells, mask=stored_here, other=0.0))) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        mine, weights = tl.exp(top - highest), tl.exp(scores - highest[:, None])
        block = tl.load(values + cells, mask=stored_here, other=0.0)
        total = total * mine[:, None] + tl.dot(weights.to(block.dtype), block)
        weight = weight * mine + tl.sum(weights, 1)
        top = highest
    lses = parts + tl.num_programs(2) * groups * SIZE * splits * d
    tl.store(parts + (head * splits + split)[:, None] * d + dim[None, :], total / weight[:, None], mask=inside)
    tl.store(lses + head * splits + split, top + tl.log(weight), mask=row < SIZE)
    # All threads have stored their part before one of them counts it.
    tl.debug_barrier()
    used = tl.cdiv(length, chunk)
    if tl.atomic_add(places + groups + pair, 1) == used - 1:
        tl.store(places + groups + pair, 0)
        for index in range(SIZE):
            _merge_splits(parts, lses, out, pair * SIZE + index, splits, used, SPLITS, d, D)


@triton.jit
def _merge_splits(parts, lses, out, head, splits, used, SPLITS: tl.constexpr, d: tl.constexpr, D: tl.constexpr):
    """Write the output of one head from its parts, which other programs wrote: not read through this one's cache."""
    split, dim = tl.arange(0, SPLITS), tl.arange(0, D)
    there, wide = split < used, dim < d
    lse = tl.load(lses + head * splits + split, mask=there, other=float("-inf"), cache_modifier=".cg")
    weights = tl.exp(lse - tl.max(lse, 0))
    part = tl.load(
        parts + (head * splits + split)[:, None] * d + dim[None, :],
        mask=there[:, None] & wide[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    merged = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + head * d + dim, merged.to(out.dtype.element_ty), mask=wide)


class Decoder:
    """Computes the attention of single tokens of one layer, and stores their keys and values, in one kernel.

    Keys of a group are divided among programs, whose outputs are merged by their log-sum-exp (Dao et al.,
    "Flash-Decoding for long-context inference", 2023). Use it from one stream at a time.

    Args:
        stored: Key heads of which all keys are stored.
        ring: The other key heads.
        q: Queries ``(batch, heads, 1, d)``; others have the same shape, dtype and device.
    """

    def __init__(self, stored: tuple[int, ...], ring: tuple[int, ...], q: Tensor) -> None:
        self.batch, heads, _, d = q.shape
        order = (*stored, *ring)
        self._stored, self._groups, size = len(stored), len(order), heads // len(order)
        width = triton.next_power_of_2(d)
        rows = max(16, triton.next_power_of_2(size))
        self._sizes = (size, rows, _SPLITS, min(_COLUMNS, 8192 // width), d, width)
        self._compiled: Any = None
        self.scratch = self.batch * heads * _SPLITS * (d + 1)
        """Size of the scratch memory."""
        # Where the keys of each group are, and counters of its finished programs.
        places = [order.index(group) for group in range(len(order))] + [0] * (self.batch * len(order))
        self._places = torch.tensor(places, dtype=torch.int32, device=q.device)

    def __deepcopy__(self, _: Any) -> Decoder:
        """Return the same object, for copies of a cache: it holds no keys, and a compiled kernel cannot be copied."""
        return self

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: Sequence[Tensor],
        ring: Sequence[Tensor],
        scratch: Tensor,
        *,
        count: int,
        slot: int,
        scale: float,
    ) -> Tensor:
        """Return the output ``(batch, 1, heads, d)`` of one token, the last that it sees.

        Args:
            q: Its queries ``(batch, heads, 1, d)``.
            k: Its keys ``(batch, kv_heads, 1, d)``.
            v: Its values.
            whole: Keys and values of key heads of which all are stored, ``(batch, stored heads, slots, d)``; or empty.
            ring: Keys and values of the other key heads, ``(batch, other heads, slots, d)``; or empty.
            scratch: Memory ``(at least self.scratch,)`` float32 that is overwritten.
            count: Number of tokens, this one included.
            slot: Its slot in the ring.
            scale: Factor on dot products.
        """
        batch, heads, _, d = q.shape
        whole, ring = whole or ring, ring or whole
        ring_slots = ring[0].size(2)
        ring_count = min(count, ring_slots)
        longest = count if self._stored else ring_count
        chunk = max(_SHORTEST, -(-longest // (_SPLITS * _COLUMNS)) * _COLUMNS)
        splits = -(-longest // chunk)
        out = q.new_empty((batch, 1, heads, d))
        tensors = (q.contiguous(), k.contiguous(), v.contiguous(), *whole, *ring, self._places, scratch, out)
        numbers = (scale, self._stored, whole[0].size(2), count, ring_slots, ring_count, slot, chunk)
        grid = (splits, self._groups, batch)
        if self._compiled is None:
            self._compiled = _decode[grid](*tensors, *numbers, *self._sizes, num_warps=4, num_stages=2)
        else:  # without the search for a compiled kernel, which takes longer than its launch
            self._compiled[grid](*tensors, *numbers, *self._sizes)
        return out
