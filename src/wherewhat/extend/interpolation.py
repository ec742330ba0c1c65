"""Position interpolation (Chen et al., arXiv 2306.15595)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from wherewhat.capturing import Rotation
from wherewhat.extend.rescaled import RescaledMethod


@dataclass(frozen=True)
class PositionInterpolation(RescaledMethod):
    """Every distance is divided by the factor: all frequencies are that much slower."""

    name: ClassVar[str] = "position-interpolation"

    def rescaled(self, rotation: Rotation, factor: float) -> Rotation:
        """All planes turn slower alike."""
        return replace(rotation, inv_freq=rotation.inv_freq / factor)
