"""Dimensions of a head grouped by their rotation angle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.options import short_repr


@dataclass(frozen=True)
class Planes:
    """Dimensions of a head grouped by their rotation angle.

    Dimensions are ordered by plane, the first before the second, so that two neighbours are one complex number. The
    unrotated dimensions follow, also in pairs, whose angle is zero; the last has a zero beside it if their number is
    odd. In statistics *by plane*, the unrotated dimensions together are one more plane, the last, that never turns.

    Attributes:
        order: Head dimensions in that order, ``(d,)``.
        turning: Angle per position of each plane, ``(planes,)`` float64.
        rest: Number of unrotated dimensions.
        scaling: Factor of the rotation on the planes.
    """

    order: Tensor
    turning: Tensor
    rest: int
    scaling: float = 1.0

    __repr__ = short_repr

    @classmethod
    def of(cls, rotation: Rotation | None, d: int, *, device: torch.device | None = None) -> Planes:
        """Return the planes of heads with ``d`` dimensions; all are unrotated if ``rotation`` is None.

        Those of recent rotations are kept, because a copy to a GPU waits for it.
        """
        return _planes(rotation, d, device)

    @classmethod
    def _of(cls, rotation: Rotation | None, d: int, device: torch.device | None) -> Planes:
        if rotation is None:
            return cls(torch.arange(d, device=device), torch.zeros(0, dtype=torch.float64, device=device), d)
        turned = rotation.pairs.flatten().tolist()
        if turned and max(turned) >= d:
            raise MeasureError(f"the rotation turns dimension {max(turned)} of heads with {d} dimensions")
        rest = sorted(set(range(d)) - set(turned))
        order = torch.tensor(turned + rest, device=device)
        return cls(order, rotation.inv_freq.double().to(device), len(rest), rotation.scaling)

    @property
    def count(self) -> int:
        """Number of planes, with the unrotated dimensions as one."""
        return len(self.turning) + (self.rest > 0)

    @property
    def dimensions(self) -> Tensor:
        """Number of dimensions of each plane, ``(count,)`` float64."""
        return pad(torch.full_like(self.turning, 2), (0, self.count - len(self.turning)), value=self.rest)

    @property
    def angles(self) -> Tensor:
        """Angle per position of each complex dimension, ``(pairs,)`` float64."""
        return pad(self.turning, (0, (self.rest + 1) // 2))

    @property
    def period(self) -> Tensor:
        """Positions per full turn of each plane, ``(count,)`` float64; infinite if it never turns."""
        never = torch.full((self.count - len(self.turning),), math.inf, dtype=torch.float64, device=self.turning.device)
        return torch.cat([2 * math.pi / self.turning.abs(), never])

    def arrange(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(..., d)`` with its dimensions in order, ``(..., 2 · pairs)``."""
        return pad(x[..., self.order], (0, 1)) if self.rest % 2 else x[..., self.order]

    @staticmethod
    def to_complex(x: Tensor) -> Tensor:
        """Return arranged ``(..., 2 · pairs)`` as complex numbers ``(..., pairs)`` complex128, a view of float64."""
        return torch.view_as_complex(torch.unflatten(x.double(), -1, (-1, 2)))

    @staticmethod
    def to_real(z: Tensor) -> Tensor:
        """Undo :meth:`to_complex`."""
        return torch.view_as_real(z).flatten(-2)

    def rotor(self, positions: Tensor) -> Tensor:
        """Return the complex factors of the rotation, ``(n, pairs)`` complex128, without the scaling."""
        angle = positions.to(self.turning)[:, None] * self.angles
        return torch.polar(torch.ones_like(angle), angle)

    def by_plane(self, values: Tensor) -> Tensor:
        """Return sums over each plane's dimensions of arranged values ``(..., 2 · pairs)``, ``(..., count)``."""
        return self._joined(torch.unflatten(values, -1, (-1, 2)).sum(-1))

    def size(self, z: Tensor) -> Tensor:
        """Return the length of ``z`` ``(..., pairs)`` in each plane, ``(..., count)``."""
        return self._joined(z.abs().square_()).sqrt_() if self.rest else z.abs()

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values by plane ``(..., count)`` for each complex dimension, ``(..., pairs)``."""
        if not self.rest:
            return values
        pairs = (self.rest + 1) // 2
        return torch.cat([values[..., :-1], values[..., -1:].expand(*values.shape[:-1], pairs)], -1)

    def _joined(self, values: Tensor) -> Tensor:
        """Return ``values`` ``(..., pairs)`` with those of the unrotated dimensions added up, ``(..., count)``."""
        turned = len(self.turning)
        if not self.rest:
            return values
        return torch.cat([values[..., :turned], values[..., turned:].sum(-1, keepdim=True)], -1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _planes(rotation: Rotation | None, d: int, device: torch.device | None) -> Planes:
    return Planes._of(rotation, d, device)
