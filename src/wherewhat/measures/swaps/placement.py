"""Logits of a query with any key at any position, and swap scores computed by running every swap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.scores import QueryLogits
from wherewhat.measures.tensors import check_single_text, per_query_head


def query_logits(attention: LayerAttention, query: int, *, skip: int = 0) -> QueryLogits:
    """Return the logits of one query with any key at any position before it, for every head.

    Args:
        attention: One layer of a pass over one text without cache, whose keys each depend on one token.
        query: Position of the query.
        skip: Number of first keys that are never swapped.
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
        contents=per_query_head(attention.k[0][:, keys].to(dtype), attention),
        placed=placed * attention.scale,
        logits=logits[:, keys].contiguous(),
        weights=weights[:, keys].contiguous(),
        bias=None if bias is None else bias[:, keys],
        softcap=attention.softcap,
    )


def place(rot_q: Tensor, rotation: Rotation | None, positions: Tensor) -> Tensor:
    """Return rotated queries ``(heads, d)`` rotated back by each of ``positions`` ``(n,)``, ``(heads, n, d)``.

    ``rot_q · rotate(k, p) = place(rot_q)[p] · k`` for every key k before rotation.
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
    """Return the indices of the visible keys before a query, without the first ``skip``, ``(n,)``."""
    check_single_text(attention)
    if not 0 <= query < attention.n:
        raise MeasureError(f"there is no query at position {query} of {attention.n} tokens")
    visible = attention.visible(slice(query, query + 1))[0, :, 0]
    if not bool((visible == visible[:1]).all()):
        raise MeasureError(f"heads of layer {attention.layer} see different keys: swaps need the same keys for all")
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
    """Return positions of queries in a text of ``n`` tokens.

    Args:
        n: Number of tokens.
        count: Number of queries, spread evenly up to the last token; 0 for all with at least two keys before them.
        positions: Positions to use instead; negative ones count from the end.
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


Swap = Callable[[int, int], LayerAttention]
"""``swap(i, j)`` returns the layer's attention with two blocks of input tokens, starting at i and j, swapped."""


def reference_scores(
    attention: LayerAttention, swap: Swap, queries: Sequence[int], *, tau: float = TAU, block: int = 1, skip: int = 0
) -> tuple[Tensor, Tensor]:
    """Return positional and symbolic scores of every head at each query, ``(heads, queries)`` each, by definition.

    Runs the layer once per swap. Used for layers whose keys depend on several tokens, and as reference in tests of
    :func:`wherewhat.measures.swaps.scores.score_swaps`.

    Args:
        attention: The layer without a swap.
        swap: Runs the layer with two blocks swapped.
        queries: Positions of the queries.
        tau: Temperature of the swap weights.
        block: Tokens per block.
        skip: Number of first keys that are never swapped.
    """
    scores, weights = (_rows(f, queries) for f in (attention.attn_scores, attention.pattern))
    starts = {q: _starts(places_before(attention, q, skip=skip), block) for q in queries}
    pairs = sorted({(i, j) for found in starts.values() for a, i in enumerate(found) for j in found[a + 1 :]})
    exponents = torch.full((len(pairs), *scores.shape[:2]), -torch.inf, dtype=torch.float64)
    same, reverse = torch.zeros_like(exponents), torch.zeros_like(exponents)
    for index, (i, j) in enumerate(pairs):
        after = _rows(swap(i, j).attn_scores, queries)
        v, w = (_direction(x, i, j, block) for x in (scores, after))
        same[index] = (v * w).sum(0)
        reverse[index] = (v.flip(0) * w).sum(0)
        first, second = (weights[..., start : start + block].mean(-1) for start in (i, j))
        exponents[index] = (first - second).abs() / tau
        for column, q in enumerate(queries):
            if i not in starts[q] or j not in starts[q]:
                exponents[index, :, column] = -torch.inf
    alpha = exponents.softmax(0)
    return (alpha * same).sum(0), (alpha * reverse).sum(0)


def _rows(compute: Callable[[slice], Tensor], queries: Sequence[int]) -> Tensor:
    """Return the logits or attention weights of some queries, ``(heads, queries, m)`` float64."""
    return torch.cat([compute(slice(q, q + 1))[0].double().cpu() for q in queries], 1)


def _direction(scores: Tensor, i: int, j: int, block: int) -> Tensor:
    """Return the direction of the weights of two blocks, ``(2, heads, queries)``, without underflow."""
    both = torch.stack([scores[..., start : start + block].logsumexp(-1) for start in (i, j)])
    return torch.nn.functional.normalize((both - both.amax(0)).exp(), dim=0)


def _starts(keys: Tensor, block: int) -> list[int]:
    """Return the first tokens of the complete blocks among consecutive keys."""
    first, count = int(keys[0]), len(keys) // block
    return [first + index * block for index in range(count)]
