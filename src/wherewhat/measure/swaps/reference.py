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
    before = _rows(attention, queries)  # (heads, queries, m)
    starts = {q: _starts(places_before(attention, q, skip=skip), block) for q in queries}
    pairs = sorted({(i, j) for found in starts.values() for a, i in enumerate(found) for j in found[a + 1 :]})
    exponents = torch.full((len(pairs), *before.shape[:2]), -torch.inf, dtype=torch.float64)
    same, reverse = torch.zeros_like(exponents), torch.zeros_like(exponents)
    for index, (i, j) in enumerate(pairs):
        after = _rows(swap(i, j), queries)
        v, w = (torch.stack([_mean(x, i, block), _mean(x, j, block)]) for x in (before, after))
        size = (v.norm(dim=0) * w.norm(dim=0)).clamp_min(1e-300)
        same[index] = (v * w).sum(0) / size
        reverse[index] = (v.flip(0) * w).sum(0) / size
        exponents[index] = (v[0] - v[1]).abs() / tau
        for column, q in enumerate(queries):
            if i not in starts[q] or j not in starts[q]:
                exponents[index, :, column] = -torch.inf
    alpha = exponents.softmax(0)
    return (alpha * same).sum(0), (alpha * reverse).sum(0)


def _rows(attention: LayerAttention, queries: Sequence[int]) -> Tensor:
    """Attention weights of some queries, ``(heads, queries, m)`` float64."""
    return torch.cat([attention.pattern(slice(q, q + 1))[0].double().cpu() for q in queries], 1)


def _starts(keys: Tensor, block: int) -> list[int]:
    """First tokens of the whole blocks among the keys a query sees, which follow one another."""
    first, count = int(keys[0]), len(keys) // block
    return [first + index * block for index in range(count)]


def _mean(weights: Tensor, start: int, block: int) -> Tensor:
    return weights[..., start : start + block].mean(-1)
