"""A head as a set of planes: which dimensions turn together, how fast, and which do not turn at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.rotation import Rotation
from wherewhat.errors import MeasureError


@dataclass(frozen=True)
class Planes:
    """Dimensions of a head grouped by the angle they turn by.

    Dimensions are put in the order: first of every plane, unrotated ones, second of every plane. As complex numbers
    these are the planes followed by the unrotated dimensions, whose imaginary part and angle are zero. In statistics
    *by plane*, the unrotated dimensions together are one more plane, the last, that never turns.

    Attributes:
        order: Head dimensions in that order, ``(d,)``.
        turning: Angle per position of each plane, ``(planes,)`` float64.
        rest: Number of unrotated dimensions.
        scaling: Factor that rotation puts on the planes.
    """

    order: Tensor
    turning: Tensor
    rest: int
    scaling: float = 1.0

    @classmethod
    def of(cls, rotation: Rotation | None, d: int, *, device: torch.device | None = None) -> Planes:
        """The planes of heads with ``d`` dimensions; all of them are unrotated where ``rotation`` is None.

        Raises:
            MeasureError: If the rotation turns dimensions that the head does not have.
        """
        if rotation is None:
            return cls(torch.arange(d, device=device), torch.zeros(0, dtype=torch.float64, device=device), d)
        first, second = rotation.pairs.T
        if rotation.planes and int(second.max()) >= d:
            raise MeasureError(f"the rotation turns dimension {int(second.max())} of heads with {d} dimensions")
        turned = set(rotation.pairs.flatten().tolist())
        rest = torch.tensor([x for x in range(d) if x not in turned], dtype=first.dtype)
        order = torch.cat([first, rest, second]).to(device)
        return cls(order, rotation.inv_freq.double().to(device), len(rest), rotation.scaling)

    @property
    def count(self) -> int:
        """Number of planes, the unrotated dimensions being one."""
        return len(self.turning) + (self.rest > 0)

    @property
    def dimensions(self) -> Tensor:
        """Dimensions of each plane, ``(count,)`` float64."""
        return self.by_plane(torch.ones(len(self.order), dtype=torch.float64, device=self.turning.device))

    @property
    def period(self) -> Tensor:
        """Positions in which each plane turns once, ``(count,)`` float64; infinite where it never does."""
        never = torch.full((self.count - len(self.turning),), math.inf, dtype=torch.float64, device=self.turning.device)
        return torch.cat([2 * math.pi / self.turning.abs(), never])

    def arrange(self, x: Tensor) -> Tensor:
        """Dimensions of ``x`` ``(..., d)`` in order, float64."""
        return x[..., self.order].double()

    def to_complex(self, x: Tensor) -> Tensor:
        """Arranged ``(..., d)`` as planes and unrotated dimensions, ``(..., planes + rest)`` complex128."""
        count = len(self.turning) + self.rest
        return torch.complex(x[..., :count].contiguous(), torch.nn.functional.pad(x[..., count:], (0, self.rest)))

    def to_real(self, z: Tensor) -> Tensor:
        """Undo :meth:`to_complex`."""
        return torch.cat([z.real, z.imag[..., : len(self.turning)]], -1)

    def rotor(self, positions: Tensor) -> Tensor:
        """What rotation multiplies with, ``(n, planes + rest)`` complex128, without the scaling."""
        angle = positions.to(self.turning)[:, None] * torch.nn.functional.pad(self.turning, (0, self.rest))
        return torch.polar(torch.ones_like(angle), angle)

    def by_plane(self, values: Tensor) -> Tensor:
        """Sums over each plane's dimensions of arranged values ``(..., d)``, ``(..., count)``."""
        turned = len(self.turning)
        planes = values[..., :turned] + values[..., turned + self.rest :]
        rest = values[..., turned : turned + self.rest]
        return torch.cat([planes, rest.sum(-1, keepdim=True)], -1) if self.rest else planes

    def size(self, z: Tensor) -> Tensor:
        """Length of ``z`` ``(..., planes + rest)`` in each plane, ``(..., count)``."""
        size = z.abs()
        turned, rest = size[..., : len(self.turning)], size[..., len(self.turning) :]
        return torch.cat([turned, rest.square().sum(-1, keepdim=True).sqrt()], -1) if self.rest else size

    def spread(self, values: Tensor) -> Tensor:
        """Values by plane ``(..., count)`` as one for each complex dimension, ``(..., planes + rest)``."""
        if not self.rest:
            return values
        return torch.cat([values[..., :-1], values[..., -1:].expand(*values.shape[:-1], self.rest)], -1)
