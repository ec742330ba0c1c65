"""Every length method by loops over pairs of a query and a key: what the fast code is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention

Distances = Callable[[int, int], float | None]
"""Distance of query i to key j <= i by a rule; None where the key is not seen."""


def turned(attention: LayerAttention, x: Tensor, angles: list[float], factor: float) -> Tensor:
    """Vector ``(d,)`` before rotation, turned by an angle per plane and multiplied by a factor."""
    out = x.double().clone()
    for plane, (a, b) in enumerate(attention.rotation.pairs.tolist()):
        c, s = math.cos(angles[plane]), math.sin(angles[plane])
        u, v = float(x[a]), float(x[b])
        out[a], out[b] = factor * (c * u - s * v), factor * (c * v + s * u)
    return out


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
    q, k, v = attention.q[0], attention.k[0], attention.value[0]
    out = torch.zeros(1, n, heads, v.shape[-1], dtype=torch.float64)
    visible = attention.visible().expand(1, heads, n, m)[0]
    scaling = attention.rotation.scaling * factor
    for h in range(heads):
        for row in range(n):
            i = row + m - n
            speeds = attention.rotation.inv_freq if inv_freq is None else inv_freq(i)
            logits = torch.full((m,), -torch.inf, dtype=torch.float64)
            for j in range(i + 1):
                d = distance(i, j)
                if d is None or not visible[h, row, j]:
                    continue
                query = turned(attention, q[h, row], [d * float(f) for f in speeds], scaling)
                key = turned(attention, k[h // groups, j], [0.0] * len(speeds), scaling)
                logit = float(query @ key) * attention.scale
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
    scaling = attention.rotation.scaling
    found = []
    starts = range(s, n - block + 1, block)

    def representatives(start: int, h: int) -> list[int]:
        def score(key: int) -> float:
            return sum(
                float(attention.rot_q[0, h * groups + g, key + later].double() @ attention.rot_k[0, h, key].double())
                for g in range(groups)
                for later in range(1, window + 1)
            )

        return sorted(range(start, start + block), key=score, reverse=True)[:reps]

    for i in range(n):
        ready = [a for a in starts if i - (a + block - 1) >= window]
        relevance = dict.fromkeys(ready, 0.0)
        for a in ready:
            for h in range(attention.kv_heads):
                for key in representatives(a, h):
                    k = turned(attention, attention.k[0, h, key], [0.0] * attention.rotation.planes, scaling)
                    for g in range(groups):
                        angles = (window * attention.rotation.inv_freq).tolist()
                        q = turned(attention, attention.q[0, h * groups + g, i], angles, scaling)
                        relevance[a] += float(q @ k)
        best = sorted(ready, key=relevance.__getitem__, reverse=True)[:top]
        found.append({key for a in best for key in range(a, a + block)})
    return found
