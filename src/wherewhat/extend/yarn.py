"""YaRN (Peng et al., arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from wherewhat.capturing import Rotation
from wherewhat.errors import ConfigError
from wherewhat.extend.base import settled
from wherewhat.extend.rescaled import RescaledMethod


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
