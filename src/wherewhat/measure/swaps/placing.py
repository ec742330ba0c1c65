"""A captured layer's queries as every place sees them: what is needed to put any content at any place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measure.swaps.scores import QueryLogits


def query_logits(attention: LayerAttention, query: int, *, skip: int = 0) -> QueryLogits:
    """The logits of one query with any content at any place before it, for every head.

    Args:
        attention: One layer of a pass over one text without cache, whose keys are made token by token.
        query: Position of the query.
        skip: Leave the first so many keys where they are.

    Raises:
        MeasureError: If the query sees fewer than two keys before it, or heads see different keys.
    """
    heads, groups = attention.heads, attention.heads // attention.kv_heads
    row = slice(query, query + 1)
    keys = places_before(attention, query, skip=skip)
    rot_q = attention.rot_q[0, :, query].double()
    rot_k = attention.rot_k[0].double()
    # In float64: weights enter an exponential divided by τ, and τ is small.
    logits = torch.einsum("kgd,knd->kgn", rot_q.view(-1, groups, rot_q.shape[-1]), rot_k).reshape(heads, -1)
    logits = logits * attention.scale
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    bias = attention.bias(row)
    if bias is not None:
        bias = bias[0, :, 0].expand(heads, -1)
        logits = logits + bias.double()
    weights = attention.weigh(logits[None, :, None], row)[0, :, 0]
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    placed = place(attention.rot_q[0, :, query].to(dtype), attention.rotation, attention.positions[..., keys])
    return QueryLogits(
        contents=attention.k[0][:, keys].to(dtype).repeat_interleave(groups, 0),
        placed=placed * attention.scale,
        logits=logits[:, keys].contiguous(),
        weights=weights[:, keys].contiguous(),
        bias=None if bias is None else bias[:, keys],
        softcap=attention.softcap,
    )


def place(rot_q: Tensor, rotation: Rotation | None, positions: Tensor) -> Tensor:
    """Rotated queries ``(heads, d)`` as keys at ``positions`` ``(n,)`` see them before rotation, ``(heads, n, d)``.

    ``rot_q · rotate(k, p) = place(rot_q)[p] · k`` for every key: the query turned back by p, and rescaled.
    """
    out = rot_q[:, None].repeat(1, positions.shape[-1], 1)
    if rotation is None:
        return out
    pairs = rotation.pairs.to(rot_q.device)
    u, v = out[..., pairs[:, 0]], out[..., pairs[:, 1]]
    theta = rotation.angles(positions.to(rot_q.device)).to(out.dtype)
    cos, sin = theta.cos() * rotation.scaling, theta.sin() * rotation.scaling
    out[..., pairs[:, 0]], out[..., pairs[:, 1]] = u * cos + v * sin, v * cos - u * sin
    return out


def places_before(attention: LayerAttention, query: int, *, skip: int = 0) -> Tensor:
    """Indices of the keys before the query that it sees, ``(n,)``.

    Raises:
        MeasureError: If there are fewer than two, or heads see different keys.
    """
    if attention.rot_q.shape[0] != 1 or attention.n != attention.m:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts and {attention.m} keys for {attention.n} "
            "queries: score one text at a time, without a cache"
        )
    if not 0 <= query < attention.n:
        raise MeasureError(f"there is no query at position {query} of {attention.n} tokens")
    visible = attention.visible(slice(query, query + 1))[0, :, 0]
    if not bool((visible == visible[:1]).all()):
        raise MeasureError(f"heads of layer {attention.layer} see different keys: swaps are not the same for them")
    keys = visible[0, :query].nonzero()[:, 0]
    keys = keys[keys >= skip]
    if len(keys) < 2:
        after = f" after the first {skip}" if skip else ""
        raise MeasureError(
            f"the query at position {query} sees {len(keys)} keys before it{after}: a swap needs two; choose a later "
            "query"
        )
    return keys


def choose_queries(n: int, *, count: int, positions: Sequence[int] = ()) -> list[int]:
    """Positions of queries in a text of ``n`` tokens.

    Args:
        n: Number of tokens.
        count: How many, spread evenly with the last one among them; 0 for all that have two keys before them.
        positions: Given positions instead; negative ones count from the end.

    Raises:
        MeasureError: If a position has fewer than two keys before it or is beyond the text.
    """
    if positions:
        chosen = sorted({p + n if p < 0 else p for p in positions})
        for p in chosen:
            if not 2 <= p < n:
                raise MeasureError(f"a query at position {p} of {n} tokens cannot be scored: 2 to {n - 1} can")
        return chosen
    if n < 3:
        raise MeasureError(f"{n} tokens leave no query with two keys before it: give at least 3")
    if count == 0:
        return list(range(2, n))
    return sorted({max(2, round((i + 1) * n / count) - 1) for i in range(count)})
