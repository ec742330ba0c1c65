"""Attention over several sets of keys with one softmax, and the choice of far keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError


@dataclass(frozen=True)
class Part:
    """Some keys as some queries see them.

    Attributes:
        q: Queries placed for these keys, ``(batch, heads, rows, d)``.
        k: Keys placed for these queries, ``(batch, kv_heads, c, d)``.
        keys: Which keys they are, a slice or indices ``(c,)``.
        allowed: True where the rule lets a query see a key, broadcastable to ``(batch, 1, rows, c)``.
    """

    q: Tensor
    k: Tensor
    keys: slice | Tensor
    allowed: Tensor


def attend_parts(attention: LayerAttention, rows: slice, parts: Sequence[Part]) -> Tensor:
    """Output ``(batch, rows, heads, d_v)`` of one softmax over the keys of all parts.

    The layer's own mask, bias, soft-cap and sink column stay in force. A pair must be allowed in one part at most.
    """
    scores = torch.cat([part_scores(attention, rows, part) for part in parts], -1)
    columns = scores.shape[-1]
    if attention.sinks is not None:
        sink = attention.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    # Rows that see nothing give 0/0; models leave such rows at zero.
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :columns]
    value = torch.cat([attention.value[:, :, part.keys] for part in parts], 2).to(scores.dtype)
    batch, heads, count, _ = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, columns) @ value
    return grouped.view(batch, heads, count, -1).transpose(1, 2)


def placed(attention: LayerAttention, x: Tensor, at: Tensor, to: Tensor, *, rotation: Rotation | None = None) -> Tensor:
    """Rotated queries or keys moved to other positions, in float32 at least.

    Args:
        attention: Their layer.
        x: Tensor ``(batch, heads, c, d)`` as the layer rotated it.
        at: Indices of the tokens, ``(c,)``.
        to: Positions to move them to, ``(c,)``.
        rotation: Rotate anew by this instead of by the layer's own.
    """
    own = attention.rotation
    if own is None:
        return x.to(working(attention))
    positions = attention.positions[..., at]
    before = own.unrotate(x, positions if positions.ndim == 1 else positions[:, None])
    return (rotation or own).rotate(before, to)


def working(attention: LayerAttention) -> torch.dtype:
    """Precision of the logits: float32 at least."""
    return torch.promote_types(attention.rot_q.dtype, torch.float32)


def only_causal(attention: LayerAttention) -> bool:
    """Whether queries see exactly themselves and what is before, with nothing else done to the logits."""
    plain = attention.softcap is None and attention.sinks is None
    return plain and attention.mask.only_causal and attention.n == attention.m


def check_unpadded(attention: LayerAttention) -> None:
    """Refuse texts in which the index of a key is not its place in the text."""
    steps = attention.positions.diff(dim=-1)
    if bool((steps != 1).any()):
        raise MeasureError(
            "positions do not go up one by one: length methods count keys, so give one text per row without padding"
        )
    if attention.mask.added or attention.mask.hidden or attention.mask.visible_only:
        first = slice(0, 1) if attention.declared_window is None else slice(attention.m - attention.n, None)
        if not bool(_seen(attention, slice(0, 1), first).visible(slice(None), 1, 1)[..., 0, 0].all()):
            raise MeasureError("the first key is hidden: length methods count keys, so give texts without left padding")


def part_scores(attention: LayerAttention, rows: slice, part: Part) -> Tensor:
    """Logits ``(batch, heads, rows, c)`` of one part, -inf where a key is not seen."""
    dtype = working(attention)
    q, k = part.q.to(dtype), part.k.to(dtype)
    batch, heads, count, d = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, d) @ k.transpose(-1, -2)
    scores = grouped.view(batch, heads, count, -1) * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    mask, columns = _seen(attention, rows, part.keys), scores.shape[-1]
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (attention.m - attention.n)
    j = torch.arange(attention.m, device=q.device)[part.keys]
    visible = mask.visible(slice(None), count, columns) & part.allowed & (j <= i)
    if attention.mask.window is not None:
        visible = visible & (i - j < attention.mask.window)
    bias = mask.bias(slice(None), count, columns)
    if bias is not None:
        scores = scores + bias.to(dtype)
    return scores.masked_fill(~visible, -torch.inf)


def _seen(attention: LayerAttention, rows: slice, keys: slice | Tensor) -> Mask:
    """The terms of the layer's mask for some queries and keys; order and window are the caller's affair."""
    mask = attention.mask

    def cut(terms: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(_cut(term, rows, keys, attention.m) for term in terms)

    return replace(
        mask,
        causal=False,
        window=None,
        added=cut(mask.added),
        hidden=cut(mask.hidden),
        visible_only=cut(mask.visible_only),
    )


def _cut(term: Tensor, rows: slice, keys: slice | Tensor, m: int) -> Tensor:
    while term.ndim < 4:
        term = term.unsqueeze(0)
    term = term if term.shape[-2] == 1 else term[..., rows, :]
    return term if term.shape[-1] == 1 else term[..., :m][..., keys]


Choice = Callable[[Tensor, slice], Tensor]
"""Of queries ``(batch, heads, rows, d)`` placed for the far keys: the blocks or keys each of them may see."""


@dataclass(frozen=True)
class Far:
    """The first keys of a text as seen from beyond the window.

    Attributes:
        count: How many of the first keys can be seen from beyond the window.
        query: Position from which a query looks at them, from its index ``(rows,)``.
        key: Position at which a key stands then, from its index ``(c,)``.
        choose: Keys that single queries may see, ``(batch, rows, count)`` bool, from the placed queries and the rows;
            None for all.
    """

    count: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    choose: Choice | None = None


def capped(count: int, window: int) -> Far:
    """The first keys, all at distance ``window``."""
    return Far(count=count, query=lambda i: torch.full_like(i, window), key=torch.zeros_like)


def far_keys(attention: LayerAttention, far: Far) -> Tensor:
    """The first keys where the far queries see them, ``(batch, kv_heads, count, d)``."""
    j = torch.arange(min(far.count, attention.m), device=attention.rot_k.device)
    return placed(attention, attention.rot_k[:, :, : len(j)], j, far.key(j))


def blocks(attention: LayerAttention, keys: int, *, block_mib: int, most: int | None = None) -> Iterator[slice]:
    """Blocks of queries whose logits over ``keys`` keys fit into some MiB."""
    batch, heads, n = attention.rot_q.shape[:3]
    width = torch.finfo(working(attention)).bits // 8
    rows = max(1, block_mib * 2**20 // (width * batch * heads * max(1, keys)))
    rows = rows if most is None else min(rows, most)
    for start in range(0, n, rows):
        yield slice(start, min(n, start + rows))
