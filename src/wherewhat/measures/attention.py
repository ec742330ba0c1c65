"""Attention weights in blocks of queries: entropy, sink mass, effective rank, and attention outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.heads import AttentionConfig
from wherewhat.measures.tensors import effective_rank, gram, largest_eigenvalue, scores_by_text, token_ranks
from wherewhat.options import short_repr
from wherewhat.scores import Scores


def rank_one_share(x: Tensor, *, centred: bool = False) -> Tensor:
    """Return the share of the sum of squares of ``x`` ``(..., n, d)`` in its best rank-one approximation.

    The largest squared singular value over the sum of all: between 1 / min(n, d) and 1 (all tokens parallel). Computed
    from the d×d Gram matrix in float64.

    Args:
        x: Tokens.
        centred: Subtract the mean token first; NaN where all tokens are equal.
    """
    return rank_one_shares(x)[int(centred)]


def rank_one_shares(x: Tensor) -> Tensor:
    """Return :func:`rank_one_share` of ``x`` ``(..., n, d)``, and of ``x`` without its mean, ``(2, ...)``."""
    x = x.double()
    products = torch.stack([gram(x), gram(x - x.mean(-2, keepdim=True))])
    total = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    # Equal tokens without their mean are rounding errors, whose rank is meaningless.
    return torch.where(total > 1e-24 * total[0], largest_eigenvalue(products) / total, torch.nan).clamp_max(1)


@functools.lru_cache(maxsize=64)
def gaussian_rank(n: int, d: int, *, draws: int = 4) -> float:
    """Return the mean effective rank of independent Gaussian tokens ``(n, d)``."""
    return float(effective_rank(_gaussian(n, d, draws)).mean())


@functools.lru_cache(maxsize=64)
def gaussian_rank_one_share(n: int, d: int, *, draws: int = 4) -> float:
    """Return the mean rank-one share of independent Gaussian tokens ``(n, d)``, with or without their mean."""
    return float(rank_one_share(_gaussian(n, d, draws)).mean())


def _gaussian(n: int, d: int, draws: int) -> Tensor:
    return torch.randn(draws, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def query_blocks(attention: LayerAttention, block_mib: int) -> Iterator[slice]:
    """Yield blocks of consecutive queries whose float32 logits take ``block_mib`` MiB, at least one query each."""
    step = max(1, block_mib * 2**20 // (4 * attention.heads * attention.m))
    for start in range(0, attention.n, step):
        yield slice(start, min(attention.n, start + step))


def attention_output(
    attention: LayerAttention, *, block_mib: int = 64, pattern: Callable[[slice], Tensor] | None = None
) -> Tensor:
    """Compute the attention output ``(batch, n, heads, d_v)``, a block of queries at a time.

    Args:
        attention: One layer.
        block_mib: Memory for one block of logits, in MiB.
        pattern: Function that returns the attention weights ``(batch, heads, rows, m)`` of a block of queries; None for
            the layer's own weights.
    """
    pattern = pattern or attention.pattern
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    value = attention.value.to(dtype).repeat_interleave(attention.heads // attention.value.shape[1], 1)
    output = torch.empty(
        value.shape[0], attention.n, attention.heads, value.shape[-1], dtype=dtype, device=value.device
    )
    for block in query_blocks(attention, block_mib):
        output[:, block] = (pattern(block) @ value).transpose(1, 2)
    return output


@dataclass(frozen=True)
class WeightBlock:
    """Attention weights of consecutive queries of one text.

    Attributes:
        rows: Indices of the queries.
        weights: Attention weights, ``(heads, rows, m)``.
        visible: True where a query may see a key, ``(rows, m)``.
        missing: Weight on the model's own sink column, ``(heads, rows)``; zero if it has none.
    """

    rows: slice
    weights: Tensor
    visible: Tensor
    missing: Tensor

    @classmethod
    def of(cls, attention: LayerAttention, rows: slice, weights: Tensor, visible: Tensor) -> WeightBlock:
        """Return a block of a layer with the weight that its sink column takes."""
        missing = torch.zeros_like(weights[..., 0]) if attention.sinks is None else (1 - weights.sum(-1)).clamp_min(0)
        return cls(rows, weights, visible, missing)

    @property
    def seen(self) -> Tensor:
        """Number of keys each query may see, ``(rows,)``."""
        return self.visible.sum(-1)


def weight_blocks(attention: LayerAttention, block_mib: int, *, check: bool = True) -> Iterator[WeightBlock]:
    """Yield the attention weights of all queries of one text, in order, in blocks of ``block_mib`` MiB.

    Queries or keys that are not finite raise an error, unless ``check`` is False: it waits for a GPU.
    """
    if attention.rot_q.shape[0] != 1:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts: measure one text at a time"
        )
    if check and not all(bool(x.isfinite().all()) for x in (attention.rot_q, attention.rot_k)):
        raise MeasureError(
            f"queries or keys of layer {attention.layer} are not finite: the model's activations overflow"
        )
    for rows in query_blocks(attention, block_mib):
        weights = attention.pattern(rows)[0]
        # An additive bias may give heads different masks; they differ only where weights are zero anyway.
        visible = attention.visible(rows)[0].any(0)
        yield WeightBlock.of(attention, rows, weights, visible)


@dataclass(frozen=True)
class AttentionSpread:
    """Entropy and sink mass of the heads of one layer on one document.

    Attributes:
        entropy: Mean entropy of the attention weights over queries that see at least two keys, nats, ``(heads,)``.
        uniform_entropy: The same for uniform attention over the visible keys, and the model's own sink column if it has
            one: the maximum.
        sink_mass: Mean weight on the first tokens over queries after them, ``(heads,)``.
        uniform_sink_mass: The same for uniform attention over the visible keys.
        learned_sink_mass: Mean weight on the model's own sink column, ``(heads,)``; None if it has none.
    """

    entropy: Tensor
    uniform_entropy: float
    sink_mass: Tensor
    uniform_sink_mass: float
    learned_sink_mass: Tensor | None

    __repr__ = short_repr


class SpreadSums:
    """Accumulate :class:`AttentionSpread` over blocks of queries.

    Args:
        attention: The layer whose blocks will be added.
        sink_tokens: Number of first tokens that count as attention sink.
    """

    def __init__(self, attention: LayerAttention, sink_tokens: int) -> None:
        heads, n, device = attention.heads, attention.n, attention.rot_q.device
        if n <= sink_tokens:
            raise MeasureError(f"sink_tokens is {sink_tokens}, but the text has only {n} tokens: give a longer text")
        self.sink_tokens = sink_tokens
        self._learned_sink = attention.sinks is not None
        self._n = n
        self._entropy, self._sink, self._learned = torch.zeros(3, heads, dtype=torch.float64, device=device)
        # Entropy and share of the first tokens of uniform attention, and the number of queries with a choice.
        self._uniform = torch.zeros(3, dtype=torch.float64, device=device)
        self._after_sink = 0

    def add(self, block: WeightBlock) -> None:
        """Add the next block."""
        first = slice(self.sink_tokens)
        late = slice(max(0, self.sink_tokens - block.rows.start), None)  # queries after the first tokens
        seen = block.seen
        nats = torch.special.entr(block.weights).sum(-1)
        if self._learned_sink:
            nats += torch.special.entr(block.missing)
            self._learned += block.missing.sum(-1).double()
        choice = seen >= 2
        self._entropy += nats.masked_fill_(~choice, 0).sum(-1).double()
        self._sink += block.weights[:, late, first].sum((-1, -2)).double()
        # The sink column counts in the entropy, so uniform attention includes it.
        entropy = (seen + self._learned_sink).clamp_min(1).double().log().masked_fill(~choice, 0)
        sink = (block.visible[late, first].sum(-1) / seen[late].clamp_min(1)).double()
        self._uniform += torch.stack([entropy.sum(), sink.sum(), choice.sum().double()])
        self._after_sink += len(sink)

    def heads(self) -> dict[str, Tensor]:
        """Return values per head by metric, means over the queries of all blocks, on the device."""
        deciding = self._uniform[2].clamp_min(1)
        values = {"entropy": self._entropy / deciding, "sink_mass": self._sink / self._after_sink}
        return values | ({"learned_sink_mass": self._learned / self._n} if self._learned_sink else {})

    def controls(self) -> dict[str, Tensor]:
        """Return the values of uniform attention by metric, on the device."""
        entropy, sink, deciding = self._uniform
        return {
            "entropy_uniform": entropy / deciding.clamp_min(1),
            "sink_mass_uniform": sink / self._after_sink,
        }

    def result(self) -> AttentionSpread:
        """Return means over the queries of all blocks."""
        heads = {name: values.cpu() for name, values in self.heads().items()}
        entropy, sink = (float(value) for value in self.controls().values())
        return AttentionSpread(heads["entropy"], entropy, heads["sink_mass"], sink, heads.get("learned_sink_mass"))


@dataclass(frozen=True)
class AttentionStats(AttentionSpread):
    """Statistics of one layer's attention on one document: entropy, sink mass, and rank of queries and keys.

    Attributes:
        q_rank: Effective rank of the queries before rotation, ``(heads,)``.
        k_rank: Effective rank of the keys each head reads, before rotation, ``(heads,)``.
        gaussian_rank: Effective rank of Gaussian noise of the same shape.
    """

    q_rank: Tensor
    k_rank: Tensor
    gaussian_rank: float

    __repr__ = short_repr


def attention_stats(attention: LayerAttention, config: AttentionConfig) -> AttentionStats:
    """Return entropy, sink mass and effective rank of every head of a layer.

    Attention weights are computed a block of queries at a time: memory is ``block_mib``, time O(n²).

    Args:
        attention: One layer, batch 1, n queries over m = n keys.
        config: Options.
    """
    spread = SpreadSums(attention, config.sink_tokens)
    for block in weight_blocks(attention, config.block_mib):
        spread.add(block)
    q_rank, k_rank = (rank.cpu() for rank in token_ranks(attention))
    return AttentionStats(
        **vars(spread.result()),
        q_rank=q_rank,
        k_rank=k_rank,
        gaussian_rank=gaussian_rank(attention.m, attention.rot_k.shape[-1]),
    )


def layer_scores(attention: LayerAttention, config: AttentionConfig) -> list[Scores]:
    """Return entropy, sink mass and ranks of every head of a layer, for each of its texts."""
    merged = attention.merged
    spread = SpreadSums(merged, config.sink_tokens)
    for block in weight_blocks(merged, config.block_mib * attention.texts, check=False):
        spread.add(block)
    q_rank, k_rank = token_ranks(merged)
    return scores_by_text(
        attention,
        heads=spread.heads() | {"q_rank": q_rank, "k_rank": k_rank},
        whole=spread.controls() | {"rank_gaussian": gaussian_rank(attention.m, attention.rot_k.shape[-1])},
    )
