"""``wherewhat attention``: entropy, sink mass and effective rank, the first look at a model's heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measure.attention.rank import effective_rank, gaussian_rank
from wherewhat.measure.attention.spread import SPREAD_METRICS, AttentionSpread, SpreadSums
from wherewhat.measure.attention.weights import weight_blocks
from wherewhat.measure.base import LayerScores, Measurement, Metric, option, per_layer


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


@dataclass(frozen=True)
class AttentionStats(AttentionSpread):
    """Statistics of one layer's attention on one document: its spread, and the rank of queries and keys.

    Attributes:
        q_rank: Effective rank of the queries before rotation, ``(heads,)``.
        k_rank: Effective rank of the keys each head reads, before rotation, ``(heads,)``.
        gaussian_rank: Effective rank of Gaussian noise of the same shape: tokens that have nothing in common.
    """

    q_rank: Tensor
    k_rank: Tensor
    gaussian_rank: float


def attention_stats(attention: LayerAttention, config: AttentionConfig) -> AttentionStats:
    """Entropy, sink mass and effective rank of every head of a layer.

    Attention weights are made a block of queries at a time: memory is ``block_mib``, time n².

    Args:
        attention: One layer, batch 1, n queries over m = n keys.
        config: Options.

    Raises:
        MeasureError: If the layer holds several texts, its queries or keys are not finite, or the text has no query
            after the sink tokens.
    """
    spread = SpreadSums(attention, config.sink_tokens)
    for block in weight_blocks(attention, config.block_mib):
        spread.add(block)
    groups = attention.heads // attention.kv_heads
    return AttentionStats(
        **vars(spread.result()),
        q_rank=effective_rank(attention.q[0]).cpu(),
        k_rank=effective_rank(attention.k[0]).repeat_interleave(groups).cpu(),
        gaussian_rank=gaussian_rank(attention.m, attention.rot_k.shape[-1]),
    )


def _scores(attention: LayerAttention, config: AttentionConfig) -> LayerScores:
    stats = attention_stats(attention, config)
    heads = stats.heads() | {"q_rank": stats.q_rank, "k_rank": stats.k_rank}
    for name, values in heads.items():
        if not bool(values.isfinite().all()):
            raise MeasureError(f"{name} of layer {attention.layer} is not finite: the model's activations overflow")
    return LayerScores(
        layer=attention.layer,
        heads=heads,
        whole=stats.controls() | {"rank_gaussian": stats.gaussian_rank},
    )


ATTENTION = Measurement(
    name="attention",
    revision=2,
    summary="Attention entropy, sink mass and effective rank of queries and keys, per head.",
    config=AttentionConfig,
    measure=per_layer(_scores),
    metrics=(
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
    ),
    limits=(
        "Entropy and sink mass describe where attention goes, not what it does to the output; both depend on the "
        "text and its length. Effective rank counts directions, not how much they matter to the logits."
    ),
)
