"""The plane with the largest norm: its index as predicted from the trained length, and as measured."""

from __future__ import annotations

import math

from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.frequencies.planes import frequency_ids
from wherewhat.measures.tensors import per_query_head

TURN = 3.657
"""Radians by which the plane of the predicted index turns over the trained length."""


def predicted_band(inv_freq: Tensor, length: int) -> float:
    """Return the predicted index of the plane with the largest norm, counted from 0, the fastest.

    ``j* = d/2 · log_base(L / 3.657)``: the plane that turns by 3.657 radians over the trained length L (ICLR 2026
    submission PR1PPxvG9Q). For frequencies that are not ``base^(-2j/d)`` the index is interpolated between planes, on a
    logarithmic scale, and extrapolated beyond the first and the last of them.

    Args:
        inv_freq: Radians per token of each plane, ``(planes,)``.
        length: Largest distance that the layer was trained on: the trained length, or its window if that is shorter.
    """
    if length < 2:
        raise MeasureError(f"the trained length is {length}: a band of frequencies needs at least 2 tokens")
    turning = inv_freq.abs().double().cpu()
    logs = turning[turning > 0].log().sort(descending=True).values
    if len(logs) < 2 or float(logs[0]) == float(logs[-1]):
        raise MeasureError(f"{len(logs)} planes that turn have no band: at least 2 different frequencies are needed")
    wanted = math.log(TURN / length)
    right = int((logs > wanted).sum().clamp(1, len(logs) - 1))
    left, step = float(logs[right - 1]), float(logs[right - 1] - logs[right])
    return right - 1 + (left - wanted) / step if step > 0 else float(right)


def slower_planes(inv_freq: Tensor, index: float) -> Tensor:
    """Return True for the planes slower than an index of :func:`predicted_band`, ``(planes,)`` bool."""
    return frequency_ids(inv_freq) - 1 > index


def plane_norms(attention: LayerAttention) -> Tensor:
    """Return the mean length of queries times that of keys in each plane, by frequency, ``(heads, planes)`` float64.

    Planes are in the order of frequency, the fastest first. Rotation does not change lengths.
    """
    assert attention.rotation is not None
    pairs = attention.rotation.pairs[attention.rotation.inv_freq.abs().argsort(descending=True, stable=True).cpu()]
    q, k = (
        x[0][..., pairs.to(x.device)].double().square().sum(-1).sqrt().mean(1)  # (heads, planes)
        for x in (attention.rot_q, attention.rot_k)
    )
    return (q * per_query_head(k, attention)).cpu()


def peak_band(norms: Tensor) -> int:
    """Return the index of the plane with the largest mean share over heads of norms ``(heads, planes)``."""
    return int((norms / norms.sum(-1, keepdim=True).clamp_min(1e-300)).mean(0).argmax())
