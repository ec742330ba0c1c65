"""NTK-aware scaling (bloc97, 2023; formula in Peng et al., arXiv 2309.00071, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from wherewhat.capturing import Rotation
from wherewhat.extend.rescaled import RescaledMethod


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
