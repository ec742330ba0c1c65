"""Attention patterns: slash, previous-token, duplicate, induction and retrieval heads, and rank-one tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention.weights import (
    AttentionSpread,
    SpreadSums,
    WeightBlock,
    gaussian_rank_one_share,
    rank_one_share,
    weight_blocks,
)
from wherewhat.measures.heads.measurement import PatternConfig
from wherewhat.measures.measurement import Curve


@dataclass(frozen=True)
class Slashes:
    """Mean attention weight at every lag Δ = i - j, over all n - Δ pairs of the text.

    Attributes:
        by_lag: ``(heads, lags)`` float64.
        uniform: The same for uniform attention over the visible keys, ``(lags,)`` float64.
        compared: Number of lags, from 0, that the maximum is taken over: those that half of the queries or more have.
            At larger lags few pairs are left, and the queries that look at the first token pass for a slash.
    """

    by_lag: Tensor
    uniform: Tensor
    compared: int

    @property
    def largest(self) -> Tensor:
        """The largest mean weight at a lag, ``(heads,)``."""
        return self.by_lag[:, : self.compared].amax(-1)

    @property
    def lag(self) -> Tensor:
        """The lag of the largest mean weight, ``(heads,)`` float64."""
        return self.by_lag[:, : self.compared].argmax(-1).double()

    @property
    def largest_uniform(self) -> float:
        """The largest that uniform attention has."""
        return float(self.uniform[: self.compared].amax())


class SlashSums:
    """Sums behind ``Slashes``, one block of queries after the other.

    Args:
        attention: The layer whose blocks will be added, n queries over n keys.
        max_lag: Largest lag; n - 1 where the text is too short for it.
    """

    def __init__(self, attention: LayerAttention, max_lag: int) -> None:
        self.lags = min(attention.n, max_lag + 1)
        self._n = attention.n
        # Uniform attention is one more head.
        self._sums = torch.zeros(attention.heads + 1, self.lags, dtype=torch.float64, device=attention.rot_q.device)

    def add(self, block: WeightBlock) -> None:
        """Take in the next block."""
        uniform = block.visible / block.seen.clamp_min(1)[:, None]
        self._sums[:-1] += lag_sums(block.weights, block.rows.start, self.lags)
        self._sums[-1:] += lag_sums(uniform[None], block.rows.start, self.lags)

    def result(self) -> Slashes:
        """Means over the pairs of all blocks."""
        pairs = self._n - torch.arange(self.lags, device=self._sums.device)
        means = (self._sums / pairs).cpu()
        return Slashes(means[:-1], means[-1], compared=min(self.lags, self._n // 2 + 1))


def lag_sums(weights: Tensor, start: int, lags: int) -> Tensor:
    """Sums over queries of the weights at each lag, ``(heads, lags)``.

    Args:
        weights: Rows ``start``, ``start + 1``, … of attention matrices, ``(heads, rows, m)``.
        start: Index of the first query.
        lags: Number of lags, from 0.
    """
    heads, rows, _ = weights.shape
    first = start - lags + 1  # the key at the largest lag from the first query; before the text if negative
    band = torch.nn.functional.pad(weights[..., max(0, first) : start + rows], (max(0, -first), 0)).contiguous()
    width = band.shape[-1]
    # One step more than a row makes each sub-diagonal a column of the same storage.
    skewed = band.as_strided((heads, rows, lags), (rows * width, width + 1, 1))
    return skewed.sum(1).flip(-1)


TARGETS = ("duplicate_token", "induction", "retrieval")


@dataclass(frozen=True)
class TargetMass:
    """Attention on target keys, mean over the queries that see at least one.

    Attributes:
        mass: Mean total weight on the targets, ``(heads,)`` float64; NaN if no query sees a target.
        hits: Share of those queries whose most attended key is a target, ``(heads,)`` float64; NaN likewise.
        uniform: Mean weight that uniform attention over the visible keys puts on the targets: also the share of hits
            of a key taken at random. NaN likewise.
        queries: Number of those queries.
    """

    mass: Tensor
    hits: Tensor
    uniform: float
    queries: int


def target_keys(ids: Tensor, rows: slice) -> Tensor:
    """Keys that queries look for, were they heads of a known kind, ``(targets, rows, n)`` boolean.

    In the order of ``TARGETS``, for query i and keys j up to i:

    - duplicate token: earlier occurrences of its token, ``j < i`` and ``ids[j] = ids[i]``;
    - induction: what followed them, ``ids[j - 1] = ids[i]`` for ``j - 1 < i`` (Olsson et al. 2022, arXiv 2209.11895,
      prefix matching). In a doubled token that is the query itself. Both are the detection patterns of
      TransformerLens' head detector;
    - retrieval: the token that comes next, ``ids[j] = ids[i + 1]``: what a head attends to that copies it from the
      context (Wu et al. 2024, arXiv 2404.15574, with the text's own next token in place of the generated one). The
      last query has none.

    Args:
        ids: Token ids, ``(n,)``.
        rows: Which queries.
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
    """Sums behind ``TargetMass`` for every target, one block of queries after the other.

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
        """Take in the next block."""
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
        """Means over the queries of all blocks that see a target, by name of the target."""
        # Zero divided by zero is the NaN of a target that no query sees.
        queries = self._queries[:, None]
        mass, hits = (self._mass / queries).cpu(), (self._hits / queries).cpu()
        uniform = (self._uniform / self._queries).tolist()
        counts = self._queries.int().tolist()
        return {name: TargetMass(mass[t], hits[t], uniform[t], counts[t]) for t, name in enumerate(TARGETS)}


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


def layer_scores(stats: PatternStatistics) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Curve]]:
    """Values per head, controls and curves of one layer, as ``LayerScores`` takes them.

    Values that the text does not define, such as induction where no token comes twice, are NaN; controls that it
    does not define are left out.
    """
    slashes, rank_one = stats.slashes, stats.rank_one
    heads = {
        "slash_max": slashes.largest,
        "slash_lag": slashes.lag,
        "previous_token": stats.previous_token,
        "duplicate_token": stats.duplicate_token.mass,
        "induction": stats.induction.mass,
        "retrieval": stats.retrieval.mass,
        "retrieval_argmax": stats.retrieval.hits,
        "rank_one_q": rank_one.q,
        "rank_one_k": rank_one.k,
        "rank_one_q_centred": rank_one.q_centred,
        "rank_one_k_centred": rank_one.k_centred,
    }
    controls = {
        "slash_max_uniform": slashes.largest_uniform,
        "previous_token_uniform": stats.previous_token_uniform,
        "duplicate_token_uniform": stats.duplicate_token.uniform,
        "induction_uniform": stats.induction.uniform,
        "retrieval_uniform": stats.retrieval.uniform,
        "rank_one_gaussian": rank_one.gaussian,
    }
    controls |= stats.spread.controls()
    curves = {
        "slash": Curve(slashes.by_lag.float(), ("head", "lag")),
        "slash_uniform": Curve(slashes.uniform.float(), ("lag",)),
    }
    defined = {name: value for name, value in controls.items() if not math.isnan(value)}
    return heads | stats.spread.heads(), defined, curves
