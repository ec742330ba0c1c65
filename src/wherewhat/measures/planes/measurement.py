"""``wherewhat planes``: what RoPE's planes hold, and the residual of the three-axis fit that this allows at most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.measurement import band_width
from wherewhat.measures.measurement import Curve, LayerScores, Measurement, Metric, option, per_layer
from wherewhat.measures.planes.layout import Planes
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


@dataclass(frozen=True)
class PlanesConfig:
    """Options of the planes measurement."""

    curves: bool = option(True, "store the statistics of every plane")


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


def _need_rotation(layers: Sequence[LayerScores]) -> Mapping[str, float]:
    if not any("slow_dominance" in layer.heads for layer in layers):
        raise MeasureError("no layer of this model rotates its queries and keys: it has no planes; measure its axes")
    return {}


PLANES = Measurement(
    name="planes",
    summary="What RoPE's planes hold of every head's logits, and the non-additive residual this allows at most.",
    config=PlanesConfig,
    measure=per_layer(layer_scores, _need_rotation),
    metrics=(
        Metric(
            "slow_dominance",
            "slow planes",
            "",
            "Share of the logits' variance in planes that turn less than once over the text; the control is the share "
            "of the head's dimensions in them.",
            "slow_dimensions",
            "of dimensions",
        ),
        Metric(
            "q_concentration",
            "q phases alike",
            "",
            "How alike the phases of queries are, planes weighted by their logits; 1: all tokens point the same way.",
            "random_concentration",
            "random phases",
        ),
        Metric(
            "k_concentration",
            "k phases alike",
            "",
            "How alike the phases of keys are, planes weighted by their logits; 1: all tokens point the same way.",
            "random_concentration",
            "random phases",
        ),
        Metric(
            "residual_bound",
            "residual bound",
            "",
            "Most that distance, query and key terms can leave of the variance, by means and turning of the planes; "
            "the control is what they do leave.",
            "residual_share",
            "actual residual",
        ),
        Metric(
            "turning_q",
            "turning of q",
            "",
            "Part of the variance that is query content carried by planes that turn: neither distance nor query.",
        ),
        Metric(
            "turning_k",
            "turning of k",
            "",
            "Part of the variance that is key content carried by planes that turn: neither distance nor key.",
        ),
        Metric(
            "content",
            "content × content",
            "",
            "Part of the variance that is query content times key content: what this query wants of this key.",
        ),
    ),
    limits=(
        "Shares are covariances with the logits: they sum to 1, and a plane that works against the others is negative. "
        "The variance includes differences between queries, which softmax cancels. Slow is relative to the length of "
        "the text. The bound holds for the logits before soft-cap and bias; it says what the planes allow, not why "
        "they were learned."
    ),
)
