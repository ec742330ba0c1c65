"""Keys that a method rotates to other positions, kept while a text is continued token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.caches.attention import rotated_to
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation

_SPARE = 256
"""Keys for which memory is reserved when more is needed."""

Positions = Callable[[Tensor], Tensor]
"""Position of keys from their index ``(c,)``. Equal functions give equal positions."""


def own_positions(j: Tensor) -> Tensor:
    """Return the indices of keys as their positions."""
    return j


@dataclass
class _Kept:
    """Rotated keys of one layer.

    Attributes:
        keys: Memory for them, ``(batch, kv_heads, at least count, d)``; the first ``count`` are keys.
        count: Number of keys.
        to: Their positions.
        rotation: The rotation at these positions; None for the layer's own.
    """

    keys: Tensor
    count: int
    to: Positions
    rotation: Rotation | None


class KeptKeys:
    """Rotated keys of the layers of a model, see :func:`keys_kept`."""

    def __init__(self) -> None:
        self._layers: dict[int, _Kept | None] = {}

    def select(self, rows: Tensor) -> None:
        """Keep some texts of the batch, as ``batch_select_indices`` of a cache does."""
        for kept in self._layers.values():
            if kept is not None:
                kept.keys = kept.keys[rows.to(kept.keys.device)]

    def rotated(self, attention: LayerAttention, to: Positions, rotation: Rotation | None) -> Tensor:
        """Return what :func:`rotated_keys` does, rotating the keys of new tokens only."""
        k, m = attention.rot_k, attention.m
        kept = self._layers.get(attention.layer)
        if attention.layer in self._layers and (kept is None or (kept.count == m and _is_of(kept, k, to, rotation))):
            # Two parts of the layer with such keys, or a second text: their keys cannot be told apart.
            self._layers[attention.layer] = None
            return _turned(attention, to, rotation, 0)
        if kept is None or kept.count != m - attention.n or not _is_of(kept, k, to, rotation):
            kept = self._layers[attention.layer] = _Kept(_turned(attention, to, rotation, 0), 0, to, rotation)
        else:
            new = _turned(attention, to, rotation, kept.count)
            if kept.keys.shape[2] < m:
                grown = new.new_empty(*new.shape[:2], m + _SPARE, new.shape[3])
                grown[:, :, : kept.count] = kept.keys[:, :, : kept.count]
                kept.keys = grown
            kept.keys[:, :, kept.count : m] = new
        kept.count = m
        return kept.keys[:, :, :m]


def _is_of(kept: _Kept, k: Tensor, to: Positions, rotation: Rotation | None) -> bool:
    same = kept.to == to and kept.rotation is rotation
    return same and kept.keys.shape[:2] == k.shape[:2] and kept.keys.device == k.device


_open: ContextVar[KeptKeys | None] = ContextVar("kept_keys", default=None)


@contextmanager
def keys_kept() -> Iterator[KeptKeys]:
    """Keep the keys that a method rotates inside the context, so that each token's are rotated once.

    All passes inside the context must continue one batch of texts with one cache, whose rows keep their order (no beam
    search). Their results are the same; keys take memory for a second copy, in float32. Without it every new token
    rotates the keys of the whole text.

    Examples:
        >>> with extended(model, method), keys_kept():
        ...     model.generate(input_ids, max_new_tokens=100)
    """
    kept = KeptKeys()
    token = _open.set(kept)
    try:
        yield kept
    finally:
        _open.reset(token)


def rotated_keys(attention: LayerAttention, to: Positions, *, rotation: Rotation | None = None) -> Tensor:
    """Return all keys of a layer rotated to other positions, ``(batch, kv_heads, m, d)``, in float32 or higher.

    Args:
        attention: The layer.
        to: New positions of the keys.
        rotation: New rotation; None for the layer's own.
    """
    kept = _open.get()
    if kept is None:
        return _turned(attention, to, rotation, 0)
    return kept.rotated(attention, to, rotation)


def _turned(attention: LayerAttention, to: Positions, rotation: Rotation | None, start: int) -> Tensor:
    """Return the keys from index ``start`` on."""
    j = torch.arange(start, attention.m, device=attention.rot_k.device)
    return rotated_to(attention, attention.rot_k[:, :, start:], j, to(j), rotation=rotation)
