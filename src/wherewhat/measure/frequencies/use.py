"""Which of RoPE's frequencies a head's logits come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.swaps.placing import places_before


def plane_logits(attention: LayerAttention, query: int, keys: Tensor) -> Tensor:
    """What each plane adds to the logits of one query, ``(heads, keys, planes)`` float64.

    Dimensions that are not rotated are one more plane, the last. The sum over planes is ``scale · rot_q · rot_k``: the
    logits before soft-cap and bias.
    """
    return torch.cat([partial_logits(attention, query, keys, dims) for dims in dimensions(attention)], -1)


def partial_logits(attention: LayerAttention, query: int, keys: Tensor, dims: Tensor) -> Tensor:
    """What groups of head dimensions add to the logits of one query, ``(heads, keys, groups)`` float64.

    Args:
        attention: One layer of a pass over one text.
        query: Position of the query.
        keys: Indices of the keys, ``(keys,)``.
        dims: Head dimensions of each group, ``(groups, width)``.
    """
    dims = dims.to(attention.rot_q.device)
    q = attention.rot_q[0, :, query].double()[:, dims]  # (heads, groups, width)
    k = attention.rot_k[0][:, keys].double()[..., dims]  # (kv_heads, keys, groups, width)
    shared = q.view(attention.kv_heads, -1, *q.shape[1:])
    return torch.einsum("khpw,knpw->khnp", shared, k).flatten(0, 1) * attention.scale


def dimensions(attention: LayerAttention) -> list[Tensor]:
    """Head dimensions of the planes, ``(planes, 2)``, and of what is not rotated, ``(1, rest)``, if anything is."""
    assert attention.rotation is not None
    pairs = attention.rotation.pairs
    turned = set(pairs.flatten().tolist())
    rest = [x for x in range(attention.rot_q.shape[-1]) if x not in turned]
    return [pairs, torch.tensor([rest])] if rest else [pairs]


def frequency_ids(inv_freq: Tensor) -> Tensor:
    """Rank of each plane by speed, ``(planes,)`` float64: 1 turns fastest."""
    order = inv_freq.abs().argsort(descending=True, stable=True)
    ids = torch.empty(len(inv_freq), dtype=torch.float64)
    ids[order.cpu()] = torch.arange(1, len(inv_freq) + 1, dtype=torch.float64)
    return ids


def frequency_use(attention: LayerAttention, queries: Sequence[int]) -> Tensor:
    """Largest logit contribution of each rotated plane, ``(heads, planes)`` float64.

    The largest absolute contribution over the keys before a query, mean over queries (arXiv 2511.11579).
    """
    assert attention.rotation is not None
    pairs = attention.rotation.pairs
    found = [
        partial_logits(attention, query, places_before(attention, query), pairs).abs().amax(1) for query in queries
    ]
    return torch.stack(found).mean(0).cpu()


def mean_frequency(use: Tensor, inv_freq: Tensor) -> Tensor:
    """Mean frequency ID of each head, weighted by use ``(heads, planes)``: ``(heads,)``; NaN where nothing is used."""
    total = use.sum(-1)
    return torch.where(total > 0, use @ frequency_ids(inv_freq) / total.clamp_min(1e-300), torch.nan)
