"""Triton kernels of length methods; imported only on machines with a GPU."""

from __future__ import annotations

from dataclasses import dataclass

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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
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
    if FAR and start + chunk * size + (tl.program_id(0) + 1) * ROWS > window:
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
    _merge[triton.cdiv(size, _ROWS), heads, batch * chunks](
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
