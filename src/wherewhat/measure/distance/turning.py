"""Turning the planes of queries and keys, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wherewhat.capturing.rotation import Rotation


def turn(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """``x`` ``(..., d)`` with every plane turned by its angle at ``positions`` ``(...)``, not rescaled; float64.

    The angle is a float64 product, unlike the model's own: a distance may be far beyond the text, where float32
    would round it visibly.
    """
    return turn_planes(
        x, positions.double()[..., None] * rotation.inv_freq.to(positions.device, torch.float64), rotation
    )


def turn_planes(x: Tensor, angles: Tensor, rotation: Rotation) -> Tensor:
    """``x`` ``(..., d)`` with plane f turned by ``angles[..., f]``, broadcast over the leading dimensions; float64."""
    left, right = _sides(rotation)
    out = x.double() + torch.zeros_like(angles[..., :1])  # a copy of the broadcast shape
    u, v = out[..., left], out[..., right]
    cos, sin = angles.cos(), angles.sin()
    out[..., left], out[..., right] = u * cos - v * sin, v * cos + u * sin
    return out


def _sides(rotation: Rotation) -> tuple[slice, slice]:
    """First and second dimension of every plane, as slices: several times faster than indices."""
    step = 2 if rotation.pairing == "interleaved" else 1
    left, right = (slice(start, start + step * rotation.planes, step) for start in rotation.pairs[0].tolist())
    return left, right


def as_they_meet(q: Tensor, rotation: Rotation, scale: float) -> Tensor:
    """Queries ``(..., d)`` with every factor of the logit in them, so that turned queries times keys are logits.

    The rotation rescales queries and keys by ``scaling`` each, in the rotated dimensions only.
    """
    out = q.double() * scale
    rotated = rotation.pairs.flatten().to(q.device)
    out[..., rotated] *= rotation.scaling**2
    return out


def scramble_phases(k: Tensor, rotation: Rotation, *, keep_mean: bool = False, seed: int = 0) -> Tensor:
    """Keys before rotation with a random phase in every plane of every key; magnitudes are kept.

    Args:
        k: Keys, ``(kv_heads, m, d)``. Dimensions that are not rotated stay as they are.
        rotation: Which dimensions form a plane.
        keep_mean: Turn only what differs from the mean key, so that what all keys share stays.
        seed: The phases depend on it and on the shape alone.
    """
    mean = k.double().mean(-2, keepdim=True) if keep_mean else torch.zeros_like(k[..., :1, :], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    phases = torch.rand(*k.shape[:-1], rotation.planes, generator=generator, dtype=torch.float64) * (2 * math.pi)
    return mean + turn_planes(k - mean, phases.to(k.device), rotation)
