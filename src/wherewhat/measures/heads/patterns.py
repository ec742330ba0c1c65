"""Attention patterns: slash, previous-token, duplicate, induction and retrieval heads, and rank-one tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import (
    SpreadSums,
    WeightBlock,
    gaussian_rank_one_share,
    rank_one_shares,
    weight_blocks,
)
from wherewhat.measures.heads import PatternConfig
from wherewhat.measures.tensors import check_single_text, per_query_head
from wherewhat.options import short_repr
from wherewhat.scores import Column


@dataclass(frozen=True)
class Slashes:
    """Mean attention weight at every lag Δ = i - j, over all n - Δ pairs of the text.

    Attributes:
        by_lag: ``(heads, lags)`` float64; of all texts of the layer, texts outermost.
        uniform: The same for uniform attention over the visible keys, ``(lags,)`` float64.
        compared: Number of lags, from 0, that the maximum is over: those of at least half of the queries. Larger lags
            have few pairs, and queries that attend to the first token would count as a slash.
    """

    by_lag: Tensor
    uniform: Tensor
    compared: int

    __repr__ = short_repr

    @property
    def largest(self) -> Tensor:
        """Largest mean weight at a lag, ``(heads,)``."""
        return self.by_lag[:, : self.compared].amax(-1)

    @property
    def lag(self) -> Tensor:
        """Lag of the largest mean weight, ``(heads,)`` float64."""
        return self.by_lag[:, : self.compared].argmax(-1).double()

    @property
    def largest_uniform(self) -> Tensor:
        """Largest mean weight of uniform attention, a scalar."""
        return self.uniform[: self.compared].amax()


class SlashSums:
    """Accumulate :class:`Slashes` over blocks of queries.

    Args:
        attention: The layer whose blocks will be added, n queries over n keys.
        max_lag: Largest lag, at most n - 1.
    """

    def __init__(self, attention: LayerAttention, max_lag: int) -> None:
        self.lags = min(attention.n, max_lag + 1)
        self._n = attention.n
        # The last head is uniform attention.
        self._sums = torch.zeros(attention.heads + 1, self.lags, dtype=torch.float64, device=attention.rot_q.device)

    def add(self, block: WeightBlock) -> None:
        """Add the next block."""
        uniform = block.visible / block.seen.clamp_min(1)[:, None]
        self._sums[:-1] += lag_sums(block.weights, block.rows.start, self.lags)
        self._sums[-1:] += lag_sums(uniform[None], block.rows.start, self.lags)

    def result(self) -> Slashes:
        """Return means over the pairs of all blocks."""
        pairs = self._n - torch.arange(self.lags, device=self._sums.device)
        means = self._sums / pairs
        return Slashes(means[:-1], means[-1], compared=min(self.lags, self._n // 2 + 1))


def lag_sums(weights: Tensor, start: int, lags: int) -> Tensor:
    """Return sums over queries of the weights at each lag, ``(heads, lags)``.

    Args:
        weights: Rows ``start``, ``start + 1``, … of attention matrices, ``(heads, rows, m)``.
        start: Index of the first query.
        lags: Number of lags, from 0.
    """
    heads, rows, _ = weights.shape
    first = start - lags + 1  # the key at the largest lag from the first query; before the text if negative
    band = torch.nn.functional.pad(weights[..., max(0, first) : start + rows], (max(0, -first), 0)).contiguous()
    width = band.shape[-1]
    # A row stride of one more than the width makes each sub-diagonal a column.
    skewed = band.as_strided((heads, rows, lags), (rows * width, width + 1, 1))
    return skewed.sum(1).flip(-1)


TARGETS = ("duplicate_token", "induction", "retrieval")


@dataclass(frozen=True)
class TargetMass:
    """Attention on target keys, mean over the queries that see at least one.

    Attributes:
        mass: Mean total weight on the targets, ``(texts · heads,)`` float64; NaN if no query sees a target.
        hits: Share of those queries whose most attended key is a target, ``(texts · heads,)`` float64; NaN likewise.
        uniform: Mean weight of uniform attention on the targets, equal to the share of hits of a random key,
            ``(texts,)``; NaN likewise.
        queries: Number of those queries, ``(texts,)`` float64.
    """

    mass: Tensor
    hits: Tensor
    uniform: Tensor
    queries: Tensor

    __repr__ = short_repr


def target_keys(ids: Tensor, rows: slice) -> Tensor:
    """Return the keys that heads of known kinds attend to, ``(targets, texts, rows, n)`` boolean.

    In the order of ``TARGETS``, for query i and keys j up to i:

    - duplicate token: earlier occurrences of its token, ``j < i`` and ``ids[j] = ids[i]``;
    - induction: the tokens after them, ``ids[j - 1] = ids[i]`` for ``j - 1 < i`` (Olsson et al. 2022, arXiv 2209.11895,
      prefix matching). In a doubled token this is the query itself. Both are the detection patterns of
      TransformerLens' head detector;
    - retrieval: occurrences of the next token, ``ids[j] = ids[i + 1]``: targets of a head that copies it from the
      context (Wu et al. 2024, arXiv 2404.15574, with the text's own next token in place of the generated one). The
      last query has none.

    Args:
        ids: Token ids, ``(texts, n)``.
        rows: Indices of the queries.
    """
    n = ids.shape[1]
    position = torch.arange(n, device=ids.device)
    query = position[rows, None]
    earlier = (ids[:, rows, None] == ids[:, None]) & (position < query)
    followers = torch.nn.functional.pad(earlier, (1, 0))[..., :n]
    following = torch.nn.functional.pad(ids, (0, 1))[:, rows.start + 1 : rows.stop + 1, None]
    copied = (following == ids[:, None]) & (position <= query) & (query < n - 1)
    return torch.stack([earlier, followers, copied])


class TargetSums:
    """Accumulate :class:`TargetMass` of every target over blocks of queries.

    Args:
        attention: The layer whose blocks will be added, n queries over n keys, with the heads of all texts.
        ids: Token ids, ``(texts, n)``.
    """

    def __init__(self, attention: LayerAttention, ids: Tensor) -> None:
        device = attention.rot_q.device
        self._ids = ids.to(device, non_blocking=True)
        shape = len(TARGETS), len(ids), attention.heads // len(ids)
        self._mass, self._hits = torch.zeros(2, *shape, dtype=torch.float64, device=device)
        self._uniform, self._queries = torch.zeros(2, *shape[:2], dtype=torch.float64, device=device)

    def add(self, block: WeightBlock) -> None:
        """Add the next block."""
        targets = target_keys(self._ids, block.rows) & block.visible  # (targets, texts, rows, n)
        weights = torch.unflatten(block.weights, 0, (len(self._ids), -1))  # (texts, heads, rows, n)
        count = targets.sum(-1)
        # One small product per query: (heads, n) times (n, targets).
        mass = weights.transpose(1, 2) @ targets.to(weights.dtype).permute(1, 2, 3, 0)
        best = weights.argmax(-1).mT  # (texts, rows, heads)
        hits = targets.gather(-1, best.expand(len(TARGETS), -1, -1, -1))  # (targets, texts, rows, heads)
        self._mass += mass.double().sum(1).permute(2, 0, 1)
        self._hits += hits.sum(2)
        self._uniform += (count / block.seen.clamp_min(1).double()).sum(-1)
        self._queries += (count > 0).sum(-1)

    def result(self) -> dict[str, TargetMass]:
        """Return means over the queries of all blocks that see a target, by name of the target."""
        # 0 / 0 gives NaN for a target that no query sees.
        queries = self._queries
        mass, hits = ((x / queries[..., None]).flatten(1) for x in (self._mass, self._hits))
        uniform = self._uniform / queries
        return {name: TargetMass(mass[t], hits[t], uniform[t], queries[t]) for t, name in enumerate(TARGETS)}


@dataclass(frozen=True)
class PatternStatistics:
    """Attention patterns of the heads of one layer on its texts; tensors on its device, with all texts' heads.

    Attributes:
        slashes: Attention by lag.
        duplicate_token: Attention on earlier occurrences of the query's token.
        induction: Attention on the tokens after them.
        retrieval: Attention on occurrences of the next token.
        rank_one: Rank-one shares of queries and keys before rotation by metric, ``(heads,)`` float64 each: 1 if all
            tokens are parallel. Centred shares are NaN where all tokens are equal.
        rank_one_gaussian: Rank-one share of Gaussian noise of the same shape.
        spread: Sums for entropy and sink mass.
    """

    slashes: Slashes
    duplicate_token: TargetMass
    induction: TargetMass
    retrieval: TargetMass
    rank_one: dict[str, Tensor]
    rank_one_gaussian: float
    spread: SpreadSums

    __repr__ = short_repr


def pattern_statistics(attention: LayerAttention, ids: Tensor, config: PatternConfig) -> PatternStatistics:
    """Return slash, previous-token, duplicate, induction and retrieval scores, rank-one shares, entropy, sink mass.

    Attention weights are computed once, a block of queries at a time: memory is a small multiple of ``block_mib``, time
    O(n²). In models with a sink column, the weights on keys sum to less than one; the sink column is never the most
    attended key. The first tokens count as keys.

    Args:
        attention: One layer of one or several texts, n queries over n keys.
        ids: Tokens of the texts, ``(texts, n)``.
        config: Options.
    """
    merged = attention.merged
    check_single_text(merged)
    if tuple(ids.shape) != (attention.texts, attention.n):
        raise MeasureError(
            f"ids have the shape {tuple(ids.shape)}, but the layer has {attention.n} tokens of {attention.texts} texts"
        )
    spread = SpreadSums(merged, config.sink_tokens)
    slashes = SlashSums(merged, config.max_lag)
    targets = TargetSums(merged, ids)
    for block in weight_blocks(merged, config.block_mib * attention.texts, check=False):
        for sums in (spread, slashes, targets):
            sums.add(block)
    return PatternStatistics(
        slashes=slashes.result(),
        **targets.result(),
        rank_one=_rank_one(merged),
        rank_one_gaussian=gaussian_rank_one_share(attention.n, attention.rot_q.shape[-1]),
        spread=spread,
    )


def _rank_one(attention: LayerAttention) -> dict[str, Tensor]:
    """Return rank-one shares of queries and keys, with and without their mean, ``(heads,)`` by metric."""
    shares = rank_one_shares(torch.cat([attention.q[0], attention.k[0]]))
    return {
        f"rank_one_{name}{suffix}": values if name == "q" else per_query_head(values, attention)
        for suffix, both in zip(("", "_centred"), shares, strict=True)
        for name, values in zip("qk", torch.split(both, [attention.heads, attention.kv_heads]), strict=True)
    }


def layer_scores(stats: PatternStatistics) -> tuple[dict[str, Tensor], dict[str, float | Tensor], dict[str, Column]]:
    """Return values per head, controls and curves of one layer, for :func:`~wherewhat.measures.tensors.scores_by_text`.

    Undefined values, such as induction in a text without repeated tokens, are NaN.
    """
    slashes = stats.slashes
    targets: dict[str, TargetMass] = {name: getattr(stats, name) for name in TARGETS}
    heads = {"slash_max": slashes.largest, "slash_lag": slashes.lag, "previous_token": slashes.by_lag[:, 1]}
    heads |= {name: target.mass for name, target in targets.items()}
    heads |= {"retrieval_argmax": stats.retrieval.hits} | stats.rank_one
    controls: dict[str, float | Tensor] = {
        "slash_max_uniform": slashes.largest_uniform,
        "previous_token_uniform": slashes.uniform[1],
        **{f"{name}_uniform": target.uniform for name, target in targets.items()},
        "rank_one_gaussian": stats.rank_one_gaussian,
        **stats.spread.controls(),
    }
    curves = {
        "slash": Column(slashes.by_lag.float(), ("head", "lag")),
        "slash_uniform": Column(slashes.uniform.float(), ("lag",)),
    }
    return heads | stats.spread.heads(), controls, curves
