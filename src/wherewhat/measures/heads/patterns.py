"""Attention patterns: slash, previous-token, duplicate, induction and retrieval heads, and rank-one tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import (
    AttentionSpread,
    SpreadSums,
    WeightBlock,
    gaussian_rank_one_share,
    rank_one_share,
    weight_blocks,
)
from wherewhat.measures.heads import PatternConfig
from wherewhat.measures.tensors import check_single_text, defined, per_query_head
from wherewhat.options import short_repr
from wherewhat.scores import Column


@dataclass(frozen=True)
class Slashes:
    """Mean attention weight at every lag Δ = i - j, over all n - Δ pairs of the text.

    Attributes:
        by_lag: ``(heads, lags)`` float64.
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
    def largest_uniform(self) -> float:
        """Largest mean weight of uniform attention."""
        return float(self.uniform[: self.compared].amax())


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
        means = (self._sums / pairs).cpu()
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
        mass: Mean total weight on the targets, ``(heads,)`` float64; NaN if no query sees a target.
        hits: Share of those queries whose most attended key is a target, ``(heads,)`` float64; NaN likewise.
        uniform: Mean weight of uniform attention on the targets, equal to the share of hits of a random key; NaN
            likewise.
        queries: Number of those queries.
    """

    mass: Tensor
    hits: Tensor
    uniform: float
    queries: int

    __repr__ = short_repr


def target_keys(ids: Tensor, rows: slice) -> Tensor:
    """Return the keys that heads of known kinds attend to, ``(targets, rows, n)`` boolean.

    In the order of ``TARGETS``, for query i and keys j up to i:

    - duplicate token: earlier occurrences of its token, ``j < i`` and ``ids[j] = ids[i]``;
    - induction: the tokens after them, ``ids[j - 1] = ids[i]`` for ``j - 1 < i`` (Olsson et al. 2022, arXiv 2209.11895,
      prefix matching). In a doubled token this is the query itself. Both are the detection patterns of
      TransformerLens' head detector;
    - retrieval: occurrences of the next token, ``ids[j] = ids[i + 1]``: targets of a head that copies it from the
      context (Wu et al. 2024, arXiv 2404.15574, with the text's own next token in place of the generated one). The
      last query has none.

    Args:
        ids: Token ids, ``(n,)``.
        rows: Indices of the queries.
    """
    n = ids.shape[0]
    position = torch.arange(n, device=ids.device)
    query = position[rows, None]
    earlier = (ids[rows, None] == ids) & (position < query)
    followers = torch.nn.functional.pad(earlier, (1, 0))[:, :n]
    following = ids[(query + 1).clamp_max(n - 1)]
    copied = (following == ids) & (position <= query) & (query < n - 1)
    return torch.stack([earlier, followers, copied])


class TargetSums:
    """Accumulate :class:`TargetMass` of every target over blocks of queries.

    Args:
        attention: The layer whose blocks will be added, n queries over n keys.
        ids: Token ids, ``(n,)``.
    """

    def __init__(self, attention: LayerAttention, ids: Tensor) -> None:
        device = attention.rot_q.device
        self._ids = ids.to(device)
        self._mass, self._hits = torch.zeros(2, len(TARGETS), attention.heads, dtype=torch.float64, device=device)
        self._uniform, self._queries = torch.zeros(2, len(TARGETS), dtype=torch.float64, device=device)

    def add(self, block: WeightBlock) -> None:
        """Add the next block."""
        targets = target_keys(self._ids, block.rows) & block.visible  # (targets, rows, n)
        count = targets.sum(-1)
        # One small product per query: (heads, n) times (n, targets).
        mass = block.weights.transpose(0, 1) @ targets.to(block.weights.dtype).permute(1, 2, 0)
        best = block.weights.argmax(-1)  # (heads, rows)
        hits = targets.gather(-1, best.T.expand(len(TARGETS), -1, -1))  # (targets, rows, heads)
        self._mass += mass.double().sum(0).T
        self._hits += hits.sum(1)
        self._uniform += (count / block.seen.clamp_min(1).double()).sum(-1)
        self._queries += (count > 0).sum(-1)

    def result(self) -> dict[str, TargetMass]:
        """Return means over the queries of all blocks that see a target, by name of the target."""
        # 0 / 0 gives NaN for a target that no query sees.
        queries = self._queries[:, None]
        mass, hits = (self._mass / queries).cpu(), (self._hits / queries).cpu()
        uniform = (self._uniform / self._queries).tolist()
        counts = self._queries.int().tolist()
        return {name: TargetMass(mass[t], hits[t], uniform[t], counts[t]) for t, name in enumerate(TARGETS)}


@dataclass(frozen=True)
class PatternStatistics:
    """Attention patterns of the heads of one layer on one document; tensors on the CPU.

    Attributes:
        slashes: Attention by lag.
        duplicate_token: Attention on earlier occurrences of the query's token.
        induction: Attention on the tokens after them.
        retrieval: Attention on occurrences of the next token.
        rank_one: Rank-one shares of queries and keys before rotation by metric, ``(heads,)`` float64 each: 1 if all
            tokens are parallel. Centred shares are NaN where all tokens are equal.
        rank_one_gaussian: Rank-one share of Gaussian noise of the same shape.
        spread: Entropy and sink mass.
    """

    slashes: Slashes
    duplicate_token: TargetMass
    induction: TargetMass
    retrieval: TargetMass
    rank_one: dict[str, Tensor]
    rank_one_gaussian: float
    spread: AttentionSpread

    __repr__ = short_repr


def pattern_statistics(attention: LayerAttention, ids: Tensor, config: PatternConfig) -> PatternStatistics:
    """Return slash, previous-token, duplicate, induction and retrieval scores, rank-one shares, entropy, sink mass.

    Attention weights are computed once, a block of queries at a time: memory is a small multiple of ``block_mib``, time
    O(n²). In models with a sink column, the weights on keys sum to less than one; the sink column is never the most
    attended key. The first tokens count as keys.

    Args:
        attention: One layer, batch 1, n queries over n keys.
        ids: Tokens of the text, ``(n,)``.
        config: Options.
    """
    check_single_text(attention)
    if tuple(ids.shape) != (attention.n,):
        raise MeasureError(f"ids have the shape {tuple(ids.shape)}, but the layer has {attention.n} tokens of one text")
    spread = SpreadSums(attention, config.sink_tokens)
    slashes = SlashSums(attention, config.max_lag)
    targets = TargetSums(attention, ids)
    for block in weight_blocks(attention, config.block_mib):
        for sums in (spread, slashes, targets):
            sums.add(block)
    statistics = PatternStatistics(
        slashes=slashes.result(),
        **targets.result(),
        rank_one=_rank_one(attention),
        rank_one_gaussian=gaussian_rank_one_share(attention.n, attention.rot_q.shape[-1]),
        spread=spread.result(),
    )
    if not bool(statistics.spread.entropy.isfinite().all()):
        raise MeasureError(f"attention of layer {attention.layer} is not finite: the model's logits overflow")
    return statistics


def _rank_one(attention: LayerAttention) -> dict[str, Tensor]:
    """Return rank-one shares of queries and keys, with and without their mean, ``(heads,)`` by metric."""
    shares = {}
    for suffix, centred in (("", False), ("_centred", True)):
        shares[f"rank_one_q{suffix}"] = rank_one_share(attention.q[0], centred=centred).cpu()
        shares[f"rank_one_k{suffix}"] = per_query_head(rank_one_share(attention.k[0], centred=centred), attention).cpu()
    return shares


def layer_scores(stats: PatternStatistics) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Column]]:
    """Return values per head, controls and curves of one layer, the parts of ``Scores``.

    Undefined values, such as induction in a text without repeated tokens, are NaN; undefined controls are left out.
    """
    slashes = stats.slashes
    targets: dict[str, TargetMass] = {name: getattr(stats, name) for name in TARGETS}
    heads = {"slash_max": slashes.largest, "slash_lag": slashes.lag, "previous_token": slashes.by_lag[:, 1]}
    heads |= {name: target.mass for name, target in targets.items()}
    heads |= {"retrieval_argmax": stats.retrieval.hits} | stats.rank_one
    controls = {
        "slash_max_uniform": slashes.largest_uniform,
        "previous_token_uniform": float(slashes.uniform[1]),
        **{f"{name}_uniform": target.uniform for name, target in targets.items()},
        "rank_one_gaussian": stats.rank_one_gaussian,
        **stats.spread.controls(),
    }
    curves = {
        "slash": Column(slashes.by_lag.float(), ("head", "lag")),
        "slash_uniform": Column(slashes.uniform.float(), ("lag",)),
    }
    return heads | stats.spread.heads(), defined(controls), curves
