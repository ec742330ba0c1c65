"""``wherewhat attention``: entropy, sink mass and effective rank per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import LayerMeasurement, LayerScores, Metric
from wherewhat.options import option

SPREAD_METRICS = (
    Metric(
        "entropy",
        "entropy",
        "nats",
        "How many keys a query spreads over: e to this power; the control is attention that spreads evenly.",
        "entropy_uniform",
        "even spread",
    ),
    Metric(
        "sink_mass",
        "sink mass",
        "",
        "Share of attention parked on the first tokens; the control is what even attention would put there.",
        "sink_mass_uniform",
        "even spread",
    ),
)

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


@dataclass(frozen=True)
class AttentionConfig:
    """Options of the attention measurement."""

    sink_tokens: int = option(1, "number of first tokens that count as attention sink")
    block_mib: int = option(32, "memory for one block of attention weights, in MiB")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.sink_tokens < 1:
            raise ConfigError(f"sink_tokens is {self.sink_tokens}: at least 1 token is needed")
        if self.block_mib < 1:
            raise ConfigError(f"block_mib is {self.block_mib}: at least 1 MiB is needed")


class AttentionMeasurement(LayerMeasurement):
    """``wherewhat attention``."""

    name = "attention"
    group = "Heads"
    revision = 2
    summary = "Attention entropy, sink mass and effective rank of queries and keys, per head."
    config = AttentionConfig
    metrics = (
        *SPREAD_METRICS,
        Metric(
            "q_rank",
            "rank of q",
            "",
            "How many directions the queries use; the control is noise. Near 1, all tokens ask the same question.",
            "rank_gaussian",
            "noise",
        ),
        Metric(
            "k_rank",
            "rank of k",
            "",
            "How many directions the keys use; the control is noise. Near 1, all tokens look alike.",
            "rank_gaussian",
            "noise",
        ),
    )
    limits = (
        "Entropy and sink mass describe where attention goes, not what it does to the output; both depend on the "
        "text and its length. Effective rank counts directions, not how much they matter to the logits."
    )

    def measure(self, layer: LayerAttention, config: AttentionConfig) -> LayerScores:
        """Return the scores."""
        from wherewhat.measures.attention.weights import layer_scores

        return layer_scores(layer, config)
