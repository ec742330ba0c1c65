"""A method that follows positions near the query and contents far from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError
from wherewhat.extend.attention import (
    ChosenKeys,
    FarKeys,
    KeySet,
    attend_sets,
    check_unpadded,
    empty_output,
    query_blocks,
    rotated_to,
    set_scores,
)
from wherewhat.extend.limits import HeadSet, index_tensor, with_heads
from wherewhat.extend.method import LengthMethod, check_positive, required
from wherewhat.extend.plan import Plan
from wherewhat.extend.visibility import Visibility, Windowed

Judged = Literal["averaged", "capped"]
"""How a far key is judged: by its logit averaged over distances 0 to L, or by that at distance L."""


@dataclass(frozen=True)
class NearFar(LengthMethod):
    """A query sees the first s keys and the last L, and its heads that look far the k others with the largest content.

    The content of a pair is its logit averaged over the distances 0 to L: each plane of the query is multiplied by the
    mean of ``exp(i d θ)``, so that fast planes vanish and slow ones stay. Keys beyond the window are seen at
    distance L.

    Attributes:
        sinks: s, the first keys that stay visible.
        window: L, the last keys, the query's own among them; by default half the training length.
        distance: Distance at which far keys and the first keys are seen; by default L.
        top: k, the number of far keys that a query of a head sees.
        chosen: Logit by which far keys are chosen.
        seen: Logit that they have in the softmax.
        margin: Far keys with a logit this much below the best other one are left out; None for no such limit.
        plan: Plan whose heads with full attention look far; None for all heads.
    """

    name: ClassVar[str] = "near-far"
    sinks: int = 4
    window: int | None = None
    distance: int | None = None
    top: int = 16
    chosen: Judged = "averaged"
    seen: Judged = "capped"
    margin: float | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        """Refuse invalid parameters."""
        check_positive(self.name, sinks=self.sinks, window=self.window, distance=self.distance, top=self.top)
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

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        if attention.m <= window:
            return None
        near = Windowed(window, FarKeys.capped(self.sinks, self.distance or window))
        looking = self._looking(attention)
        if not any(looking) or attention.m <= window + self.sinks:
            return near
        return _NearFar(self, near, looking)

    def _looking(self, attention: LayerAttention) -> tuple[bool, ...]:
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
    """Keys that queries see under :class:`NearFar`.

    Attributes:
        method: The method.
        near: The window and the first keys.
        looking: For each head, whether it looks far.
    """

    method: NearFar
    near: Windowed
    looking: tuple[bool, ...]

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """See :class:`Visibility`."""
        check_unpadded(attention)
        output: Tensor | None = None
        for far in (False, True):
            heads = [head for head, looks in enumerate(self.looking) if looks == far]
            if not heads:
                continue
            some = HeadSet.of(heads, count=attention.heads, kv_heads=attention.kv_heads)
            part = with_heads(attention, some)
            found = (self._attend_far if far else self.near.attend)(part, block_mib=block_mib)
            if some.whole:
                return found
            output = empty_output(attention).to(found.dtype) if output is None else output
            output.index_copy_(2, index_tensor(some.heads, output.device), found.to(output.dtype))
        assert output is not None, "a layer has heads"
        return output

    def _attend_far(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """Return the output of heads that all look far."""
        first_keys, keys = self.near.first_keys(attention), _Contents(self.method, attention)
        output = empty_output(attention)
        for rows in query_blocks(attention, 3 * attention.m, block_mib=block_mib, most=self.near.window):
            sets = self.near.sets(attention, rows, first_keys)
            output[:, rows] = attend_sets(attention, rows, sets, self._chosen(attention, rows, sets, keys))
        return output

    def _chosen(self, attention: LayerAttention, rows: slice, sets: list[KeySet], keys: _Contents) -> ChosenKeys | None:
        """Return the far keys of some queries; None if there are none."""
        found = keys.chosen(rows)
        if found is None or self.method.margin is None:
            return found
        best = torch.stack([set_scores(attention, rows, some).amax(-1) for some in sets]).amax(0)
        low = found.scores < best[..., None] - self.method.margin
        return replace(found, scores=found.scores.masked_fill(low, -torch.inf))

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """See :class:`Visibility`."""
        out = self.near.scores(attention, rows)
        sets = self.near.sets(attention, rows, self.near.first_keys(attention))
        found = self._chosen(attention, rows, sets, _Contents(self.method, attention))
        if found is None:
            return out
        looking = torch.tensor(self.looking, device=out.device)[:, None, None]
        # A key is chosen once, and is not visible in the window.
        return torch.where(looking, out.scatter_reduce(-1, found.keys, found.scores, "amax"), out)


class _Contents:
    """Queries and keys of a layer, in the forms in which far keys are chosen and seen."""

    def __init__(self, method: NearFar, attention: LayerAttention) -> None:
        self._method, self._attention = method, attention
        self._window = required(method.name, "window", method.window)
        j = torch.arange(attention.m, device=attention.rot_k.device)
        self._keys = rotated_to(attention, attention.rot_k, j, torch.zeros_like(j))

    def chosen(self, rows: slice) -> ChosenKeys | None:
        """Return the far keys that some queries choose, with the logits at which they see them."""
        attention, method = self._attention, self._method
        first = attention.m - attention.n
        i = torch.arange(first + rows.start, first + rows.stop, device=self._keys.device)
        stop = first + rows.stop - self._window
        if stop <= method.sinks:
            return None
        far = slice(method.sinks, stop)
        allowed = i[:, None] - torch.arange(far.start, far.stop, device=i.device) >= self._window
        scores = {
            kind: set_scores(attention, rows, KeySet(self._queries(kind, rows, i), self._keys[:, :, far], far, allowed))
            for kind in {method.chosen, method.seen}
        }
        best = scores[method.chosen].topk(min(method.top, stop - far.start), dim=-1).indices
        return ChosenKeys(scores[method.seen].gather(-1, best), best + far.start)

    def _queries(self, kind: Judged, rows: slice, i: Tensor) -> Tensor:
        """Return queries whose products with the keys are averaged logits, or those at distance L."""
        attention = self._attention
        q = attention.rot_q[:, :, rows]
        if kind == "capped":
            return rotated_to(attention, q, i, torch.full_like(i, self._method.distance or self._window))
        q = rotated_to(attention, q, i, torch.zeros_like(i))
        return q if attention.rotation is None else averaged_over_distances(q, attention.rotation, self._window)


def averaged_over_distances(q: Tensor, rotation: Rotation, window: int) -> Tensor:
    """Return the mean of queries ``(..., d)`` before rotation, rotated by all distances from 0 to ``window``."""
    theta = rotation.angles(torch.arange(window + 1, device=q.device)).double()
    cos, sin = theta.cos().mean(0).to(q.dtype), theta.sin().mean(0).to(q.dtype)
    left, right = rotation.pairs.to(q.device).unbind(-1)
    u, v = q[..., left], q[..., right]
    out = q.clone()
    out[..., left], out[..., right] = u * cos - v * sin, v * cos + u * sin
    return out
