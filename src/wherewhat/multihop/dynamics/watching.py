"""One pass that keeps what scores of all heads are made of: rotated queries and keys, and the answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.rotation import Rotation
from wherewhat.multihop.block import Block
from wherewhat.multihop.model import LabModel


@dataclass(frozen=True)
class Watched:
    """Queries and keys of all layers on some sequences.

    Attributes:
        rot_q: Queries after rotation, ``(layers, count, heads, n, d)``.
        rot_k: Keys after rotation, the same shape.
        bias: What is added to the logits, ``(layers, heads, n, n)``; None if nothing is.
        scale: Factor on the dot products.
        rotation: How queries and keys were rotated; None if they were not.
        logits: Logits of the last token, ``(count, vocabulary)``.
    """

    rot_q: Tensor
    rot_k: Tensor
    bias: Tensor | None
    scale: float
    rotation: Rotation | None
    logits: Tensor


@torch.no_grad()
def watch(model: LabModel, tokens: Tensor) -> Watched:
    """Run a model on ``tokens`` ``(count, n)``."""
    places = model.places(tokens.shape[1])
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    queries: list[Tensor] = []
    keys: list[Tensor] = []

    def keep(layer: int, stream: Tensor) -> None:
        if layer < len(blocks):
            block = blocks[layer]
            q, k, _ = block.project(block.norm(stream), places[layer], last=False)
            queries.append(q)
            keys.append(k)

    logits = model(tokens, edit_stream=keep)
    biases = [place.bias for place in places if place.bias is not None]
    return Watched(
        rot_q=torch.stack(queries),
        rot_k=torch.stack(keys),
        bias=torch.stack(biases) if biases else None,
        scale=blocks[0].scale,
        rotation=model.rotation,
        logits=logits,
    )
