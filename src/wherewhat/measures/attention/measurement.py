"""Declaration of ``wherewhat attention``: entropy, sink mass and effective rank per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherewhat.measures.measurement import NON_NEGATIVE, SHARE, LayerMeasurement, LayerScores, Metric, check_minimum
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention

SPREAD_METRICS = (
    Metric(
        "entropy",
        "entropy",
        "Entropy of the attention weights; its exponential is the effective number of keys. The control is uniform "
        "attention.",
        unit="nats",
        control="entropy_uniform",
        control_title="even spread",
        range=NON_NEGATIVE,
    ),
    Metric(
        "sink_mass",
        "sink mass",
        "Share of attention on the first tokens; the control is uniform attention.",
        control="sink_mass_uniform",
        control_title="even spread",
        range=SHARE,
    ),
)


@dataclass(frozen=True)
class AttentionConfig:
    """Options of the attention measurement."""

    sink_tokens: int = option(1, "number of first tokens that count as attention sink")
    block_mib: int = option(32, "memory for one block of attention weights, in MiB")

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 1, "sink_tokens", "block_mib")


class AttentionMeasurement(LayerMeasurement):
    """``wherewhat attention``."""

    name = "attention"
    group = "Heads"
    report = None  # heads holds the same numbers
    revision = 2
    summary = "Attention entropy, sink mass, and effective rank of queries and keys, per head."
    config = AttentionConfig
    metrics = (
        *SPREAD_METRICS,
        Metric(
            "q_rank",
            "rank of q",
            "Effective rank of the queries: 1 if all queries are parallel. The control is Gaussian noise.",
            control="rank_gaussian",
            control_title="noise",
        ),
        Metric(
            "k_rank",
            "rank of k",
            "Effective rank of the keys: 1 if all keys are parallel. The control is Gaussian noise.",
            control="rank_gaussian",
            control_title="noise",
        ),
    )
    limits = (
        "Entropy and sink mass describe the attention weights, not their effect on the output; both depend on the text "
        "and its length. Effective rank counts directions, not their importance for the logits."
    )

    def measure(self, layer: LayerAttention, config: AttentionConfig) -> LayerScores:
        """Return the scores."""
        from wherewhat.measures.attention.weights import layer_scores

        return layer_scores(layer, config)
