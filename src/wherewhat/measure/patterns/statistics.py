"""Statistics of the patterns that heads are known by, from one captured layer and its tokens, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measure.attention.measurement import AttentionConfig
from wherewhat.measure.attention.rank import gaussian_rank_one_share, rank_one_share
from wherewhat.measure.attention.spread import AttentionSpread, SpreadSums
from wherewhat.measure.attention.weights import weight_blocks
from wherewhat.measure.base import option
from wherewhat.measure.patterns.slashes import Slashes, SlashSums
from wherewhat.measure.patterns.targets import TargetMass, TargetSums


@dataclass(frozen=True)
class PatternConfig(AttentionConfig):
    """Options of the pattern statistics."""

    max_lag: int = option(256, "largest distance between query and key that slashes are looked for at")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        if self.max_lag < 1:
            raise ConfigError(f"max_lag is {self.max_lag}: at least 1 is needed, the previous token")


@dataclass(frozen=True)
class RankOne:
    """Rank-one share of queries and keys before rotation: 1 if all tokens are multiples of one.

    Attributes:
        q: Share of the queries, ``(heads,)`` float64.
        k: Share of the keys each head reads, ``(heads,)`` float64.
        q_centred: Share of what is left of the queries without their mean; NaN where nothing is.
        k_centred: The same of the keys.
        gaussian: Share of Gaussian noise of the same shape.
    """

    q: Tensor
    k: Tensor
    q_centred: Tensor
    k_centred: Tensor
    gaussian: float


@dataclass(frozen=True)
class PatternStatistics:
    """What the heads of one layer do on one document; tensors on the CPU.

    Attributes:
        slashes: Attention by lag.
        duplicate_token: Attention on earlier occurrences of the query's token.
        induction: Attention on what followed them.
        retrieval: Attention on occurrences of the token that comes next.
        rank_one: Rank-one share of queries and keys before rotation.
        spread: Entropy and sink mass.
    """

    slashes: Slashes
    duplicate_token: TargetMass
    induction: TargetMass
    retrieval: TargetMass
    rank_one: RankOne
    spread: AttentionSpread

    @property
    def previous_token(self) -> Tensor:
        """Mean attention on the token before, over the queries that have one, ``(heads,)``."""
        return self.slashes.by_lag[:, 1]

    @property
    def previous_token_uniform(self) -> float:
        """The same for uniform attention."""
        return float(self.slashes.uniform[1])


def pattern_statistics(attention: LayerAttention, ids: Tensor, config: PatternConfig) -> PatternStatistics:
    """Slash, previous-token, duplicate-token, induction and retrieval scores, rank-one shares, entropy, sink mass.

    Attention weights are made once, a block of queries at a time: memory is a small multiple of ``block_mib``,
    time n². Where the model has a sink column of its own, weights sum to less than one and so do scores; the
    most attended key is the most attended *key*. The first tokens count as keys throughout: a head that rests on
    them at a query copies nothing there.

    Args:
        attention: One layer, batch 1, n queries over n keys.
        ids: Tokens of the text, ``(n,)``.
        config: Options.

    Raises:
        MeasureError: If the text has no query after the sink tokens.
        MeasureError: If the layer holds several texts or a cache, ids do not fit, or a number is not finite.
    """
    if attention.rot_q.shape[0] != 1 or attention.n != attention.m:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts and {attention.m} keys for {attention.n} "
            "queries: look at one text at a time, without a cache"
        )
    if tuple(ids.shape) != (attention.n,):
        raise MeasureError(f"ids have the shape {tuple(ids.shape)}, but the layer saw {attention.n} tokens of one text")
    spread = SpreadSums(attention, config.sink_tokens)
    slashes = SlashSums(attention, config.max_lag)
    targets = TargetSums(attention, ids)
    for block in weight_blocks(attention, config.block_mib):
        for sums in (spread, slashes, targets):
            sums.add(block)
    found = PatternStatistics(
        slashes=slashes.result(), **targets.result(), rank_one=_rank_one(attention), spread=spread.result()
    )
    if not bool(found.spread.entropy.isfinite().all()):
        raise MeasureError(f"attention of layer {attention.layer} is not finite: the model's logits overflow")
    return found


def _rank_one(attention: LayerAttention) -> RankOne:
    groups = attention.heads // attention.kv_heads
    q, k = attention.q[0], attention.k[0]
    return RankOne(
        q=rank_one_share(q).cpu(),
        k=rank_one_share(k).repeat_interleave(groups).cpu(),
        q_centred=rank_one_share(q, centred=True).cpu(),
        k_centred=rank_one_share(k, centred=True).repeat_interleave(groups).cpu(),
        gaussian=gaussian_rank_one_share(attention.n, q.shape[-1]),
    )
