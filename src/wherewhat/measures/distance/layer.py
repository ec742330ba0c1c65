"""The ``distance`` measurement: controlled distance on every rotated layer of a model, beside its control."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.distance.controlled import ControlledDistance, controlled_distance, scramble_phases
from wherewhat.measures.distance.measurement import DistanceConfig
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject

FEWEST_TOKENS = 8
"""Half of them are queries' past at least, and a rank correlation over fewer keys than four says nothing."""


def distance_grid(reach: float, *, per_octave: int = 1, beyond: tuple[int, ...] = ()) -> list[int]:
    """Whole distances 0, 1, 2, 4, … up to ``reach``, finer with ``per_octave``, then multiples of ``reach`` + 1."""
    last = int(reach)
    steps = math.floor(math.log2(max(1, last)) * per_octave) + 1
    inside = {0, last, *(min(last, round(2 ** (step / per_octave))) for step in range(steps))}
    return sorted(inside | {times * (last + 1) for times in beyond})


def spaced_queries(n: int, count: int) -> list[int]:
    """Up to ``count`` different queries, evenly spaced from the middle of the text to its end."""
    return sorted(
        {round(x) for x in torch.linspace(n // 2, n - 1, min(count, n - n // 2), dtype=torch.float64).tolist()}
    )


def measure_distance(subject: Subject, ids: Tensor, config: DistanceConfig) -> DocumentScores:
    """Controlled distance of every rotated layer on one document.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        config: Options.
    """
    if ids.shape[-1] < FEWEST_TOKENS:
        raise MeasureError(f"the text has {ids.shape[-1]} tokens: at least {FEWEST_TOKENS} are needed for distances")
    found: list[LayerScores] = []

    def look(attention: LayerAttention) -> None:
        if attention.rotation is not None and bool(attention.rotation.inv_freq.any()):
            found.append(layer_scores(attention, config))

    subject.run(ids, look)
    if not found:
        raise MeasureError("no layer of this model rotates queries and keys: distance does not act through them")
    return DocumentScores(sorted(found, key=lambda scores: scores.layer))


def layer_scores(attention: LayerAttention, config: DistanceConfig) -> LayerScores:
    """Scores and curves of one rotated layer."""
    rotation = attention.rotation
    assert rotation is not None
    positions = attention.positions if attention.positions.ndim == 1 else attention.positions[0]
    queries = spaced_queries(attention.n, config.queries)
    visible = _visible(attention, queries)
    own = positions[attention.m - attention.n :].to(visible.device)[queries]
    apart = own[:, None] - positions.to(visible.device)[None, :]
    grid = distance_grid(float(positions.max() - positions.min()), per_octave=config.per_octave, beyond=config.beyond)
    q, k = attention.q[0], attention.k[0]
    real, scrambled = (
        controlled_distance(
            q,
            keys,
            rotation,
            distances=grid,
            queries=queries,
            scale=attention.scale,
            positions=positions,
            visible=visible,
            within=float(apart[visible].max()),
            reference=config.reference,
            block_mib=config.block_mib,
        )
        for keys in (k, scramble_phases(k, rotation, keep_mean=config.keep_mean, seed=config.seed))
    )
    control = {f"{name}_scrambled": values for name, values in _heads(scrambled).items()}
    axes = ("head", "distance")
    curves = {
        "curve": Curve(real.curve, axes),
        "drift": Curve(real.drift, axes),
        "shape_drift": Curve(real.shape_drift, axes),
        "rank_correlation": Curve(real.rank_correlation, axes),
        "logit_drift": Curve(real.logit_drift, axes),
        "logit_rank_correlation": Curve(real.logit_rank_correlation, axes),
        "rank_correlation_reference": Curve(real.rank_correlation_reference, axes),
        "rank_correlation_scrambled": Curve(scrambled.rank_correlation, axes),
        "drift_scrambled": Curve(scrambled.drift, axes),
        "distances": Curve(real.distances, ("distance",)),
        "within": Curve(real.within, ("distance",)),
    }
    heads = _heads(real) | {"additive_share_spread": real.additive_share_spread} | control
    return LayerScores(layer=attention.layer, heads=heads, curves=curves)


def _heads(found: ControlledDistance) -> dict[str, Tensor]:
    """One number per head: shares, and means of the curves over the distances the layer can see."""
    return {
        "additive_share": found.additive_share,
        "distance_share": found.distance_share,
        "key_share": found.key_share,
        "key_constancy": found.key_constancy,
        "key_rank_correlation": found.rank_correlation[:, found.within].mean(-1),
        "drift": found.drift[:, found.within].mean(-1),
        "shape_drift": found.shape_drift[:, found.within].mean(-1),
        "logit_rank_correlation": found.logit_rank_correlation[:, found.within].mean(-1),
    }


def _visible(attention: LayerAttention, queries: list[int]) -> Tensor:
    """True where a query sees a key in any head, ``(queries, m)``; made a row at a time."""
    rows = [attention.visible(slice(i, i + 1))[0].any(0)[0].expand(attention.m) for i in queries]
    return torch.stack(rows)
