"""A method that follows positions near the query and contents far from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from wherewhat.caches.attention import (
    ChosenKeys,
    FarKeys,
    KeySet,
    attend_sets,
    check_unpadded,
    empty_output,
    gathered,
    only_causal,
    query_blocks,
    row_indices,
    score_dtype,
    set_scores,
)
from wherewhat.caches.kept_keys import rotated_keys
from wherewhat.caches.kernels import MOST_FAR, attend_on_gpu, kernel_available, merge_attention, merged_attention
from wherewhat.caches.plan import Plan
from wherewhat.caches.visibility import Queries, Visibility, Windowed, attend_by_heads, query_rows
from wherewhat.captures.attention import LayerAttention, Rows, shared_product
from wherewhat.captures.proof import Proof
from wherewhat.captures.rotation import Rotation, over_heads
from wherewhat.errors import ConfigError
from wherewhat.lengths.method import LengthMethod, check_positive, required
from wherewhat.lengths.selection import PlaneFactors, add_far_keys, can_search, plane_factors
from wherewhat.numerics import constant_tensor

Judged = Literal["averaged", "capped"]
"""How a far key is judged: by its logit averaged over distances 0 to L, or by that at distance L."""

_TOKENS = ("sinks", "window", "distance", "sink_distance", "top")
"""Parameters of the method that are numbers of tokens."""


@dataclass(frozen=True)
class NearFar(LengthMethod):
    """A query sees the first s keys and the last L; heads of the plan also see the k far keys with the highest content.

    The content of a pair is its logit averaged over the distances 0 to L: each plane of the query is multiplied by the
    mean of ``exp(i d θ)``, so that fast planes vanish and slow ones stay. Keys beyond the window are seen at
    distance L.

    Attributes:
        sinks: s, the first keys that stay visible.
        window: L, the last keys, the query's own among them; by default half the training length.
        distance: Distance at which far keys are seen; by default L. Nearer, more is found, and the loss rises.
        top: k, the number of far keys that a query of a head sees.
        chosen: Logit by which far keys are chosen.
        seen: Logit that they have in the softmax.
        margin: Far keys with a logit this much below the best other one are left out; None for no such limit.
        plan: Plan whose heads with full attention look far; None for all heads.
        sink_distance: Largest distance at which the first keys are seen: a query before that index sees them at their
            true distances, later ones as the query at it. By default all are at the distance of far keys.
    """

    name: ClassVar[str] = "near-far"
    sinks: int = 4
    window: int | None = None
    distance: int | None = None
    top: int = 4
    chosen: Judged = "averaged"
    seen: Judged = "capped"
    margin: float | None = None
    plan: Plan | None = None
    sink_distance: int | None = None

    def __post_init__(self) -> None:
        """Refuse invalid parameters."""
        for name in _TOKENS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ConfigError(f"{self.name} with {name}={value!r}: give a whole number of tokens")
        if self.margin is not None and not (isinstance(self.margin, int | float) and self.margin >= 0):
            raise ConfigError(f"{self.name} with margin={self.margin!r}: give a number of 0 or more, or None")
        if not isinstance(self.plan, Plan | None):
            raise ConfigError(f"{self.name} with plan={self.plan!r}: give a Plan, such as Plan.load(file)")
        check_positive(self.name, **{name: getattr(self, name) for name in _TOKENS})
        if self.sink_distance is not None and self.sink_distance < self.sinks - 1:
            raise ConfigError(
                f"{self.name} with sink_distance={self.sink_distance} and sinks={self.sinks} puts first keys after the "
                f"query: give a sink_distance of at least {self.sinks - 1}"
            )
        for name in ("chosen", "seen"):
            if getattr(self, name) not in ("averaged", "capped"):
                raise ConfigError(f"{self.name} with {name}={getattr(self, name)!r}: choose averaged or capped")

    @property
    def is_open(self) -> bool:
        """See :attr:`LengthMethod.is_open`."""
        return self.window is None

    def default_window(self, trained: int) -> int:
        """Return half the training length."""
        return max(1, trained // 2)

    def check_model(self, model: nn.Module, proof: Proof) -> None:
        """See :meth:`LengthMethod.check_model`; the plan must be of this model."""
        super().check_model(model, proof)
        if self.plan is not None:
            self.plan.check(model, proof, advice="")

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        if attention.m <= window:
            return None
        near = Windowed(window, self.first_keys())
        looking = self.looking(attention)
        if not any(looking) or attention.m <= window + self.sinks:
            return near
        return _NearFar(self, near, looking)

    def distances(self, kind: Judged) -> tuple[int, int]:
        """Return the first and the last of the distances over which a logit of far keys is averaged."""
        window = required(self.name, "window", self.window)
        distance = self.distance or window
        return (0, window) if kind == "averaged" else (distance, distance)

    def first_keys(self) -> FarKeys:
        """Return how queries see the first keys from beyond the window."""
        if self.sink_distance is not None:
            return FarKeys.in_place(self.sinks, self.sink_distance)
        return FarKeys.capped(self.sinks, self.distances("capped")[0])

    def looking(self, attention: LayerAttention) -> tuple[bool, ...]:
        """Return for each head of a layer whether it looks far."""
        if self.plan is None:
            return (True,) * attention.heads
        looking = self.plan.full_heads(attention.layer)
        if looking and len(looking) != attention.heads:
            raise ConfigError(
                f"layer {attention.layer} has {attention.heads} heads, and {len(looking)} in the plan of "
                f"{self.plan.model}: make a plan of this model"
            )
        return looking or (False,) * attention.heads


@dataclass(frozen=True)
class _NearFar:
    """Keys that queries see under :class:`NearFar`: those of the window and the first, and far ones of some heads."""

    method: NearFar
    near: Windowed
    looking: tuple[bool, ...]

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """See :class:`Visibility`."""
        check_unpadded(attention)
        if self._searchable(attention):
            return self._attend_by_search(attention)

        def attend(part: LayerAttention, near: bool) -> Tensor:
            return (self.near.attend if near else self._attend_far)(part, block_mib=block_mib)

        return attend_by_heads(attention, [not looks for looks in self.looking], attend)

    def _searchable(self, attention: LayerAttention) -> bool:
        """Return whether a GPU can search the far keys without computing all their logits."""
        method = self.method
        plain = method.margin is None and only_causal(attention)
        return plain and method.sinks <= MOST_FAR and can_search(attention, self.near.window, method.top)

    def _attend_by_search(self, attention: LayerAttention) -> Tensor:
        """Return the output of all heads, to which those that look far add keys that they search."""
        method, window = self.method, self.near.window
        device, d = attention.rot_q.device, attention.rot_q.shape[-1]
        lse = torch.empty(attention.rot_q.shape[:3], dtype=torch.float32, device=device)
        output = attend_on_gpu(attention, window, self.near.far, lse=lse)

        def factors(kind: Judged) -> PlaneFactors:
            first, last = method.distances(kind)
            return plane_factors(attention.rotation, torch.arange(first, last + 1, device=device), d)

        add_far_keys(
            attention,
            output.transpose(1, 2),
            lse,
            heads=tuple(head for head, looks in enumerate(self.looking) if looks),
            first=method.sinks,
            window=window,
            top=method.top,
            chosen=factors(method.chosen),
            seen=factors(method.seen),
        )
        return output

    def _attend_far(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """Return the output of heads that all look far."""
        window, keys = self.near.window, _contents(attention)
        if self.method.margin is None and only_causal(attention) and kernel_available(attention, window):
            return self._attend_by_kernels(attention, keys, block_mib=block_mib)
        first_keys = self.near.first_keys(attention)
        output = empty_output(attention)
        for rows in query_blocks(attention, 3 * attention.m, block_mib=block_mib, most=window):
            sets = self.near.sets(attention, rows, first_keys)
            output[:, rows] = attend_sets(attention, rows, sets, self._within_margin(attention, rows, sets, keys))
        return output

    def _attend_by_kernels(self, attention: LayerAttention, keys: Tensor, *, block_mib: int) -> Tensor:
        """Return the same for a layer with a causal mask only: far keys are added by log-sum-exp."""
        window = self.near.window
        output, lse = merged_attention(attention, window, self.near.far, block_mib=block_mib)
        for block in query_blocks(attention, attention.m, block_mib=block_mib):
            rows = slice(max(block.start, window), block.stop)
            chosen = self._chosen(attention, rows, keys, plain=True) if rows.start < rows.stop else None
            if chosen is not None:
                value = gathered(attention.value, chosen.keys)
                # The first queries have fewer far keys than they could choose, or none.
                weights = torch.softmax(chosen.scores, -1).nan_to_num(0.0).to(value.dtype)
                beyond = (weights[..., None, :] @ value)[..., 0, :]
                merge_attention(output[:, :, rows], lse[:, :, rows], beyond, chosen.scores.logsumexp(-1))
        return output.transpose(1, 2)

    def _chosen(self, attention: LayerAttention, rows: Rows, keys: Tensor, *, plain: bool = False) -> ChosenKeys | None:
        """Return the far keys that some queries choose, with the logits at which they see them; None for none.

        Args:
            attention: The layer.
            rows: The queries.
            keys: Its keys at position 0, ``(batch, kv_heads, m, d)``.
            plain: Whether the queries follow each other and the layer has at most a causal mask; then only chosen keys
                are read again.
        """
        method, window, first = self.method, self.near.window, attention.m - attention.n
        i = row_indices(rows, keys.device) + first
        stop = (first + rows.stop if isinstance(rows, slice) else attention.m) - window
        if stop <= method.sinks:
            return None
        far, count = slice(method.sinks, stop), min(method.top, stop - method.sinks)
        allowed = i[:, None] - torch.arange(far.start, far.stop, device=i.device) >= window

        def queries(kind: Judged) -> Tensor:
            return judged_queries(attention, method, kind, attention.rot_q[:, :, rows], i)

        def judged(kind: Judged) -> Tensor:
            return set_scores(attention, rows, KeySet(queries(kind), keys[:, :, far], far, allowed))

        if not plain:
            best = judged(method.chosen).topk(count, dim=-1).indices
            return ChosenKeys(judged(method.seen).gather(-1, best), best + far.start)
        scores = shared_product(queries(method.chosen), keys[:, :, far].mT)
        # The last query of the block sees all of these keys, and each one before it one less.
        part = max(0, stop - far.start - len(i))
        scores[..., part:].masked_fill_(~allowed[:, part:], -torch.inf)
        logits, best = largest(scores, count)
        if method.seen != method.chosen:
            q, k = queries(method.seen), gathered(keys, best + far.start)
            logits = (k @ q[..., None])[..., 0].masked_fill(logits == -torch.inf, -torch.inf)
        return ChosenKeys(logits * attention.scale, best + far.start)

    def _within_margin(
        self, attention: LayerAttention, rows: Rows, sets: list[KeySet], keys: Tensor
    ) -> ChosenKeys | None:
        """Return the far keys of some queries, without those below the margin; None if there are none."""
        mask = attention.mask
        plain = isinstance(rows, slice) and attention.softcap is None and mask.window is None and not mask.has_terms
        chosen = self._chosen(attention, rows, keys, plain=plain)
        if chosen is None or self.method.margin is None:
            return chosen
        best = torch.stack([set_scores(attention, rows, key_set).amax(-1) for key_set in sets]).amax(0)
        low = chosen.scores < best[..., None] - self.method.margin
        return replace(chosen, scores=chosen.scores.masked_fill(low, -torch.inf))

    def scores(self, attention: LayerAttention, rows: Queries) -> Tensor:
        """See :class:`Visibility`."""
        out = self.near.scores(attention, rows)
        queries = query_rows(rows, out.device)
        sets = self.near.sets(attention, queries, self.near.first_keys(attention))
        chosen = self._within_margin(attention, queries, sets, _contents(attention))
        if chosen is None:
            return out
        looking = constant_tensor(tuple(map(int, self.looking)), out.device).bool()[:, None, None]
        # A key is chosen once, and is not visible in the window.
        return torch.where(looking, out.scatter_reduce(-1, chosen.keys, chosen.scores, "amax"), out)


def _contents(attention: LayerAttention) -> Tensor:
    """Return the keys at position 0, ``(batch, kv_heads, m, d)``."""
    return rotated_keys(attention, torch.zeros_like)


def judged_queries(attention: LayerAttention, method: NearFar, kind: Judged, q: Tensor, i: Tensor) -> Tensor:
    """Return queries whose products with keys before rotation are their logits averaged, or at one distance.

    The rotated queries ``q`` ``(batch, heads, rows, d)`` are those at the indices ``i`` ``(rows,)``.
    """
    rotation, dtype = attention.rotation, score_dtype(attention)
    if rotation is None:
        return q.to(dtype)
    cos, sin = _mean_turn(rotation, *method.distances(kind), q.device, dtype)
    return rotation.moved_by(q, over_heads(attention.positions[..., i]), cos, sin)


_BLOCK = 32
"""Number of keys of which the largest logit is compared first."""


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of the last dimension and their indices, in any order.

    They are in the ``count`` blocks with the largest maxima, so only these are searched.
    """
    whole = scores.shape[-1] // _BLOCK
    if whole <= 2 * count:
        return torch.topk(scores, count, dim=-1, sorted=False)
    rest = scores[..., whole * _BLOCK :]
    blocks = torch.unflatten(scores[..., : whole * _BLOCK], -1, (whole, _BLOCK))
    best = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    best_blocks = blocks.gather(-2, best[..., None].expand(*best.shape, _BLOCK)).flatten(-2)
    index = (best[..., None] * _BLOCK + torch.arange(_BLOCK, device=scores.device)).flatten(-2)
    last = torch.arange(whole * _BLOCK, scores.shape[-1], device=scores.device).expand(*index.shape[:-1], -1)
    values, places = torch.topk(torch.cat([best_blocks, rest], -1), count, dim=-1, sorted=False)
    return values, torch.cat([index, last], -1).gather(-1, places)


@functools.lru_cache(maxsize=256)
def _mean_turn(
    rotation: Rotation, first: int, last: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the mean cosine and sine of each plane over distances, made once: every layer of a token needs them."""
    theta = rotation.angles(torch.arange(first, last + 1, device=device)).double()
    return theta.cos().mean(0).to(dtype), theta.sin().mean(0).to(dtype)
