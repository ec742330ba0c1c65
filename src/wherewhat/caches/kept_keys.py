"""What methods compute once of each token, kept while a text is continued: keys at other positions, blocks of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class KeptBlocks:
    """What a method that represents blocks of keys needs of the tokens of one layer that have been read.

    Attributes:
        method: The method.
        count: Number of tokens.
        sums: Running sums of the queries of the last of them, in parts ``(batch, kv_heads, c, d)``.
        represented: A vector for each finished block, ``(batch, kv_heads, blocks, d)``.
    """

    method: object
    count: int
    sums: tuple[Tensor, ...]
    represented: Tensor


class KeptKeys:
    """Rotated keys and represented blocks of the layers of a model, see :func:`keys_kept`."""

    def __init__(self) -> None:
        self._layers: dict[int, _Kept | None] = {}
        self._blocks: dict[int, KeptBlocks | None] = {}

    def select(self, rows: Tensor) -> None:
        """Keep some texts of the batch, as ``batch_select_indices`` of a cache does; a text may come several times."""
        for kept in self._layers.values():
            if kept is not None:
                kept.keys = kept.keys[rows.to(kept.keys.device)]
        for layer, blocks in self._blocks.items():
            if blocks is not None:
                chosen = rows.to(blocks.represented.device)
                sums = tuple(part[chosen] for part in blocks.sums)
                self._blocks[layer] = replace(blocks, sums=sums, represented=blocks.represented[chosen])

    def blocks(self, attention: LayerAttention, method: object) -> KeptBlocks | None:
        """Return what :func:`kept_blocks` does."""
        layer, m = attention.layer, attention.m
        kept = self._blocks.get(layer)
        if kept is None or kept.method != method or not _is_like(kept.represented, attention.rot_k):
            return None
        if kept.count == m:
            # Two parts of the layer, or a second text: what is kept of them cannot be told apart.
            self._blocks[layer] = None
            return None
        return kept if kept.count == m - attention.n else None

    def keep_blocks(self, attention: LayerAttention, blocks: KeptBlocks) -> None:
        """Keep what :func:`keep_blocks` says."""
        if self._blocks.setdefault(attention.layer, blocks) is not None:
            self._blocks[attention.layer] = blocks

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
    return kept.to == to and kept.rotation is rotation and _is_like(kept.keys, k)


def _is_like(kept: Tensor, k: Tensor) -> bool:
    return kept.shape[:2] == k.shape[:2] and kept.device == k.device


_open: ContextVar[KeptKeys | None] = ContextVar("kept_keys", default=None)


@contextmanager
def keys_kept() -> Iterator[KeptKeys]:
    """Keep the keys that a method rotates inside the context, so that each token's are rotated once.

    All passes inside the context must continue one batch of texts with one cache, whose rows keep their order (no beam
    search) and which is not cropped (no assisted generation). Their results are the same; keys take memory for a second
    copy, in float32. Without it every new token rotates the keys of the whole text. InfLLM continues cached keys only
    inside the context, from the first token on: it keeps sums of the queries of its window in float64, and the
    representatives of blocks.

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


def is_keeping() -> bool:
    """Return whether a context of :func:`keys_kept` is open."""
    return _open.get() is not None


def kept_blocks(attention: LayerAttention, method: object) -> KeptBlocks | None:
    """Return what a method has kept of the tokens before the queries of a layer; None if that is not known."""
    kept = _open.get()
    return None if kept is None else kept.blocks(attention, method)


def keep_blocks(attention: LayerAttention, blocks: KeptBlocks) -> None:
    """Keep what a method needs of the tokens of a layer up to its last query, inside :func:`keys_kept`."""
    kept = _open.get()
    if kept is not None:
        kept.keep_blocks(attention, blocks)


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
