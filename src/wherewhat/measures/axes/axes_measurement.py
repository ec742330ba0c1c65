"""Declaration of ``wherewhat axes``: the three-axis fit of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from wherewhat.measures.axes import HIGH_R, AxesConfig
from wherewhat.measures.measurement import LayerMeasurement, Text
from wherewhat.scores import CORRELATION, SHARE, Metric, Scores, stored_metric

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


class AxesMeasurement(LayerMeasurement):
    """``wherewhat axes``."""

    name = "axes"
    revision = 3
    summary = "Fit every head's logits by a distance, a query and a key term."
    config = AxesConfig
    controls = ("random", "shuffled")
    metrics = (
        Metric(
            "r",
            "r",
            "Correlation of logits with a[i-j] + b[i] + c[j]; the control is the r of pure noise.",
            control="noise_floor",
            control_title="noise floor",
            range=SHARE,
        ),
        Metric(
            "pooled_r",
            "pooled r",
            "r over all heads' logits at once, as papers report it. The control is one constant per head, which "
            "softmax does not see.",
            control="pooled_r_means",
            control_title="head means alone",
            range=SHARE,
        ),
        Metric(
            "r_behaviour",
            "r of behaviour",
            "r without the query term, which cancels in softmax: how additive the attention pattern is.",
            control="r_behaviour_gaussian",
            control_title="Gaussian q, k",
            range=SHARE,
        ),
        Metric(
            "r_shared",
            "r, one curve for all",
            "r with one distance curve per head for all documents; close to the control if the curve is the same.",
            control="r_separate",
            control_title="own curves",
            range=CORRELATION,
        ),
        Metric("r_a", "distance alone", "Correlation with a distance curve alone: where.", range=SHARE),
        Metric("r_c", "key alone", "Correlation with a key term alone: what, independent of the query.", range=SHARE),
        Metric("r_bc", "query + key", "Correlation with query and key terms, without distance.", range=SHARE),
        Metric("unique_a", "unique: distance", "Share of variance that only the distance term explains.", range=SHARE),
        Metric("unique_c", "unique: key", "Share of variance that only the key term explains.", range=SHARE),
        Metric("q_rank", "rank of q", "Effective rank of the queries; near 1, additivity is trivial."),
        Metric("k_rank", "rank of k", "Effective rank of the keys; near 1, additivity is trivial."),
        Metric(
            "r2",
            "additive share (r²)",
            "Share of the logits' variance that the three terms explain, r².",
            range=SHARE,
        ),
        Metric("r_median", "r of the median head", "Median of r over heads.", range=SHARE),
        Metric("heads_high_r", f"heads with r > {HIGH_R}", f"Share of heads with r above {HIGH_R}.", range=SHARE),
        Metric(
            "pooled_r_within",
            "pooled r within heads",
            "r over all heads' logits at once, each around the mean of its head; heads with large logits dominate.",
            range=SHARE,
        ),
    )
    stored = (
        *map(stored_metric, ("adjusted_r2", "sse", "tss", "logit_mean", "pairs", "r_shared_pooled")),
        *(stored_metric(name, range=SHARE) for name in ("r_b", "r_ab", "r_ac", "unique_b", "r_gaussian")),
    )
    limits = (
        "A high r alone does not show that anything was learned: in a random deep model all tokens become similar, and "
        "similar tokens are additive. Compare it with the control models, the ranks and r of behaviour. r is a "
        "correlation: the additive share of the logits' variance is r². Neither says how much the rest matters to the "
        "model, which wherewhat residual measures."
    )

    def measure_texts(self, layer: LayerAttention, texts: Sequence[Text], config: AxesConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        from wherewhat.measures.axes.fit import layer_scores

        return layer_scores(layer, config)

    def combine(self, documents: Sequence[Scores], config: AxesConfig) -> Scores:
        """Return scores with one distance curve for all documents."""
        from wherewhat.measures.axes.fit import shared_scores

        return shared_scores(documents)

    def pooled(self, layers: Sequence[Scores]) -> Mapping[str, float]:
        """Return the correlation over the logits of all heads."""
        from wherewhat.measures.axes.fit import pooled_scores

        return pooled_scores(layers)
