"""Methods with a window: none, sliding window, StreamingLLM, LM-Infinite, InfLLM, ReRoPE, SelfExtend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from wherewhat.caches.attention import FarKeys, rotated_to, score_dtype
from wherewhat.caches.kept_keys import KeptBlocks, is_keeping, keep_blocks, kept_blocks
from wherewhat.caches.visibility import Visibility, Windowed
from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lengths.method import LengthMethod, required


@dataclass(frozen=True)
class Untouched(LengthMethod):
    """Every query sees every key before it at its true distance, as the model itself does."""

    name: ClassVar[str] = "none"
    rotary: ClassVar[bool] = False


@dataclass(frozen=True)
class SlidingWindow(LengthMethod):
    """A query sees the last L keys, itself among them, at their true distances.

    Attributes:
        window: L; by default the training length.
    """

    name: ClassVar[str] = "sliding-window"
    rotary: ClassVar[bool] = False
    window: int | None = None


@dataclass(frozen=True)
class StreamingLLM(LengthMethod):
    """A query sees the first s keys and the last L as if nothing had been between: places are counted in the cache.

    The query at index i is at position ``min(i, s + L - 1)``, first key j at position j: their distance is constant
    once the cache is full, and differs between first keys.

    Attributes:
        sinks: s, the first keys that are kept.
        window: L, the last keys, the query's own among them; by default the training length minus s.
    """

    name: ClassVar[str] = "streaming-llm"
    sinks: int = 4
    window: int | None = None

    def default_window(self, trained: int) -> int:
        """Return the window that makes the cache as long as the training length."""
        return max(1, trained - self.sinks)

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        if attention.m <= window + self.sinks:
            return None
        return Windowed(window, FarKeys.in_place(self.sinks, self.sinks + window - 1))


@dataclass(frozen=True)
class LMInfinite(LengthMethod):
    """A query sees the first s keys and the last L (a Λ-shaped mask), and no distance counts as more than L.

    Attributes:
        sinks: s, the first keys that stay visible.
        window: L, the last keys, the query's own among them, and the cap; by default the training length.
    """

    name: ClassVar[str] = "lm-infinite"
    sinks: int = 10
    window: int | None = None


@dataclass(frozen=True)
class InfLLM(LengthMethod):
    """A query sees the first s keys, the last L, and the best blocks between them, all beyond the window at distance L.

    Keys after the first s are divided into blocks; a block can be retrieved once all of it is at distance L or more. A
    block is represented, per key head, by its keys with the largest summed logits from the L queries after each. For
    each query, blocks are ranked by the dot products of its heads with the representatives at distance L, summed over
    both, which gives one choice for all heads of a layer. Retrieval is per query: a chunk of queries would use later
    tokens (Xiao et al., arXiv 2402.04617).

    Attributes:
        sinks: s, the first keys that stay visible.
        window: L, the last keys, the query's own among them; by default 4,096 or the training length if that is less.
        block: Keys per block.
        top: Number of blocks that a query retrieves.
        representatives: Number of keys that represent a block.
    """

    name: ClassVar[str] = "infllm"
    sinks: int = 128
    window: int | None = None
    block: int = 128
    top: int = 16
    representatives: int = 4

    def __post_init__(self) -> None:
        """Refuse invalid parameters, and more representatives than keys of a block."""
        super().__post_init__()
        if self.representatives > self.block:
            raise ConfigError(
                f"{self.name} with representatives={self.representatives} asks for more than a block of {self.block}"
            )

    def default_window(self, trained: int) -> int:
        """Return the training length, at most 4,096."""
        return min(4096, trained)

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`; cached keys need what is kept of their queries."""
        window = required(self.name, "window", self.window)
        if attention.m <= window and not is_keeping():
            return None
        represented = self._represented(attention, window)
        if attention.m <= window:
            return None
        if represented is None:
            raise MeasureError(
                f"{self.name} needs the queries of all {attention.m} keys and got {attention.n}: run all passes of the "
                "text, and of no other one, inside a wherewhat.lengths.keys_kept() of their own, with a cache that "
                "keeps all keys, or with use_cache=False"
            )
        count = self.sinks + represented.shape[2] * self.block

        def choose(q: Tensor, i: Tensor) -> Tensor:
            seen = torch.ones(q.shape[0], q.shape[2], count, dtype=torch.bool, device=q.device)
            if count > self.sinks:
                seen[..., self.sinks :] = self._retrieved(q, represented, i, window).repeat_interleave(self.block, -1)
            return seen

        return Windowed(window, FarKeys.capped(count, window, choose))

    def _represented(self, attention: LayerAttention, window: int) -> Tensor | None:
        """Return the sum of each finished block's representatives, ``(batch, kv_heads, blocks, d)``.

        None if the queries of cached keys are not known.
        """
        batch, kv_heads, m, d = attention.rot_k.shape
        kept = kept_blocks(attention, self)
        if kept is None:
            if attention.n < m:
                return None
            empty = attention.rot_k.new_empty(batch, kv_heads, 0, d, dtype=score_dtype(attention))
            kept = KeptBlocks(self, 0, (), empty)
        queries = attention.rot_q.reshape(batch, kv_heads, -1, attention.n, d).sum(2, dtype=torch.float64)
        if kept.sums:
            queries[:, :, 0] += kept.sums[-1][:, :, -1]
        sums, represented = (*kept.sums, queries.cumsum(2)), kept.represented
        done, blocks = represented.shape[2], max(0, (m - window - self.sinks) // self.block)
        if blocks > done or len(sums) > self.block:
            running = torch.cat(sums, 2)
            if blocks > done:
                keys = slice(self.sinks + done * self.block, self.sinks + blocks * self.block)
                represented = torch.cat([represented, self._sums_of_best(attention, keys, running, window)], 2)
            # Later blocks need the sums from their first key on, and later sums the last one.
            first = min(self.sinks + blocks * self.block, m - 1)
            sums = (running[:, :, first - m :].clone(),)
        if is_keeping():
            keep_blocks(attention, KeptBlocks(self, m, sums, represented))
        return represented

    def _sums_of_best(self, attention: LayerAttention, keys: slice, running: Tensor, window: int) -> Tensor:
        """Return the sum of the representatives of each block of some keys, ``(batch, kv_heads, blocks, d)``.

        ``running`` are running sums of the queries of the last tokens, those of the keys among them.
        """
        # Sums over the next L queries as differences of running sums; these keys have L queries after them.
        at = slice(keys.start - attention.m + running.shape[2], keys.stop - attention.m + running.shape[2])
        later = running[:, :, at.start + window : at.stop + window] - running[:, :, at]
        scores = torch.unflatten((later * attention.rot_k[:, :, keys]).sum(-1), 2, (-1, self.block))
        best = scores.topk(self.representatives, dim=-1).indices
        j = torch.arange(keys.start, keys.stop, device=best.device)
        k = rotated_to(attention, attention.rot_k[:, :, keys], j, torch.zeros_like(j))
        k = torch.unflatten(k, 2, (-1, self.block))
        return k.gather(3, best[..., None].expand(*best.shape, k.shape[-1])).sum(3)

    def _retrieved(self, q: Tensor, represented: Tensor, i: Tensor, window: int) -> Tensor:
        """Return the blocks that queries at indices ``i`` retrieve at distance L, ``(batch, rows, blocks)`` bool."""
        batch, _, count, d = q.shape
        grouped = q.reshape(batch, represented.shape[1], -1, count, d).sum(2)
        relevance = (grouped @ represented.to(q.dtype).transpose(-1, -2)).sum(1)
        blocks = relevance.shape[-1]
        last = self.sinks + self.block * (1 + torch.arange(blocks, device=q.device)) - 1
        ready = i[:, None] - last >= window
        best = relevance.masked_fill(~ready, -torch.inf).topk(min(self.top, blocks), dim=-1).indices
        return torch.zeros_like(relevance, dtype=torch.bool).scatter_(-1, best, True) & ready


@dataclass(frozen=True)
class ReRoPE(LengthMethod):
    """A query sees every key before it, and no distance counts as more than w.

    Attributes:
        window: w; by default half the training length.
    """

    name: ClassVar[str] = "rerope"
    window: int | None = None

    def default_window(self, trained: int) -> int:
        """Return half the training length."""
        return max(1, trained // 2)

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        if attention.m <= window or attention.rotation is None:
            return None
        return Windowed(window, FarKeys.capped(attention.m, window))


@dataclass(frozen=True)
class SelfExtend(LengthMethod):
    """Distances below w are true, and from w on key j is ``⌊i/G⌋ - ⌊j/G⌋ + w - ⌊w/G⌋`` away from query i.

    Attributes:
        window: w; by default a quarter of the training length.
        group: G; by default the smallest for which all distances of the text are below the training length.
        trained: Training length, needed without a group.
    """

    name: ClassVar[str] = "self-extend"
    window: int | None = None
    group: int | None = None
    trained: int | None = None

    def __post_init__(self) -> None:
        """Refuse invalid parameters, and a window that covers the training length."""
        super().__post_init__()
        if self.group is None and self.window is not None and self.trained is not None and self.window >= self.trained:
            raise ConfigError(
                f"{self.name} with window={self.window} leaves no distance below the training length {self.trained} "
                "for groups: give a smaller window, or a group"
            )

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """See :meth:`LengthMethod.fitted`."""
        known = replace(self, window=self.window or max(1, trained // 4), trained=self.trained or trained)
        return known if length is None else replace(known, group=known.group_for(length))

    def group_for(self, length: int) -> int:
        """Return the group size for a text of ``length`` tokens."""
        if self.group is not None:
            return self.group
        window = required(self.name, "window", self.window)
        trained = required(self.name, "training length", self.trained)
        # The largest distance is ⌊(length - 1)/G⌋ + w - ⌊w/G⌋ and must stay below the training length.
        group = max(1, -(-(length - window) // (trained - window)))
        while (length - 1) // group + window - window // group >= trained and group < length:
            group += 1
        return group

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        group = self.group_for(attention.m)
        if attention.m <= window or group == 1 or attention.rotation is None:
            return None
        shift = window - window // group
        return Windowed(window, FarKeys(attention.m, query=lambda i: i // group + shift, key=_Grouped(group)))


@dataclass(frozen=True)
class _Grouped:
    """Positions ``⌊j/G⌋``, equal for equal G."""

    group: int

    def __call__(self, j: Tensor) -> Tensor:
        return j // self.group
