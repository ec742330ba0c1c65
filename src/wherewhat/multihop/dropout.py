"""Dropout whose masks are drawn beforehand, all at once, from a generator of the caller's.

A forward pass then has no randomness of its own: with the same masks it gives the same numbers, wherever training was
interrupted, and a recorded GPU graph draws as the same steps one by one do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from wherewhat.multihop.config import LabConfig


@dataclass(frozen=True)
class LayerMasks:
    """Factors of one layer: 0 where something is dropped, 1 / (1 - dropout) elsewhere.

    Attributes:
        pattern: On attention weights, ``(batch, heads, queries, n)``.
        attention: On what attention adds to the residual stream, ``(batch, queries, width)``.
        mlp: On what the MLP adds, ``(batch, queries, width)``.
    """

    pattern: Tensor
    attention: Tensor
    mlp: Tensor


@dataclass(frozen=True)
class Masks:
    """Factors of one training pass.

    Attributes:
        embedding: On embeddings, ``(batch, n, width)``.
        layers: One entry per layer; the last has one query only, that of the last token.
    """

    embedding: Tensor
    layers: tuple[LayerMasks, ...]


class MaskDrawer:
    """Draws the masks of training passes of one shape, in the same memory every time."""

    def __init__(self, config: LabConfig, *, batch: int, n: int, device: torch.device | str = "cpu") -> None:
        shapes: list[tuple[int, ...]] = [(batch, n, config.width)]
        for layer in range(config.layers):
            queries = 1 if layer == config.layers - 1 else n
            shapes += [
                (batch, config.heads, queries, n),
                (batch, queries, config.width),
                (batch, queries, config.width),
            ]
        sizes = [math.prod(shape) for shape in shapes]
        total = sum(sizes)
        # Four masks' entries from each draw: 16 bits are enough for the probability, and drawing is what takes time.
        self._bits = torch.empty(-(-total // 4), dtype=torch.int64, device=device)
        self._factors = torch.empty(4 * len(self._bits), device=device)
        self._highest = round((1 - config.dropout) * 2**16) - 2**15 - 1  # of the 16-bit numbers that keep an entry
        self._kept = 1 - config.dropout
        embedding, *views = (
            part.view(shape) for part, shape in zip(torch.split(self._factors[:total], sizes), shapes, strict=True)
        )
        layers = (LayerMasks(*views[first : first + 3]) for first in range(0, len(views), 3))
        self._masks = Masks(embedding, tuple(layers))

    def draw(self, generator: Generator) -> Masks:
        """The next masks; those drawn before are overwritten."""
        self._bits.random_(-(2**63), None, generator=generator)
        torch.le(self._bits.view(torch.int16), self._highest, out=self._factors)
        self._factors.div_(self._kept)
        return self._masks
