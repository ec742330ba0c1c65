"""Declaration of ``wherewhat planes``: contributions of RoPE planes, and a bound on the non-additive part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wherewhat.errors import MeasureError
from wherewhat.measures.measurement import LayerMeasurement, Text
from wherewhat.measures.planes import PlanesConfig
from wherewhat.scores import NON_NEGATIVE, SHARE, Metric, Scores

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


class PlanesMeasurement(LayerMeasurement):
    """``wherewhat planes``."""

    name = "planes"
    summary = "Per-plane contributions to the logits, and an upper bound on the non-additive part."
    config = PlanesConfig
    metrics = (
        Metric(
            "slow_dominance",
            "slow planes",
            "Share of the logits' variance in planes that turn less than once over the text; the control is the share "
            "of the head's dimensions in them.",
            control="slow_dimensions",
            control_title="of dimensions",
        ),
        *(
            Metric(
                f"{x}_concentration",
                f"phase concentration of {x}",
                f"Concentration of the phases of {vectors}, planes weighted by their logits; 1 if all phases are "
                "equal.",
                control="random_concentration",
                control_title="random phases",
                range=SHARE,
            )
            for x, vectors in (("q", "queries"), ("k", "keys"))
        ),
        Metric(
            "residual_bound",
            "residual bound",
            "Upper bound on the share of variance not explained by distance, query and key terms, from the means and "
            "rotation of the planes; the control is the actual share.",
            control="residual_share",
            control_title="actual residual",
            range=NON_NEGATIVE,
        ),
        *(
            Metric(
                f"turning_{x}",
                f"turning of {x}",
                f"Share of the variance from {of} content in planes that turn: neither a distance nor a {of} term.",
            )
            for x, of in (("q", "query"), ("k", "key"))
        ),
        Metric("content", "content × content", "Share of the variance from the product of query and key content."),
    )
    limits = (
        "Shares are covariances with the logits: they sum to 1, and a plane that counteracts the others is negative. "
        "The variance includes differences between queries, which cancel in softmax. Slow is relative to the length of "
        "the text. The bound holds for the logits before soft-cap and bias; it says what the planes allow, not why "
        "they were learned."
    )

    def measure_texts(self, layer: LayerAttention, texts: Sequence[Text], config: PlanesConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        from wherewhat.measures.planes.statistics import layer_scores

        return layer_scores(layer, config)

    def check(self, layers: Sequence[Scores]) -> None:
        """Raise an error if no layer rotates."""
        if not any("slow_dominance" in layer.heads for layer in layers):
            raise MeasureError(
                "no layer of this model rotates its queries and keys: it has no planes; measure its axes"
            )
