"""Attention weights of one layer, a block of queries at a time: nothing n by n is ever held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import MeasureError


@dataclass(frozen=True)
class WeightBlock:
    """Attention weights of consecutive queries of one text.

    Attributes:
        rows: Which queries.
        weights: Attention weights, ``(heads, rows, m)``.
        visible: True where a query may see a key, ``(rows, m)``.
        missing: Weight on the model's own sink column, ``(heads, rows)``; zero where it has none.
    """

    rows: slice
    weights: Tensor
    visible: Tensor
    missing: Tensor

    @property
    def seen(self) -> Tensor:
        """Number of keys each query may see, ``(rows,)``."""
        return self.visible.sum(-1)


def weight_blocks(attention: LayerAttention, block_mib: int) -> Iterator[WeightBlock]:
    """Attention weights of all queries, in order.

    Args:
        attention: One layer, batch 1.
        block_mib: Memory for the weights of one block, in MiB; one query is the least.

    Raises:
        MeasureError: If the layer holds several texts, or its queries or keys are not finite.
    """
    if attention.rot_q.shape[0] != 1:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts: look at one text at a time"
        )
    if not all(bool(x.isfinite().all()) for x in (attention.rot_q, attention.rot_k)):
        raise MeasureError(
            f"queries or keys of layer {attention.layer} are not finite: the model's activations overflow"
        )
    step = max(1, block_mib * 2**20 // (4 * attention.heads * attention.m))
    for start in range(0, attention.n, step):
        rows = slice(start, min(attention.n, start + step))
        weights = attention.pattern(rows)[0]
        # A bias of its own gives each head a mask of its own, which differs only where weights are zero anyway.
        visible = attention.visible(rows)[0].any(0)
        missing = torch.zeros_like(weights[..., 0]) if attention.sinks is None else (1 - weights.sum(-1)).clamp_min(0)
        yield WeightBlock(rows, weights, visible, missing)
