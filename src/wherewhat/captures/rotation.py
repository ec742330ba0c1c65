"""Rotary position embedding, identified from the model's computation instead of its config.

Rotary models rotate each pair of query (and key) dimensions by an angle proportional to the position (Su et al., arXiv
2104.09864). Families differ in the dimensions of a pair, in the frequencies and in rescaling, and a wrong guess would
silently corrupt all results per frequency. The description is therefore *identified* from the inputs and outputs of
the model's own rotary function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from wherewhat.options import short_repr

Pairing = Literal["half", "interleaved"]
"""``half`` pairs dimension f with f + planes; ``interleaved`` pairs 2f with 2f + 1."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of the queries and keys of one layer.

    Attributes:
        pairing: Dimensions of the rotated tensor that form a plane.
        offset: First rotated dimension of the head.
        inv_freq: Angle per position of each plane, ``(planes,)`` float32; zero for planes that do not rotate.
        scaling: Factor on the rotated tensor (YaRN and LongRoPE use one; otherwise 1).
    """

    pairing: Pairing
    offset: int
    inv_freq: Tensor
    scaling: float
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    __repr__ = short_repr

    def __str__(self) -> str:
        planes = f"{self.planes} planes"
        return f"{self.pairing}, {planes if self.turning == self.planes else f'{self.turning} of {planes} turn'}"

    @property
    def planes(self) -> int:
        """Number of 2-D planes."""
        return int(self.inv_freq.numel())

    @property
    def turning(self) -> int:
        """Number of planes that rotate; p-RoPE also has planes of frequency 0."""
        return int(self.inv_freq.count_nonzero())

    @property
    def pairs(self) -> Tensor:
        """Dimensions of each plane, ``(planes, 2)``, as indices into the head dimension."""
        index = torch.arange(self.offset + 2 * self.planes)
        return torch.stack([index[half] for half in self.halves], -1)

    @property
    def halves(self) -> tuple[slice, slice]:
        """First and second dimension of all planes, as slices of the head dimension."""
        return _halves(self.pairing, self.offset, 2 * self.planes)

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each plane at each position, ``(..., n, planes)`` float32.

        The product is computed in float32 as in models: at position 100,000 its rounding is noticeable and must be
        reproduced.
        """
        return positions.float()[..., None] * self.frequencies(positions.device)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of each plane on a device, ``(planes,)`` float32."""
        if device not in self._copies:  # a copy to a GPU synchronises with it
            self._copies[device] = self.inv_freq.to(device)
        return self._copies[device]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` ``(..., n, d)`` at ``positions`` ``(..., n)``; returns float32 (float64 if given)."""
        theta = self.angles(positions.to(x.device)).to(_precision(x))
        return self._turned(x, theta.cos(), theta.sin(), factor=self.scaling)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo :meth:`rotate`: return the tensor whose rotation is ``x`` ``(..., n, d)``."""
        theta = self.angles(positions.to(x.device)).to(_precision(x))
        return self._turned(x, theta.cos(), theta.sin(), factor=1 / self.scaling, back=True)

    def moved(self, x: Tensor, at: Tensor, to: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Return what :meth:`unrotate` at positions ``at`` and :meth:`rotate` at ``to`` return, by one rotation.

        Args:
            x: Rotated tensor ``(..., n, d)``.
            at: Its positions ``(..., n)``.
            to: Other positions ``(n,)``.
            rotation: The rotation at the other positions, of the same planes; by default this one.
        """
        other = rotation or self
        theta = other.angles(to.to(x.device)).to(_precision(x))
        return self.moved_by(x, at, theta.cos(), theta.sin(), factor=other.scaling / self.scaling)

    def moved_by(self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, *, factor: float = 1.0) -> Tensor:
        """Return ``x``, rotated at positions ``at``, with the planes rotated back and by other angles, times a factor.

        Cosines and sines are ``(n, planes)``, or ``(planes,)`` for all positions.
        """
        # Each angle is rounded as in the model, so that their difference must not be rounded first.
        theta = self.angles(at.to(x.device)).to(_precision(x))
        own_cos, own_sin = theta.cos(), theta.sin()
        less = torch.addcmul(own_cos * cos, own_sin, sin), torch.addcmul(own_cos * sin, own_sin, cos, value=-1)
        return self._turned(x, *less, factor=factor)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor, *, factor: float, back: bool = False) -> Tensor:
        """Return ``x`` ``(..., n, d)`` with its planes rotated, or rotated back, times a factor, as ``cos`` in dtype.

        By few operations: of a single token, starting them takes longer than they do.
        """
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        x = x.to(cos.dtype)
        left, right = self.halves
        u, v = x[..., left], x[..., right]
        sign = -1 if back else 1
        turned = torch.addcmul(u * cos, v, sin, value=-sign), torch.addcmul(v * cos, u, sin, value=sign)
        planes = torch.cat(turned, -1) if self.pairing == "half" else torch.stack(turned, -1).flatten(-2)
        if planes.shape[-1] == x.shape[-1]:
            return planes
        return torch.cat([x[..., : self.offset], planes, x[..., self.offset + planes.shape[-1] :]], -1)


def over_heads(positions: Tensor) -> Tensor:
    """Return positions ``(n,)`` or ``(batch, n)`` in a shape that broadcasts over heads."""
    return positions if positions.ndim == 1 else positions[:, None]


def _precision(x: Tensor) -> torch.dtype:
    """Return the dtype of rotated tensors: that of ``x``, or float32 if that is more precise."""
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class LiveFrequencies:
    """Current frequencies ``(planes,)`` of a rotary module, and its factor on rotated tensors."""

    inv_freq: Tensor
    scaling: float


@dataclass(frozen=True)
class IdentifiedRotation:
    """A rotation identified from data.

    Attributes:
        rotation: The rotation in the layout of the *rotated* tensor.
        error: Largest deviation of rotated from observed tensors, see :meth:`deviation`.
        source_pairing: Pairing in the tensor before rotation (some families permute dimensions).
    """

    rotation: Rotation
    error: float
    source_pairing: Pairing

    def equals(self, other: IdentifiedRotation) -> bool:
        """Return whether both are the same rotation, whatever their errors."""
        rotation, other_rotation = self.rotation, other.rotation
        layouts = [(x.pairing, x.offset, x.planes, x.scaling) for x in (rotation, other_rotation)]
        same = layouts[0] == layouts[1] and self.source_pairing == other.source_pairing
        return same and torch.equal(rotation.inv_freq, other_rotation.inv_freq)

    def to_rotated_layout(self, before: Tensor) -> Tensor:
        """Reorder a pre-rotation tensor ``(..., d)`` so that ``rotation.rotate`` applies to it."""
        if self.source_pairing == self.rotation.pairing:
            return before
        out = before.clone()
        span = (self.rotation.offset, 2 * self.rotation.planes)
        sources, targets = _halves(self.source_pairing, *span), _halves(self.rotation.pairing, *span)
        for source, target in zip(sources, targets, strict=True):
            out[..., target] = before[..., source]
        return out

    def deviation(self, before: Tensor, after: Tensor, positions: Tensor) -> Tensor:
        """Return the largest deviation of ``after`` from the rotation of ``before``, a scalar tensor.

        The deviation of each pair is relative to its own norm, like the rounding of a rotation; an outlier would hide
        deviations relative to the largest entry. Pairs that are zero are ignored. Both tensors are ``(..., n, d)``;
        ``positions`` broadcast over their tokens.
        """
        rotated = self.rotation.rotate(self.to_rotated_layout(before), positions)
        size = after.to(rotated.dtype).abs()
        left, right = self.rotation.halves
        size[..., left] = size[..., right] = torch.hypot(size[..., left], size[..., right])
        return ((rotated - after).abs() / size.clamp_min(torch.finfo(after.dtype).smallest_normal)).max()


def identify_rotation(
    before: Tensor,
    after: Tensor,
    positions: Tensor,
    *,
    widths: Iterable[int] = (),
    live: Iterable[LiveFrequencies] = (),
) -> IdentifiedRotation:
    """Identify the rotation of ``before`` to ``after``.

    Args:
        before: Input of the model's rotary function, ``(batch, heads, n, d)``.
        after: Output of the same shape.
        positions: Position of each token, ``(n,)``; must contain a step of one.
        widths: Candidate numbers of rotated dimensions besides ``d`` itself (partial rotation).
        live: Frequencies of the model's modules. Those that agree best with the data replace the estimate, which is
            imprecise in half precision and for slow planes in a short prompt.

    Returns:
        The best description; the caller must check its ``error``.
    """
    d = before.shape[-1]
    coarse = before.dtype in (torch.float16, torch.bfloat16)
    before, after = before.detach(), after.detach()
    wide_before, wide_after = before.double(), after.double()
    live = tuple(live)
    best: IdentifiedRotation | None = None
    for width, offset, source, target in _layouts(d, widths, {2 * x.inv_freq.numel() for x in live}):
        z_before, z_after = _complex(wide_before, source, offset, width), _complex(wide_after, target, offset, width)
        scaling, inv_freq = _estimate(z_before, z_after, positions, live, coarse)
        trial = IdentifiedRotation(Rotation(target, offset, inv_freq, scaling), 0.0, source)
        error = float(trial.deviation(wide_before, after, positions))
        if best is None or error < 0.5 * best.error:
            best = replace(trial, error=error)
        if best.error < (8e-3 if coarse else 2e-6):
            break  # as accurate as the dtype allows: the error of a wrong layout is about 1
    assert best is not None
    return best


def _layouts(d: int, widths: Iterable[int], live: set[int]) -> Iterator[tuple[int, int, Pairing, Pairing]]:
    """Yield possible rotated widths, offsets, and pairings before and after, the most common first.

    Widths of live frequencies come before others: in half precision, slow planes are hard to distinguish from
    dimensions that do not rotate.
    """
    pairings: tuple[tuple[Pairing, Pairing], ...] = (
        ("half", "half"),
        ("interleaved", "interleaved"),
        ("interleaved", "half"),
        ("half", "interleaved"),
    )
    possible = {d - d % 2, *(w for w in (*widths, *live) if 2 <= w < d and w % 2 == 0)}
    for width in sorted(possible, key=lambda width: (width not in live, -width)):
        for offset in dict.fromkeys((0, d - width)):
            for source, target in pairings:
                yield width, offset, source, target


def _halves(pairing: Pairing, offset: int, width: int) -> tuple[slice, slice]:
    """Return the first and second dimensions of all planes as slices, which are much faster than indices."""
    end = offset + width
    if pairing == "half":
        return slice(offset, offset + width // 2), slice(offset + width // 2, end)
    return slice(offset, end, 2), slice(offset + 1, end, 2)


def _complex(x: Tensor, pairing: Pairing, offset: int, width: int) -> Tensor:
    left, right = _halves(pairing, offset, width)
    return torch.complex(x[..., left], x[..., right])


def _estimate(
    before: Tensor, after: Tensor, positions: Tensor, live: tuple[LiveFrequencies, ...], coarse: bool
) -> tuple[float, Tensor]:
    """Return scaling and frequencies from complex planes ``(batch, heads, n, planes)``.

    Planes have equal weight, whatever their energy, except those without any, whose frequencies are taken from the
    model's modules.
    """
    energy = before.abs().square().sum((0, 1))
    weight = energy / energy.sum(0).clamp_min(1e-300)  # (n, planes): over each plane's tokens
    turn = (after * before.conj()).sum((0, 1)) / energy.clamp_min(1e-300)  # s·exp(i·angle)
    seen = float(weight.sum())  # planes with energy
    scaling = float((turn.abs() * weight).sum()) / seen if seen else 1.0
    best: tuple[float, float, Tensor] | None = None
    for candidate, sign in itertools.product(live, (1, -1)):  # some families rotate in the opposite direction
        values = sign * candidate.inv_freq.detach().flatten().cpu().float()
        if values.numel() == turn.shape[1]:
            angle = (positions.float().cpu()[:, None] * values).double()  # the product in float32, as in `angles`
            far = (turn.cpu() - torch.polar(torch.full_like(angle, scaling), angle)).abs().square()
            distance = math.sqrt(float((far * weight.cpu()).sum()) / max(seen, 1.0))
            if best is None or distance < best[0]:
                best = (distance, candidate.scaling, values)
    if best is not None and best[0] < (3e-2 if coarse else 1e-3) * scaling:
        named = best[1]
        close = abs(named - scaling) < (1e-2 if coarse else 1e-4)
        return (named if close or not seen else scaling), best[2]
    scaling = 1.0 if abs(scaling - 1) < (1e-2 if coarse else 1e-5) else scaling
    reach = float(positions.max() - positions.min())
    return scaling, _geometric(*_slope(turn, positions), reach, coarse).float()


def _slope(turn: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the angle per position of each plane, and whether the data determine it; both ``(planes,)``.

    Phase differences over doubling baselines: each has twice the resolution of the one before, which removes its 2π
    ambiguity. The angle is zero where the data do not determine it.
    """
    positions = positions.double().cpu()
    turn = turn.cpu()
    n = turn.shape[0]
    slope = torch.zeros(turn.shape[1], dtype=torch.float64)
    shown = torch.ones(turn.shape[1], dtype=torch.bool)
    lag = 1
    while lag < n:
        steps = positions[lag:] - positions[:-lag]
        regular = steps == lag
        if bool(regular.any()):
            product = (turn[lag:] * turn[:-lag].conj())[regular].sum(0)
            shown &= product != 0
            phase = product.angle()
            turns = ((slope * lag - phase) / (2 * torch.pi)).round()
            slope = (phase + 2 * torch.pi * turns) / lag
        lag *= 2
    return torch.where(shown, slope, 0.0), shown


def _geometric(estimate: Tensor, shown: Tensor, reach: float, coarse: bool) -> Tensor:
    """Replace the estimates by a geometric sequence if they are one within their precision.

    RoPE's frequencies are base**(-f/planes). A short prompt determines slow ones poorly and the base accurately, which
    also gives the frequencies of planes that the data do not determine.
    """
    if bool((estimate[shown] < 0).all()) and bool(shown.any()):
        return -_geometric(-estimate, shown, reach, coarse)
    allowed = 5e-2 if coarse else 1e-4
    index = torch.arange(estimate.numel(), dtype=torch.float64)
    # Estimates of very slow planes may be zero or negative; the base is fitted without them.
    clear = shown & (estimate * reach > allowed)
    if int(clear.sum()) < 2 or (bool(shown[0]) and not bool(clear[0])):
        return estimate
    log = torch.where(clear, estimate, 1.0).log()
    weight = torch.where(clear, estimate.square(), 0.0)  # planes have equal absolute, not relative precision
    mean_i = (weight * index).sum() / weight.sum()
    mean_l = (weight * log).sum() / weight.sum()
    slope = (weight * (index - mean_i) * (log - mean_l)).sum() / (weight * (index - mean_i).square()).sum()
    # The first plane rotates by exactly one radian per position unless the frequencies were rescaled.
    first = float(log[0] if clear[0] else mean_l - slope * mean_i)
    anchor = 0.0 if abs(first) * reach < allowed else first
    base = float((-slope * estimate.numel()).exp())
    base = _shortest(base, 1, 5e-3) if coarse else _shortest(base, 4, 1e-6)
    law = (anchor - math.log(base) * index / estimate.numel()).exp() if 0 < base < math.inf else estimate
    return law if float((law - estimate)[shown].abs().max()) * reach < allowed else estimate


def _shortest(value: float, digits: int, precision: float) -> float:
    """Return the shortest number of at most ``digits`` digits within a relative precision: bases are round numbers."""
    rounded = (float(f"{value:.{after}e}") for after in range(digits))
    return next((r for r in rounded if abs(r - value) <= precision * value), value)
