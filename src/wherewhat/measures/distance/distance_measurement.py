"""Declaration of ``wherewhat distance``: controlled distance on every layer that rotates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wherewhat.errors import MeasureError
from wherewhat.measures.distance import DistanceConfig
from wherewhat.measures.measurement import LayerMeasurement, Text
from wherewhat.scores import CORRELATION, NON_NEGATIVE, SHARE, Metric, Scores, stored_metric

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


def _metric(name: str, title: str, reading: str, *, range: tuple[float, float] = SHARE) -> Metric:
    """Return a metric with its value for keys with random phases as control."""
    return Metric(name, title, reading, control=f"{name}_scrambled", control_title="random phases", range=range)


class DistanceMeasurement(LayerMeasurement):
    """``wherewhat distance``."""

    name = "distance"
    summary = "Controlled distance: distance and key terms of logits recomputed at dummy distances."
    config = DistanceConfig
    metrics = (
        _metric(
            "additive_share",
            "additive share",
            "Share of the logits' variance over keys and dummy distances explained by distance plus key; 1 is a pure "
            "sum. The control keeps every magnitude: its value comes from slow planes, not from phases.",
        ),
        _metric(
            "distance_share",
            "distance share",
            "Part of the additive share explained by a distance curve common to all keys.",
        ),
        _metric("key_share", "key share", "Part of the additive share explained by the keys, at any distance."),
        _metric(
            "key_constancy",
            "key constancy",
            "Share of the variance between keys that does not depend on the distance: the additive share without the "
            "distance curve.",
        ),
        _metric(
            "key_rank_correlation",
            "key rank correlation",
            "Rank correlation of keys at a dummy distance with their key component at the real distances; mean over "
            "dummy distances within the text.",
            range=CORRELATION,
        ),
        _metric(
            "drift",
            "drift of the key component",
            "Change of the key component with the distance, relative to its size; 0 is none, √2 that of unrelated "
            "profiles of equal size.",
            range=NON_NEGATIVE,
        ),
        _metric(
            "shape_drift",
            "drift of its shape",
            "The same after rescaling the profile: 1 − cos², from 0 to 1.",
        ),
        _metric(
            "logit_rank_correlation",
            "logit rank correlation",
            "Rank correlation of keys at a dummy distance with the real logits, which also depend on distance.",
            range=CORRELATION,
        ),
    )
    stored = (stored_metric("additive_share_spread", range=NON_NEGATIVE),)
    limits = (
        "Distances are dummies: queries and keys are computed at the real ones. Soft-cap and additive bias are left "
        "out. Layers without rotation have no scores. Slow planes are always nearly additive: compare the shares with "
        "the random phases and with the random model."
    )

    def measure_texts(self, layer: LayerAttention, texts: Sequence[Text], config: DistanceConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        from wherewhat.measures.distance.controlled import layer_scores

        return layer_scores(layer, config)

    def check(self, layers: Sequence[Scores]) -> None:
        """Raise an error if no layer rotates."""
        if not layers:
            raise MeasureError("no layer of this model rotates queries and keys: controlled distance needs rotation")
