"""Several texts, and several layers, as heads of one layer: what measures one text at a time measures all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.masking import Mask


def fold(layers: Sequence[LayerAttention], rows: slice = slice(None)) -> LayerAttention:
    """Layers of a laboratory model as one layer with a batch of 1 and ``layers · texts · heads`` heads.

    All layers rotate alike, scale alike and see everything before them; a bias belongs to heads and is the same for
    all texts. Nothing mixes heads in :class:`LayerAttention`, so each keeps its logits, weights and output.

    Args:
        layers: Layers of one pass.
        rows: Which of the batch's texts.
    """
    first = layers[0]
    count = first.rot_q[rows].shape[0]

    def joined(name: str, at: int) -> Tensor:
        parts = [getattr(layer, name)[rows] for layer in layers]
        return torch.stack(parts).movedim(at + 1, 2).flatten(0, 2)[None]

    added = tuple(
        torch.stack([layer.mask.added[index] for layer in layers])[:, None]
        .expand(-1, count, -1, -1, -1)
        .reshape(1, -1, *first.mask.added[index].shape[-2:])
        for index in range(len(first.mask.added))
    )
    return replace(
        first,
        rot_q=joined("rot_q", 1),
        rot_k=joined("rot_k", 1),
        value=joined("value", 1),
        output=joined("output", 2).movedim(1, 2),
        mask=Mask(causal=first.mask.causal, added=added, device=first.mask.device),
    )


def unfold(output: Tensor, texts: int) -> Tensor:
    """Output ``(1, n, texts · heads, d)`` of one folded layer as ``(texts, n, heads, d)``."""
    return torch.unflatten(output[0], 1, (texts, -1)).movedim(1, 0)


def by_head(values: Tensor, layers: int, texts: int) -> Tensor:
    """Values ``(layers · texts · heads, …)`` of a folded stack as ``(layers, texts, heads, …)``."""
    return torch.unflatten(values, 0, (layers, texts, -1))
