"""Plane statistics and residual bound of a captured layer."""

from __future__ import annotations

import math

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.layer import band_width
from wherewhat.measures.measurement import Curve, LayerScores
from wherewhat.measures.planes.layout import Planes
from wherewhat.measures.planes.measurement import PlanesConfig
from wherewhat.measures.planes.statistics import plane_stats, residual_bound
from wherewhat.measures.tensors import check_single_text

_BY_PLANE = (
    "q_size",
    "k_size",
    "q_concentration",
    "k_concentration",
    "q_alignment",
    "k_alignment",
    "q_direction",
    "k_direction",
    "share",
)


def layer_scores(attention: LayerAttention, config: PlanesConfig) -> LayerScores:
    """Return plane statistics and residual bound of one captured layer; only the bound if it does not rotate.

    Soft-cap and bias are left out: they do not consist of planes.
    """
    check_single_text(attention)
    rot_q, rot_k, window = attention.rot_q[0], attention.rot_k[0], band_width(attention)
    positions = attention.positions.reshape(-1, attention.m)[0]
    if attention.rotation is not None and bool((positions.diff() != 1).any()):
        raise MeasureError(f"positions of layer {attention.layer} are not consecutive, as statistics of planes require")
    planes = Planes.of(attention.rotation, rot_q.shape[-1], device=rot_q.device)
    bound = residual_bound(rot_q, rot_k, planes, window=window)
    fit = fit_axes(rot_q.double(), rot_k.double(), window=window)
    heads = {
        "residual_bound": bound.bound,
        "residual_share": 1 - fit.r.square(),
        "turning_q": bound.turning_q,
        "turning_k": bound.turning_k,
        "content": bound.content,
    }
    whole: dict[str, float] = {}
    curves: dict[str, Curve] = {}
    if attention.rotation is not None:
        stats = plane_stats(rot_q, rot_k, planes, positions=positions, window=window)
        heads["slow_dominance"] = stats.slow_dominance
        heads["q_concentration"] = stats.weighted(stats.q_concentration)
        heads["k_concentration"] = stats.weighted(stats.k_concentration)
        whole["slow_dimensions"] = float(planes.dimensions[stats.slow].sum() / planes.dimensions.sum())
        whole["random_concentration"] = math.sqrt(math.pi / attention.n) / 2
        if config.curves:
            curves = {
                f"plane_{name}": Curve(getattr(stats, name).float().cpu(), ("head", "plane")) for name in _BY_PLANE
            }
            # The inverse of the period, which is infinite for planes that never turn.
            curves["plane_turns_per_token"] = Curve((1 / stats.period).cpu(), ("plane",))
    return LayerScores(attention.layer, {name: x.cpu() for name, x in heads.items()}, whole, curves)
