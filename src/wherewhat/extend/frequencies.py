"""Methods that change RoPE's frequencies: position interpolation, NTK-aware, dynamic NTK, YaRN."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError
from wherewhat.extend.attention import (
    Part,
    attend_parts,
    blocks,
    check_unpadded,
    only_causal,
    part_scores,
    placed,
    working,
)
from wherewhat.extend.method import LengthMethod, positive, settled
from wherewhat.extend.visibility import Sight


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
        """See :class:`~wherewhat.extend.visibility.Sight`."""
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
        """See :class:`~wherewhat.extend.visibility.Sight`."""
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


@dataclass(frozen=True)
class PositionInterpolation(RescaledMethod):
    """Every distance is divided by the factor: all frequencies are that much slower."""

    name: ClassVar[str] = "position-interpolation"

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """All planes turn slower alike."""
        return replace(rotation, inv_freq=rotation.inv_freq / factor)


@dataclass(frozen=True)
class NTKAware(RescaledMethod):
    """The base of the frequencies grows by factor^(d/(d-2)): the fastest plane stays, the slowest slows by the factor.

    d is the number of rotated dimensions.
    """

    name: ClassVar[str] = "ntk-aware"

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """See :func:`ntk_rotation`."""
        return ntk_rotation(rotation, factor)


def ntk_rotation(rotation: Rotation, factor: float) -> Rotation:
    """Plane f of p turns slower by factor^(f/(p-1)), which is what the larger base comes to."""
    index = torch.arange(rotation.planes, dtype=torch.float64, device=rotation.inv_freq.device)
    slower = factor ** (index / max(1, rotation.planes - 1))
    return replace(rotation, inv_freq=(rotation.inv_freq.double() / slower).float())


@dataclass(frozen=True)
class DynamicNTK(LengthMethod):
    """Each query sees its keys with NTK-aware frequencies for the text up to it, unchanged up to the training length.

    The factor of the query at index i is ``(i + 1) / trained``, with the excess over the training length rounded up to
    whole steps. It depends on what has been read and not on what is still to come, so that reading a text at once and
    writing it token by token agree; implementations that take the length of the whole pass do not have this property.

    Attributes:
        step: Tokens after which the frequencies change; 1 follows the rule to the letter and is slow.
        trained: Training length.
    """

    name: ClassVar[str] = "dynamic-ntk"
    step: int = 64
    trained: int | None = None

    def __post_init__(self) -> None:
        """Refuse steps that do not go on."""
        positive(self.name, step=self.step, trained=self.trained)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The training length is the model's."""
        del length
        return self if self.trained is not None else replace(self, trained=trained)

    def sight(self, attention: LayerAttention) -> Sight | None:
        """See :meth:`LengthMethod.sight`."""
        trained = settled(self.name, "training length", self.trained)
        if attention.rotation is None or attention.m <= trained:
            return None
        first, start = attention.m - attention.n, 0
        pieces = []
        while start < attention.n:
            steps = max(0, -(-(first + start + 1 - trained) // self.step))
            length = trained + steps * self.step
            rows = slice(start, min(attention.n, length - first))
            pieces.append((rows, ntk_rotation(attention.rotation, length / trained)))
            start = rows.stop
        return Turned(tuple(pieces))


@dataclass(frozen=True)
class YaRN(RescaledMethod):
    """Planes of over 32 turns in training stay, those of under one are slower by the factor, and logits are sharpened.

    Between the two the share of interpolation grows linearly with the plane's index, as in the authors' code, and
    rotated tensors are multiplied by ``0.1 ln(factor) + 1``.

    Attributes:
        fast: Turns over the training length above which a plane keeps its frequency.
        slow: Turns below which it is interpolated in full.
    """

    name: ClassVar[str] = "yarn"
    fast: float = 32.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a ramp that does not fall."""
        super().__post_init__()
        if not self.fast > self.slow > 0:
            raise ConfigError(
                f"{self.name} with fast={self.fast} and slow={self.slow}: fast must be above slow, slow above 0"
            )

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """A ramp over the planes from the model's frequencies to interpolated ones."""
        trained = settled(self.name, "training length", self.trained)
        inv_freq = rotation.inv_freq.double()
        low = max(0, math.floor(_index_of(self.fast, inv_freq, trained)))
        high = min(2 * rotation.planes - 1, math.ceil(_index_of(self.slow, inv_freq, trained)))
        index = torch.arange(rotation.planes, dtype=torch.float64, device=inv_freq.device)
        share = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        mixed = inv_freq * (1 - share) + inv_freq / factor * share
        return replace(rotation, inv_freq=mixed.float(), scaling=rotation.scaling * (0.1 * math.log(factor) + 1))


def _index_of(turns: float, inv_freq: torch.Tensor, trained: int) -> float:
    """Index of the plane that makes so many turns over the training length, by the geometric law of frequencies."""
    log = inv_freq.abs()[inv_freq != 0].log()
    if len(log) < 2:
        return 0.0
    slope = float(log[0] - log[-1]) / (len(log) - 1)
    return (float(log[0]) - math.log(2 * math.pi * turns / trained)) / max(slope, 1e-12)
