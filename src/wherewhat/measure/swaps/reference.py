"""The same scores the slow way: every swap made for real and the attention looked at again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.swaps.placing import places_before
from wherewhat.measure.swaps.scores import TAU

Swap = Callable[[int, int], LayerAttention]
"""The layer's attention with the inputs of two blocks of tokens, that start there, swapped."""


def reference_scores(
    attention: LayerAttention, swap: Swap, queries: Sequence[int], *, tau: float = TAU, block: int = 1, skip: int = 0
) -> tuple[Tensor, Tensor]:
    """Positional and symbolic score of every head at each query, ``(heads, queries)`` each, as they are defined.

    One run of the layer per swap. Serves layers whose keys depend on other tokens' inputs, and as the standard that
    :func:`wherewhat.measure.swaps.scores.score_swaps` is tested against.

    Args:
        attention: The layer without a swap.
        swap: Runs it with two blocks swapped.
        queries: Positions of the queries.
        tau: Temperature of the weights of swaps.
        block: Tokens per block.
        skip: Leave the first so many keys where they are.
    """
    scores, weights = _rows(attention, queries)  # (heads, queries, m) each
    starts = {q: _starts(places_before(attention, q, skip=skip), block) for q in queries}
    pairs = sorted({(i, j) for found in starts.values() for a, i in enumerate(found) for j in found[a + 1 :]})
    exponents = torch.full((len(pairs), *scores.shape[:2]), -torch.inf, dtype=torch.float64)
    same, reverse = torch.zeros_like(exponents), torch.zeros_like(exponents)
    for index, (i, j) in enumerate(pairs):
        after, _ = _rows(swap(i, j), queries)
        v, w = (_direction(x, i, j, block) for x in (scores, after))
        same[index] = (v * w).sum(0)
        reverse[index] = (v.flip(0) * w).sum(0)
        exponents[index] = (_mean(weights, i, block) - _mean(weights, j, block)).abs() / tau
        for column, q in enumerate(queries):
            if i not in starts[q] or j not in starts[q]:
                exponents[index, :, column] = -torch.inf
    alpha = exponents.softmax(0)
    return (alpha * same).sum(0), (alpha * reverse).sum(0)


def _rows(attention: LayerAttention, queries: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits and attention weights of some queries, ``(heads, queries, m)`` float64."""
    rows = [slice(q, q + 1) for q in queries]
    scores, weights = (
        torch.cat([f(row)[0].double().cpu() for row in rows], 1) for f in (attention.attn_scores, attention.pattern)
    )
    return scores, weights


def _direction(scores: Tensor, i: int, j: int, block: int) -> Tensor:
    """Direction of the weights of two blocks, ``(2, heads, queries)``, also where both are too small for a number."""
    both = torch.stack([scores[..., start : start + block].logsumexp(-1) for start in (i, j)])
    return torch.nn.functional.normalize((both - both.amax(0)).exp(), dim=0)


def _starts(keys: Tensor, block: int) -> list[int]:
    """First tokens of the whole blocks among the keys a query sees, which follow one another."""
    first, count = int(keys[0]), len(keys) // block
    return [first + index * block for index in range(count)]


def _mean(weights: Tensor, start: int, block: int) -> Tensor:
    return weights[..., start : start + block].mean(-1)
