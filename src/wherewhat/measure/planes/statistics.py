"""What every RoPE plane holds: magnitudes, how alike the phases are, and its share of the logits' variance."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wherewhat.measure.axes.region import Band
from wherewhat.measure.planes.layout import Planes
from wherewhat.measure.planes.sums import band_sums, check

_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of q worked on at a time."""


@dataclass(frozen=True)
class PlaneStats:
    """Statistics by head and plane; unrotated dimensions together are the last plane.

    Phases are those before rotation. The plane's mean distance curve is ``|μ_q| |μ_k| cos(θ d + φ_q - φ_k)``: it peaks
    where the plane has turned by the difference of the mean directions.

    Attributes:
        q_size: Mean length of the queries in the plane, before rotation, ``(heads, planes)``.
        k_size: The same of the keys each head reads.
        q_concentration: Resultant length of the phases, |E z/|z||: 1 if all tokens point the same way.
        k_concentration: The same of the keys.
        q_alignment: The same with long vectors counting more, |E z| / E|z|.
        k_alignment: The same of the keys.
        q_direction: Mean direction of the phases in radians; NaN for the unrotated dimensions.
        k_direction: The same of the keys.
        share: Covariance of the plane's logits with the logits over their variance. Sums to 1; negative where a plane
            works against the others; NaN where the logits are constant.
        period: Positions in which the plane turns once, ``(planes,)``.
        slow: Whether that is more than the distances looked at, ``(planes,)``.
    """

    q_size: Tensor
    k_size: Tensor
    q_concentration: Tensor
    k_concentration: Tensor
    q_alignment: Tensor
    k_alignment: Tensor
    q_direction: Tensor
    k_direction: Tensor
    share: Tensor
    period: Tensor
    slow: Tensor

    @property
    def slow_dominance(self) -> Tensor:
        """Share of the logits' variance in planes that turn less than once, ``(heads,)``."""
        return self.share[:, self.slow].sum(-1)

    def weighted(self, values: Tensor) -> Tensor:
        """Mean over planes of ``values`` ``(heads, planes)``, weighted with the positive shares, ``(heads,)``."""
        weight = self.share.clamp_min(0)
        return (values * weight).sum(-1) / weight.sum(-1)


def plane_stats(
    rot_q: Tensor, rot_k: Tensor, planes: Planes, *, positions: Tensor | None = None, window: int | None = None
) -> PlaneStats:
    """Statistics of every plane, in time O(n d²) a head.

    Args:
        rot_q: Rotated queries, ``(heads, n, d)``.
        rot_k: Rotated keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        planes: Which dimensions form a plane and how fast it turns.
        positions: Position of each token, ``(n,)``; 0, 1, … by default.
        window: Only distances below this.

    Raises:
        MeasureError: If shapes do not fit, a number is not finite, or there are too few pairs.
    """
    width = check(rot_q, rot_k, window)
    n = rot_q.shape[1]
    back = planes.rotor(torch.arange(n, device=rot_q.device) if positions is None else positions).conj()
    groups = rot_q.shape[0] // rot_k.shape[0]
    # Key heads of one batch: a few on a CPU, where caches are small, all of a small model on a GPU.
    step = max(1, _ENTRIES.get(rot_q.device.type, 2**20) // (groups * n * rot_q.shape[2]))
    by_key = torch.unflatten(rot_q, 0, (-1, groups))
    pieces = [
        _of_key_heads(planes.arrange(by_key[some]), planes.arrange(rot_k[some]), planes, back, width)
        for some in (slice(h, h + step) for h in range(0, len(rot_k), step))
    ]
    joined = {f.name: torch.cat([getattr(piece, f.name) for piece in pieces]) for f in fields(PlaneStats)[:-2]}
    return PlaneStats(**joined, period=planes.period, slow=planes.period > width)


def _of_key_heads(q: Tensor, k: Tensor, planes: Planes, back: Tensor, width: int) -> PlaneStats:
    """Statistics of arranged ``q`` ``(kv_heads, groups, n, d)`` that read arranged ``k`` ``(kv_heads, n, d)``."""
    groups, n = q.shape[1:3]
    sums = band_sums(q, k, width)
    pairs = Band(n, width, q.device).pairs
    total = sums.totals.sum(-1, keepdim=True)
    covariance = sums.products - sums.totals * total / pairs
    variance = covariance.sum(-1, keepdim=True)
    share = torch.where(sums.varies(variance[..., 0])[..., None], planes.by_plane(covariance) / variance, torch.nan)
    of_q = _phases((planes.to_complex(q) * back).flatten(0, 1), planes)
    of_k = (x.repeat_interleave(groups, 0) for x in _phases(planes.to_complex(k) * back, planes))
    q_size, q_concentration, q_alignment, q_direction = of_q
    k_size, k_concentration, k_alignment, k_direction = of_k
    return PlaneStats(
        q_size=q_size,
        k_size=k_size,
        q_concentration=q_concentration,
        k_concentration=k_concentration,
        q_alignment=q_alignment,
        k_alignment=k_alignment,
        q_direction=q_direction,
        k_direction=k_direction,
        share=share.flatten(0, 1),
        period=planes.period,
        slow=planes.period > width,
    )


def _phases(z: Tensor, planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Size, concentration, alignment and direction of unrotated ``z`` ``(heads, n, planes + rest)``, by plane."""
    size = planes.size(z)  # (heads, n, count)
    mean_size = size.mean(1)
    # A vector of length zero has no direction and adds none.
    mean_unit = (z / planes.spread(size.clamp_min(1e-300))).mean(1)
    concentration = planes.size(mean_unit)
    alignment = planes.size(z.mean(1)) / mean_size.clamp_min(1e-300)
    turned = len(planes.turning)
    direction = torch.nn.functional.pad(mean_unit[:, :turned].angle(), (0, planes.count - turned), value=torch.nan)
    scale = torch.ones(planes.count, dtype=torch.float64, device=z.device)
    scale[:turned] = planes.scaling
    return mean_size / scale, concentration, alignment, direction
