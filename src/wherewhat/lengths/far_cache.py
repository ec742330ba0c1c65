"""The method near-far with its far keys in the memory of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.caches.attending_cache import AttendingLayer, RunningPass, attending_cache, compare_cache
from wherewhat.caches.attention import ChosenKeys, KeySet, attend_sets, gathered, rotated_to
from wherewhat.caches.edits import edited_layer
from wherewhat.caches.visibility import full_attention
from wherewhat.captures.attention import LayerAttention, Mask, shared_product
from wherewhat.captures.calls import AttentionCall
from wherewhat.captures.layout import LayerLayout
from wherewhat.captures.proof import Proof, current_proof
from wherewhat.captures.structure import opened
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lengths.method import required
from wherewhat.lengths.near_far import NearFar, judged_queries, largest
from wherewhat.models.loaded import trained_length


@contextmanager
def far_on_cpu(model: Any, method: NearFar, *, proof: Proof | None = None) -> Iterator[None]:
    """Apply near-far to ``model`` inside the context; its cache holds the window on the model's device, the rest not.

    Keys and values beyond the window are stored in the memory of the CPU, in float32. They are compared with each query
    there, and only chosen ones are copied to the device. A short comparison shows first that passes with this cache
    give the same logits as passes without a cache.

    Args:
        model: A causal language model of transformers, in evaluation mode, without layers that have a window.
        method: The method; an open window is set from the model's training length. It must have no margin.
        proof: The model's proof; by default its last one.

    Examples:
        >>> with far_on_cpu(model, NearFar()):
        ...     model.generate(input_ids, max_new_tokens=100)
    """
    if not isinstance(method, NearFar):
        raise ConfigError(f"method is {method!r}: give a NearFar(...), the only method with far keys on the CPU")
    if method.margin is not None:
        raise MeasureError("near-far with a margin needs all keys on one device: use extended(model, method)")
    with opened(model) as inner:
        proved = current_proof(inner, proof)
        method.check_model(inner, proved)
        if proved.layout.route != "interface" or any(layer.window is not None for layer in proved.layers):
            raise MeasureError(
                f"{type(inner).__name__} has layers with a window, or its own attention code: far keys cannot be on "
                "the CPU; use extended(model, method)"
            )
        small = replace(method, window=4, sinks=2, top=2, distance=None, sink_distance=None, plan=None)
        compare_cache(inner, _cached(inner, proved, small), otherwise="use extended(model, method)")
        fitted = method.fitted(trained=trained_length(inner)) if method.is_open else method
        with _cached(inner, proved, fitted):
            yield


def _cached(model: nn.Module, proof: Proof, method: NearFar) -> AbstractContextManager[None]:
    """Apply a method to a model without comparisons."""

    def edit(layer: LayerLayout, call: AttentionCall) -> Tensor | None:
        return method.attend(edited_layer(layer, call))

    rules = {plan.layer: method for plan in proof.layout.layers}
    return attending_cache(model, proof, rules, FarLayer, edit)


def _hides_later_keys_only(attention: LayerAttention) -> bool:
    """Return whether the mask of a piece of a text is the causal one."""
    mask = attention.mask
    if not mask.has_terms:
        return True
    bias = attention.bias()
    causal = Mask(causal=True, device=mask.device).visible(slice(None), attention.n, attention.m)
    return bool((attention.visible() == causal).all()) and (bias is None or not bool(bias.any()))


class FarLayer(AttendingLayer):
    """Cache of one layer: the last keys and the first ones on its device, and all keys on the CPU."""

    def __init__(self, method: NearFar, running: RunningPass) -> None:
        super().__init__(method, running)
        self._method = method
        self._window = required(method.name, "window", method.window)
        self._ring: list[Tensor] = []
        self._first: list[Tensor] = []
        self._far: list[Tensor] = []

    @property
    def batch(self) -> int:
        """See :attr:`AttendingLayer.batch`."""
        return self._ring[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of keys and values on the layer's device in bytes."""
        return sum(x.nbytes for x in (*self._ring, *self._first))

    def attend(self, layer: LayerLayout, call: AttentionCall) -> Tensor:
        """See :meth:`AttendingLayer.attend`."""
        assert self._new is not None, "update comes first"
        new, self._new = self._new, None
        n = new[0].shape[2]
        attention = edited_layer(layer, call)
        if n == self.count:
            output = self._method.attend(attention)
            self._store(attention, new, 0)
            return full_attention(attention) if output is None else output
        if call.softcap is not None or call.sinks is not None or not _hides_later_keys_only(attention):
            raise MeasureError(
                f"{attention.name} has a soft-cap, a sink column or a mask that is not causal: far keys cannot be on "
                "the CPU; use extended(model, method)"
            )
        outputs = []
        for row in range(n):
            index = self.count - n + row
            self._store(attention, tuple(x[:, :, row : row + 1] for x in new), index)
            outputs.append(self._attend_one(attention, call.query[:, :, row : row + 1], index))
        return torch.cat(outputs, 1)

    def _store(self, attention: LayerAttention, new: tuple[Tensor, ...], before: int) -> None:
        """Store rotated keys and values ``(batch, kv_heads, n, d)`` of tokens from index ``before`` on."""
        stop = before + new[0].shape[2]
        at = torch.arange(before, stop, device=new[0].device)
        contents = rotated_to(attention, new[0], at, torch.zeros_like(at)), new[1]
        if not self._ring:
            self._ring = [x.new_zeros(*x.shape[:2], self._window, x.shape[3]) for x in new]
        last = at[-self._window :]
        for ring, x in zip(self._ring, new, strict=True):
            ring.index_copy_(2, last % self._window, x[:, :, -len(last) :])
        far = self._method.first_keys()
        if before < far.count:
            first = [x[:, :, : far.count - before].float() for x in new]
            first[0] = rotated_to(attention, first[0], at[: far.count - before], far.key(at[: far.count - before]))
            self._first = [torch.cat(pair, 2) for pair in zip(self._first, first, strict=True)] if before else first
        if not self._far or self._far[0].shape[2] < stop:
            grown = [
                x.new_empty(*x.shape[:2], 2 * stop, x.shape[3], dtype=torch.float32, device="cpu") for x in contents
            ]
            for old, fresh in zip(self._far, grown, strict=False):
                fresh[:, :, :before] = old[:, :, :before]
            self._far = grown
        for stored, x in zip(self._far, contents, strict=True):
            stored[:, :, before:stop] = x.to("cpu", torch.float32)

    def _attend_one(self, attention: LayerAttention, q: Tensor, index: int) -> Tensor:
        """Return the output ``(batch, 1, heads, d_v)`` of one query over the stored keys."""
        method, i = self._method, torch.tensor([index], device=q.device)
        near, first = min(index + 1, self._window), max(0, min(method.sinks, index - self._window + 1))
        everything = torch.ones(1, 1, dtype=torch.bool, device=q.device)
        sets = [KeySet(q, self._ring[0][:, :, :near], slice(0, near), everything)]
        values = [self._ring[1][:, :, :near].float()]
        if first:
            turned = rotated_to(attention, q, i, method.first_keys().query(i))
            sets.append(KeySet(turned, self._first[0][:, :, :first], slice(near, near + first), everything))
            values.append(self._first[1][:, :, :first])
        chosen = None
        looking = method.looking(attention)
        far = slice(method.sinks, index - self._window + 1)
        if far.start < far.stop and any(looking):
            chosen, value = self._chosen(attention, q, i, far, looking)
            chosen = replace(chosen, keys=chosen.keys + near + first)
            values.append(value)
        value = torch.cat(values, 2)
        small = replace(attention, rot_q=q, rot_k=value, value=value, mask=Mask(device=q.device))
        return attend_sets(small, slice(0, 1), sets, chosen)

    def _chosen(
        self, attention: LayerAttention, q: Tensor, i: Tensor, far: slice, looking: tuple[bool, ...]
    ) -> tuple[ChosenKeys, Tensor]:
        """Return the far keys of one query, and their values ``(batch, kv_heads, c, d_v)`` by index."""
        method = self._method
        count = min(method.top, far.stop - far.start)
        judged = {kind: judged_queries(attention, method, kind, q, i) for kind in {method.chosen, method.seen}}
        scores = shared_product(judged[method.chosen].to("cpu", torch.float32), self._far[0][:, :, far].mT)
        best = largest(scores, count)[1] + far.start  # (batch, heads, 1, count)
        keys, values = (gathered(x, best).to(q.device) for x in self._far)
        seen = (keys @ judged[method.seen].float()[..., None])[..., 0] * attention.scale
        hidden = ~torch.tensor(looking, device=q.device)[:, None, None]
        batch, heads = q.shape[:2]
        value = values.reshape(batch, attention.kv_heads, -1, values.shape[-1])
        place = torch.arange(heads, device=q.device) % (heads // attention.kv_heads) * count
        index = (place[:, None, None] + torch.arange(count, device=q.device)).expand(batch, -1, -1, -1)
        return ChosenKeys(seen.masked_fill(hidden, -torch.inf), index), value

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`AttendingLayer.map`."""
        self._ring, self._first, self._far = (
            [change(x) for x in part] for part in (self._ring, self._first, self._far)
        )
