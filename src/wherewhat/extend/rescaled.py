"""Methods that turn queries and keys at other speeds and leave the rest of attention as it is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wherewhat.capturing import LayerAttention, Rotation
from wherewhat.extend.base import LengthMethod, positive, settled
from wherewhat.extend.far import blocks
from wherewhat.extend.parts import Part, attend_parts, check_unpadded, only_causal, part_scores, placed, working
from wherewhat.extend.sight import Sight


@dataclass(frozen=True)
class RescaledMethod(LengthMethod):
    """Every query sees every key before it at its true distance, with other frequencies.

    Attributes:
        factor: How many times longer than in training texts may be; by default length / training length, 1 at least.
        trained: Training length.
    """

    factor: float | None = None
    trained: int | None = None

    def __post_init__(self) -> None:
        """Refuse factors that shorten."""
        positive(self.name, factor=self.factor, trained=self.trained)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The factor follows from the length."""
        known = replace(self, trained=self.trained or trained)
        return known if length is None else replace(known, factor=known.factor_for(length))

    def factor_for(self, length: int) -> float:
        """The factor for a text of that length."""
        if self.factor is not None:
            return self.factor
        return max(1.0, length / settled(self.name, "factor or training length", self.trained))

    @abstractmethod
    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """The layer's rotation for a factor above one."""

    def sight(self, attention: LayerAttention) -> Sight | None:
        """See :meth:`LengthMethod.sight`."""
        factor = self.factor_for(attention.m)
        if attention.rotation is None or factor == 1:
            return None
        return Turned(((slice(0, attention.n), self.rescaled(attention.rotation, factor)),))


@dataclass(frozen=True)
class Turned:
    """Every key at its true distance, with other frequencies.

    Attributes:
        pieces: Rows of queries, one after the other, and the rotation with which they see all keys before them.
    """

    pieces: tuple[tuple[slice, Rotation], ...]

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """See :class:`~wherewhat.extend.sight.Sight`."""
        check_unpadded(attention)
        if len(self.pieces) == 1:
            return attend_rotated(attention, self.pieces[0][1], self.pieces[0][0], block_mib=block_mib)
        batch, heads, n = attention.rot_q.shape[:3]
        shape = (batch, n, heads, attention.value.shape[-1])
        output = torch.empty(shape, dtype=working(attention), device=attention.rot_q.device)
        for rows, rotation in self.pieces:
            output[:, rows] = attend_rotated(attention, rotation, rows, block_mib=block_mib)
        return output

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """See :class:`~wherewhat.extend.sight.Sight`."""
        check_unpadded(attention)
        first, device = attention.m - attention.n, attention.rot_q.device
        keys = torch.arange(attention.m, device=device)
        everything = torch.ones(1, 1, dtype=torch.bool, device=device)
        found = []
        for piece, rotation in self.pieces:
            some = slice(max(rows.start, piece.start), min(rows.stop, piece.stop))
            if some.start < some.stop:
                i = torch.arange(first + some.start, first + some.stop, device=device)
                q = placed(attention, attention.rot_q[:, :, some], i, i, rotation=rotation)
                k = placed(attention, attention.rot_k, keys, keys, rotation=rotation)
                found.append(part_scores(attention, some, Part(q, k, slice(0, attention.m), everything)))
        return torch.cat(found, 2)


def attend_rotated(attention: LayerAttention, rotation: Rotation, rows: slice, *, block_mib: int) -> Tensor:
    """Output ``(batch, rows, heads, d_v)`` of some queries, queries and keys rotated by another rule."""
    first, device = attention.m - attention.n, attention.rot_q.device
    i = torch.arange(first + rows.start, first + rows.stop, device=device)
    j = torch.arange(first + rows.stop, device=device)
    q = placed(attention, attention.rot_q[:, :, rows], i, i, rotation=rotation)
    k = placed(attention, attention.rot_k[:, :, : len(j)], j, j, rotation=rotation)
    if only_causal(attention) and len(i) == len(j):
        value = attention.value[:, :, : len(j)]
        shared = attention.heads != attention.kv_heads
        q, k = q.to(value.dtype), k.to(value.dtype)
        out = scaled_dot_product_attention(q, k, value, is_causal=True, scale=attention.scale, enable_gqa=shared)
        return out.transpose(1, 2)
    batch, heads = q.shape[:2]
    output = torch.empty(batch, len(i), heads, attention.value.shape[-1], dtype=working(attention), device=device)
    sub = replace(attention, rot_q=attention.rot_q[:, :, rows])
    for block in blocks(sub, len(j), block_mib=block_mib):
        part = Part(q[:, :, block], k, slice(0, len(j)), torch.ones(1, 1, dtype=torch.bool, device=device))
        own = slice(rows.start + block.start, rows.start + block.stop)
        output[:, block] = attend_parts(attention, own, [part])
    return output
