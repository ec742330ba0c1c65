"""An upper bound on what a distance, a query and a key term must leave of a head's logits, with its causes.

With ``q = μ_q + δq`` and ``k = μ_k + δk`` before rotation, the logits are four terms: mean × mean is a distance curve;
``δq × μ_k`` is a query term except that its planes turn; ``μ_q × δk`` likewise a key term; ``δq × δk`` is content
times content. Taking out what is additive in closed form leaves a sum of squares that no least-squares fit exceeds.
Statement and proof: ``docs/residual-bound.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wherewhat.measure.axes.margins import diagonal_sums
from wherewhat.measure.axes.region import Band
from wherewhat.measure.planes.layout import Planes
from wherewhat.measure.planes.sums import band_sums, check


@dataclass(frozen=True)
class ResidualBound:
    """Bound on SSE/TSS of the three-axis fit, one entry per head, all ``(heads,)`` float64.

    ``SSE/TSS ≤ bound ≤ from_causes``. NaN where the logits are constant.

    Attributes:
        bound: Share of the variance that the closed-form distance, query and key terms leave, at most 1.
        turning_q: What the turning of query deviations against the mean key leaves, as a share of the variance.
        turning_k: What the turning of key deviations against the mean query leaves.
        content: What the deviations' product leaves once its query and key means are taken out.
    """

    bound: Tensor
    turning_q: Tensor
    turning_k: Tensor
    content: Tensor

    @property
    def from_causes(self) -> Tensor:
        """The bound from the sizes of the three causes alone, ``(√turning_q + √turning_k + √content)²``."""
        return (self.turning_q.sqrt() + self.turning_k.sqrt() + self.content.sqrt()).square()


def residual_bound(rot_q: Tensor, rot_k: Tensor, planes: Planes, *, window: int | None = None) -> ResidualBound:
    """Bound the residual share of ``a[i-j] + b[i] + c[j]`` in time O(n d (d + log n)) a head.

    The share does not depend on the factor on the dot product, so it is not asked for. A bias that is itself additive
    does not change the residual, only the variance it is a share of.

    Args:
        rot_q: Rotated queries, ``(heads, n, d)``, of tokens at consecutive positions.
        rot_k: Rotated keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        planes: Which dimensions form a plane and how fast it turns.
        window: Only distances below this.

    Raises:
        MeasureError: If shapes do not fit, a number is not finite, or there are too few pairs.
    """
    width = check(rot_q, rot_k, window)
    band = Band(rot_q.shape[1], width, rot_q.device)
    # The origin of positions only turns the means along with it: the deviations after rotation stay the same.
    rotor = planes.rotor(torch.arange(band.n, device=rot_q.device))
    groups = rot_q.shape[0] // rot_k.shape[0]
    pieces = [
        _of_key_head(planes.arrange(rot_q[h * groups : (h + 1) * groups]), planes.arrange(key), planes, rotor, band)
        for h, key in enumerate(rot_k)
    ]
    return ResidualBound(**{f.name: torch.cat([getattr(p, f.name) for p in pieces]) for f in fields(ResidualBound)})


def _of_key_head(q: Tensor, k: Tensor, planes: Planes, rotor: Tensor, band: Band) -> ResidualBound:
    """Bounds of arranged ``q`` ``(heads, n, d)`` that read the same arranged ``k`` ``(n, d)``."""
    # Means weighted by how often a token is part of a pair: any means give a bound, these a tighter one.
    _, by_query, by_key = band.unpack(band.counts)
    mean_q = _weighted_mean(planes.to_complex(q) * rotor.conj(), by_query)  # (heads, planes + rest)
    mean_k = _weighted_mean(planes.to_complex(k) * rotor.conj(), by_key)  # (planes + rest,)
    turned_q = planes.to_real(mean_q[:, None] * rotor)
    turned_k = planes.to_real(mean_k * rotor)
    rest_q, rest_k = q - turned_q, k - turned_k

    # Deviations of queries against the mean key: all of a row's mean is a query term.
    sums = band_sums(rest_q, turned_k, band.width)
    b = sums.rows / by_query
    turning_q = sums.squares - (sums.rows * b).sum(-1)
    # Deviations of keys against the mean query: all of a column's mean is a key term.
    sums = band_sums(turned_q, rest_k, band.width)
    c = sums.columns / by_key
    turning_k = sums.squares - (sums.columns * c).sum(-1)
    # Deviations against deviations: row means, then column means of what they leave.
    sums = band_sums(rest_q, rest_k, band.width)
    b_content = sums.rows / by_query
    left = sums.columns - _column_sums(band, b_content)
    c_content = left / by_key
    content = sums.squares - (sums.rows * b_content).sum(-1) - (left * c_content).sum(-1)

    # Means against means, by distance: the rotor at position d is that of distance d.
    a = (mean_q * mean_k.conj())[:, None] * rotor[: band.width]
    candidate = band.pack(a.real.sum(-1), b + b_content, c + c_content)
    logits = band_sums(q, k, band.width)
    margins = band.pack(diagonal_sums(q[None], k[None], band.width)[0], logits.rows, logits.columns)
    image = band.normal(candidate)
    errors = logits.squares - (candidate * (2 * margins - image)).sum(-1)
    # What is left still has a mean at each distance: it belongs to the distance curve.
    left_over = band.unpack(margins - image)[0]
    errors = errors - (left_over.square() / band.unpack(band.counts)[0]).sum(-1)
    tss = logits.squares - logits.rows.sum(-1).square() / band.pairs
    shares = [
        torch.where(logits.varies(tss), x.clamp_min(0) / tss.clamp_min(1e-300), torch.nan)
        for x in (errors, turning_q, turning_k, content)
    ]
    return ResidualBound(shares[0].clamp_max(1), *shares[1:])


def _weighted_mean(z: Tensor, weight: Tensor) -> Tensor:
    """Mean over tokens of ``z`` ``(..., n, planes)`` with ``weight`` ``(n,)``."""
    return (z * (weight / weight.sum())[:, None]).sum(-2)


def _column_sums(band: Band, b: Tensor) -> Tensor:
    """Sums over each key's queries of a query term ``(heads, n)``."""
    nothing = b.new_zeros(b.shape[0], band.width)
    return band.unpack(band.normal(band.pack(nothing, b, torch.zeros_like(b))))[2]
