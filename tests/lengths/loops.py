"""Every length method by loops over pairs of a query and a key: what the fast code is compared with."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention

Distances = Callable[[int, int], float | None]
"""Distance of query i to key j <= i by a rule; None where the key is not seen."""


def turned(pairs: Sequence[Sequence[int]], x: list[float], angles: Sequence[float], factor: float) -> list[float]:
    """Vector before rotation, each plane turned by its angle and multiplied by a factor."""
    out = list(x)
    for (a, b), angle in zip(pairs, angles, strict=True):
        c, s = math.cos(angle), math.sin(angle)
        out[a], out[b] = factor * (c * x[a] - s * x[b]), factor * (c * x[b] + s * x[a])
    return out


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def best(candidates: Sequence[int], score: Callable[[int], float], count: int) -> list[int]:
    """Candidates with the largest scores, after a check that float32 cannot choose otherwise."""
    scores = {one: score(one) for one in candidates}
    order = sorted(candidates, key=scores.__getitem__, reverse=True)
    if 0 < count < len(order):
        gap = scores[order[count - 1]] - scores[order[count]]
        assert gap > 1e-5 * max(map(abs, scores.values())), "two candidates are too alike for a test"
    return order[:count]


def dense(
    attention: LayerAttention,
    distance: Distances,
    *,
    inv_freq: Callable[[int], Tensor] | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Output ``(1, n, heads, d_v)``; the query is turned by the distance and the key stands at zero."""
    n, m, heads = attention.n, attention.m, attention.heads
    groups = heads // attention.kv_heads
    # Lists of numbers: an entry of a tensor takes a hundred times as long to read.
    q, k, v = attention.q[0].tolist(), attention.k[0].tolist(), attention.value[0]
    out = torch.zeros(1, n, heads, v.shape[-1], dtype=torch.float64)
    visible = attention.visible().expand(1, heads, n, m)[0].tolist()
    pairs, scaling = attention.rotation.pairs.tolist(), attention.rotation.scaling * factor
    for row in range(n):
        i = row + m - n
        speeds = (attention.rotation.inv_freq if inv_freq is None else inv_freq(i)).tolist()
        for h in range(heads):
            logits = torch.full((m,), -torch.inf, dtype=torch.float64)
            for j in range(i + 1):
                d = distance(i, j)
                if d is None or not visible[h][row][j]:
                    continue
                query = turned(pairs, q[h][row], [d * f for f in speeds], scaling)
                key = turned(pairs, k[h // groups][j], [0.0] * len(speeds), scaling)
                logit = dot(query, key) * attention.scale
                if attention.softcap is not None:
                    logit = attention.softcap * math.tanh(logit / attention.softcap)
                logits[j] = logit
            if attention.sinks is not None:
                logits = torch.cat([logits, attention.sinks[h : h + 1].double()])
            out[0, row, h] = torch.softmax(logits, -1)[:m] @ v[h // groups].double()
    return out


def infllm_blocks(attention: LayerAttention, *, s: int, window: int, block: int, top: int, reps: int) -> list[set[int]]:
    """Keys of the blocks that each query retrieves."""
    n, groups = attention.n, attention.heads // attention.kv_heads
    pairs, scaling = attention.rotation.pairs.tolist(), attention.rotation.scaling
    q, k, rot_q, rot_k = (x[0].tolist() for x in (attention.q, attention.k, attention.rot_q, attention.rot_k))
    angles = (window * attention.rotation.inv_freq).tolist()
    found = []
    starts = range(s, n - block + 1, block)

    @functools.cache
    def representatives(start: int, h: int) -> list[int]:
        def score(key: int) -> float:
            return sum(
                dot(rot_q[h * groups + g][key + later], rot_k[h][key])
                for g in range(groups)
                for later in range(1, window + 1)
            )

        return best(range(start, start + block), score, reps)

    for i in range(n):
        ready = [a for a in starts if i - (a + block - 1) >= window]
        relevance = dict.fromkeys(ready, 0.0)
        for a in ready:
            for h in range(attention.kv_heads):
                for key in representatives(a, h):
                    at_zero = turned(pairs, k[h][key], [0.0] * len(pairs), scaling)
                    for g in range(groups):
                        relevance[a] += dot(turned(pairs, q[h * groups + g][i], angles, scaling), at_zero)
        retrieved = best(ready, relevance.__getitem__, top)
        found.append({key for a in retrieved for key in range(a, a + block)})
    return found
