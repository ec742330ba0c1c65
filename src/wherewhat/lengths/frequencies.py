"""Methods that change RoPE's frequencies: position interpolation, NTK-aware, dynamic NTK, YaRN."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from wherewhat.caches.visibility import Rescaled, Visibility
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError
from wherewhat.lengths.method import LengthMethod, check_positive, required


@dataclass(frozen=True)
class RescaledMethod(LengthMethod):
    """Every query sees every key before it at its true distance, with other frequencies.

    Attributes:
        factor: Ratio of the longest text to the training length; by default length / training length, at least 1.
        trained: Training length.
    """

    factor: float | None = None
    trained: int | None = None

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """See :meth:`LengthMethod.fitted`."""
        known = replace(self, trained=self.trained or trained)
        return known if length is None else replace(known, factor=known.factor_for(length))

    def factor_for(self, length: int) -> float:
        """Return the factor for a text of ``length`` tokens."""
        if self.factor is not None:
            return self.factor
        return max(1.0, length / required(self.name, "factor or training length", self.trained))

    @abstractmethod
    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """Return the layer's rotation for a factor above 1."""

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        factor = self.factor_for(attention.m)
        if attention.rotation is None or factor == 1:
            return None
        return Rescaled(((slice(0, attention.n), self.rescaled(attention.rotation, factor)),))


@dataclass(frozen=True)
class PositionInterpolation(RescaledMethod):
    """Every distance is divided by the factor: all frequencies are that much slower."""

    name: ClassVar[str] = "position-interpolation"

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """Return the rotation with all frequencies divided by the factor."""
        return _interpolated(rotation, factor)


@functools.lru_cache(maxsize=512)
def _interpolated(rotation: Rotation, factor: float) -> Rotation:
    """Return the rotation with all frequencies divided by the factor.

    Kept, as the other rotations of this module: their frequencies are copied to a GPU once, not for every layer.
    """
    return replace(rotation, inv_freq=rotation.inv_freq / factor)


@dataclass(frozen=True)
class NTKAware(RescaledMethod):
    """The base of the frequencies grows by factor^(d/(d-2)): the fastest plane stays, the slowest slows by the factor.

    d is the number of rotated dimensions.
    """

    name: ClassVar[str] = "ntk-aware"

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """Return :func:`ntk_rotation`."""
        return ntk_rotation(rotation, factor)


@functools.lru_cache(maxsize=4096)
def ntk_rotation(rotation: Rotation, factor: float) -> Rotation:
    """Return the rotation with plane f of p slower by factor^(f/(p-1)), which is equivalent to a larger base."""
    index = torch.arange(rotation.planes, dtype=torch.float64, device=rotation.inv_freq.device)
    slower = factor ** (index / max(1, rotation.planes - 1))
    return replace(rotation, inv_freq=(rotation.inv_freq.double() / slower).float())


@dataclass(frozen=True)
class DynamicNTK(LengthMethod):
    """Each query sees its keys with NTK-aware frequencies for the text up to it, unchanged up to the training length.

    The factor of the query at index i is ``(i + 1) / trained``, with the excess over the training length rounded up to
    whole steps. It depends only on earlier tokens, so that one pass over a text and generation token by token agree;
    implementations that use the length of the whole pass do not have this property.

    Attributes:
        step: Tokens after which the frequencies change; 1 is exact and slow.
        trained: Training length.
    """

    name: ClassVar[str] = "dynamic-ntk"
    step: int = 64
    trained: int | None = None

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """See :meth:`LengthMethod.fitted`."""
        del length
        return self if self.trained is not None else replace(self, trained=trained)

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        trained = required(self.name, "training length", self.trained)
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
        return Rescaled(tuple(pieces))


@dataclass(frozen=True)
class YaRN(RescaledMethod):
    """Planes with over 32 turns in the trained length stay, those with less than one are interpolated by the factor.

    Between the two the share of interpolation grows linearly with the plane's index, as in the authors' code, and
    rotated tensors are multiplied by ``0.1 ln(factor) + 1``, which sharpens the logits.

    Attributes:
        fast: Turns over the training length above which a plane keeps its frequency.
        slow: Turns below which it is interpolated completely.
    """

    name: ClassVar[str] = "yarn"
    fast: float = 32.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        """Refuse invalid parameters, and a ramp that does not fall."""
        check_positive(self.name, factor=self.factor, trained=self.trained)
        if not self.fast > self.slow > 0:
            raise ConfigError(
                f"{self.name} with fast={self.fast} and slow={self.slow}: fast must be above slow, slow above 0"
            )

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """Return the rotation with a linear transition over planes from the model's to interpolated frequencies."""
        trained = required(self.name, "training length", self.trained)
        return _yarn_rotation(rotation, factor, trained, self.fast, self.slow)


@functools.lru_cache(maxsize=512)
def _yarn_rotation(rotation: Rotation, factor: float, trained: int, fast: float, slow: float) -> Rotation:
    inv_freq = rotation.inv_freq.double()
    low = max(0, math.floor(_index_of(fast, inv_freq, trained)))
    high = min(2 * rotation.planes - 1, math.ceil(_index_of(slow, inv_freq, trained)))
    index = torch.arange(rotation.planes, dtype=torch.float64, device=inv_freq.device)
    share = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    mixed = inv_freq * (1 - share) + inv_freq / factor * share
    return replace(rotation, inv_freq=mixed.float(), scaling=rotation.scaling * (0.1 * math.log(factor) + 1))


def _index_of(turns: float, inv_freq: torch.Tensor, trained: int) -> float:
    """Return the index of the plane with that many turns over the training length, if frequencies are geometric."""
    log = inv_freq.abs()[inv_freq != 0].log()
    if len(log) < 2:
        return 0.0
    slope = float(log[0] - log[-1]) / (len(log) - 1)
    return (float(log[0]) - math.log(2 * math.pi * turns / trained)) / max(slope, 1e-12)
