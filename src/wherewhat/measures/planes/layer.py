"""``wherewhat planes``: what RoPE's planes hold, and the residual of the three-axis fit that this allows at most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.layer import band_width
from wherewhat.measures.measurement import Curve, LayerScores
from wherewhat.measures.planes.layout import Planes
from wherewhat.measures.planes.measurement import PlanesConfig
from wherewhat.measures.planes.statistics import PlaneStats, plane_stats, residual_bound

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
    """Statistics and bound of one captured layer; only the bound where the layer does not rotate.

    Soft-cap and bias are left out: they are not made of planes.
    """
    if attention.rot_q.shape[0] != 1 or attention.n != attention.m:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts and {attention.m} keys for {attention.n} "
            "queries: look at one text at a time, without a cache"
        )
    rot_q, rot_k, window = attention.rot_q[0], attention.rot_k[0], band_width(attention)
    positions = attention.positions.reshape(-1, attention.m)[0]
    if attention.rotation is not None and bool((positions.diff() != 1).any()):
        raise MeasureError(f"positions of layer {attention.layer} are not consecutive: planes need them to be")
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
        curves = _curves(stats) if config.curves else {}
    return LayerScores(attention.layer, {name: x.cpu() for name, x in heads.items()}, whole, curves)


def _curves(stats: PlaneStats) -> dict[str, Curve]:
    curves = {f"plane_{name}": Curve(getattr(stats, name).float().cpu(), ("head", "plane")) for name in _BY_PLANE}
    # Finite, so that it can be stored and plotted: a plane that never turns has frequency zero.
    return curves | {"plane_turns_per_token": Curve((1 / stats.period).cpu(), ("plane",))}


def check_rotation(layers: Sequence[LayerScores]) -> None:
    """Refuse a model none of whose layers rotates."""
    if not any("slow_dominance" in layer.heads for layer in layers):
        raise MeasureError("no layer of this model rotates its queries and keys: it has no planes; measure its axes")
