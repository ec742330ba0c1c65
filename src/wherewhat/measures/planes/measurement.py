"""``wherewhat planes``: what RoPE's planes hold, and the residual of the three-axis fit that this allows at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherewhat.measures.measurement import Capacity, LayerMeasurement, LayerScores, Metric, ReportRun
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


@dataclass(frozen=True)
class PlanesConfig:
    """Options of the planes measurement."""

    curves: bool = option(True, "store the statistics of every plane")


class PlanesMeasurement(LayerMeasurement):
    """``wherewhat planes``."""

    name = "planes"
    group = "Decomposition"
    summary = "What RoPE's planes hold of every head's logits, and the non-additive residual this allows at most."
    config = PlanesConfig
    metrics = (
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
    )
    limits = (
        "Shares are covariances with the logits: they sum to 1, and a plane that works against the others is negative. "
        "The variance includes differences between queries, which softmax cancels. Slow is relative to the length of "
        "the text. The bound holds for the logits before soft-cap and bias; it says what the planes allow, not why "
        "they were learned."
    )

    def measure(self, layer: LayerAttention, config: PlanesConfig) -> LayerScores:
        """Return the scores."""
        from wherewhat.measures.planes.layer import layer_scores

        return layer_scores(layer, config)

    def check(self, layers: Sequence[LayerScores]) -> None:
        """Refuse a model none of whose layers rotates."""
        from wherewhat.measures.planes.layer import check_rotation

        check_rotation(layers)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun:
        """Return how a report runs it."""
        return ReportRun(4.0, documents=1, tokens=256)
