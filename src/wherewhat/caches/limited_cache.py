"""Run a model under a plan, with a key-value cache that holds all keys only for the groups that the plan chooses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from wherewhat.caches.attending_cache import AttendingLayer, RunningPass, attending_cache, compare_cache
from wherewhat.caches.edits import edited_layer
from wherewhat.caches.plan import Plan, plannable
from wherewhat.caches.visibility import HeadSet, full_attention, limited_attention, mask_of
from wherewhat.captures.calls import AttentionCall
from wherewhat.captures.layout import LayerLayout
from wherewhat.captures.proof import Proof, current_proof
from wherewhat.captures.structure import State, opened
from wherewhat.numerics import constant_tensor, has_triton

_SPARE = 256
"""Keys for which memory is reserved when a cache grows: all keys are copied once per that number of tokens."""


@contextmanager
def planned(
    model: Any, plan: Plan, *, proof: Proof | None = None, other_weights: bool = False, small_cache: bool = True
) -> Iterator[None]:
    """Limit the heads of ``model`` as ``plan`` says inside the context, with a smaller cache.

    Passes with a cache, such as those of ``model.generate``, store all keys only for groups with a head that sees
    everything. A short comparison shows first that they give the same logits as passes without a cache; models that
    do not use transformers' attention interface keep their own cache. Padded and packed texts are refused.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        plan: The plan, of this model.
        proof: The model's proof; by default its last one.
        other_weights: Allow a model with other weights than the plan's, such as a fine-tuned one.
        small_cache: Whether the cache is smaller; False for the model's own cache.

    Examples:
        >>> with planned(model, Plan.load("plan.json")):
        ...     model.generate(input_ids, max_new_tokens=100)
    """
    with opened(model) as inner:
        proved = current_proof(inner, proof)
        plan.check(inner, proved, other_weights=other_weights)
        small = small_cache and proved.layout.route == "interface"
        if small:
            _prove_cache(inner, proved)
        with _limited(inner, proved, plan, small_cache=small):
            yield


def _limited(model: nn.Module, proof: Proof, plan: Plan, *, small_cache: bool) -> AbstractContextManager[None]:
    """Apply a plan to a model without checking that it belongs to it."""
    limits = {
        layer: LayerLimits(full, count.groups, plan.window, plan.sinks)
        for layer, count in plan.layers.items()
        if not all(full := plan.full_heads(layer))
    }

    def edit(layer: LayerLayout, call: AttentionCall) -> Tensor | None:
        own = limits.get(layer.layer)
        if own is None:
            return None
        return limited_attention(edited_layer(layer, call), own.full, window=own.window, sinks=own.sinks)

    return attending_cache(model, proof, limits if small_cache else {}, LimitedLayer, edit)


_proved: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


def _prove_cache(model: Any, proof: Proof) -> None:
    """Show on random tokens that passes with the smaller cache give the same logits as one without, once per state."""
    if _proved.get(model) == proof.state:
        return
    layers = plannable(proof)
    # Every other group sees everything; the ring is shorter than the prompt.
    full = {layer: tuple(range(index % 2, count.groups, 2)) for index, (layer, count) in enumerate(layers.items())}
    plan = Plan(proof.name, "", window=4, sinks=2, layers=layers, full=full)
    compare_cache(model, _limited(model, proof, plan, small_cache=True), otherwise="use small_cache=False")
    _proved[model] = proof.state


@dataclass(frozen=True)
class _Part:
    """Heads of a layer that see the same keys.

    Attributes:
        heads: The heads.
        limited: Whether they see only the last and the first keys.
        stored: Whether their keys are among those of which the cache holds all, else in the ring.
    """

    heads: HeadSet
    limited: bool
    stored: bool


class LayerLimits:
    """How a plan limits one layer.

    Attributes:
        full: For each query head, whether it sees everything.
        parts: Heads that see the same keys, with the key heads by their index in the cache.
        stored: Key heads of which the cache holds all keys.
        ring: Key heads of which it holds the last and the first.
        order: Query heads of all parts one after the other.
        inverse: Order that puts them into that of the layer.
        grouped: Whether all heads of a group see the same keys, so that there are at most two parts.
    """

    def __init__(self, full: tuple[bool, ...], groups: int, window: int, sinks: int) -> None:
        self.full, self.window, self.sinks = full, window, sinks
        count, size = len(full), len(full) // groups
        self.stored = tuple(group for group in range(groups) if any(full[group * size : (group + 1) * size]))
        self.ring = tuple(group for group in range(groups) if group not in self.stored)
        self.parts = []
        for limited, stored in ((False, True), (True, True), (True, False)):
            places = self.stored if stored else self.ring
            heads = [head for head in range(count) if head // size in places and full[head] != limited]
            if heads:
                chosen = HeadSet.of(heads, count=count, kv_heads=groups)
                chosen = replace(chosen, groups=tuple(places.index(group) for group in chosen.groups))
                self.parts.append(_Part(chosen, limited, stored))
        self.order = tuple(head for part in self.parts for head in part.heads.heads)
        self.inverse = tuple(self.order.index(head) for head in range(count))
        self.grouped = all(part.stored != part.limited for part in self.parts)

    def __eq__(self, other: object) -> bool:
        """Return whether both see the same keys."""
        if not isinstance(other, LayerLimits):
            return False
        return (self.full, self.window, self.sinks) == (other.full, other.window, other.sinks)


class _Buffer:
    """Keys and values ``(batch, kv_heads, slots, d)`` of some key heads, in memory that is reserved ahead."""

    def __init__(self, groups: tuple[int, ...], slots: int | None = None) -> None:
        self._groups, self._slots = groups, slots
        self.tensors: list[Tensor] = []

    def selected(self, new: Tensor) -> Tensor:
        """Return the part of the buffer's key heads of keys or values of all of them."""
        if len(self._groups) == new.shape[1]:
            return new
        return new.index_select(1, constant_tensor(self._groups, new.device))

    def reserve(self, new: tuple[Tensor, Tensor], count: int, used: int) -> None:
        """Make space for ``count`` keys like ``new``, of which ``used`` exist."""
        if self.tensors and self.tensors[0].shape[2] >= count:
            return
        slots = self._slots or count + _SPARE
        # One after the other, so that the memory of old keys is freed before that of new values is reserved.
        for index, x in enumerate(new):
            grown = x.new_empty(x.shape[0], len(self._groups), slots, x.shape[3])
            if index < len(self.tensors):
                grown[:, :, :used] = self.tensors[index][:, :, :used]
                self.tensors[index] = grown
            else:
                self.tensors.append(grown)


class LimitedLayer(AttendingLayer):
    """Cache of one layer: all keys of some key heads, of the others the last ``window`` and the first ``sinks``."""

    def __init__(self, limits: LayerLimits, running: RunningPass) -> None:
        super().__init__(limits, running)
        self._limits = limits
        self._all = _Buffer(limits.stored)
        self._ring = _Buffer(limits.ring, limits.window + limits.sinks)
        self._fused = False
        self._decoder: Any = None

    @property
    def batch(self) -> int:
        """See :attr:`AttendingLayer.batch`."""
        return (self._all.tensors or self._ring.tensors)[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Memory of the stored keys and values in bytes, with what is reserved."""
        return sum(x.nbytes for buffer in (self._all, self._ring) for x in buffer.tensors)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember dtype and device."""
        super().lazy_initialization(key_states, value_states)
        heads = len(self._limits.full)
        self._fused = self._limits.grouped and value_states is not None and _decodes(key_states, value_states, heads)

    def attend(self, layer: LayerLayout, call: AttentionCall) -> Tensor:
        """See :meth:`AttendingLayer.attend`."""
        assert self._new is not None, "update comes first"
        new, self._new = self._new, None
        limits, n = self._limits, new[0].shape[2]
        if n == self.count:
            attention = edited_layer(layer, call)
            output = limited_attention(attention, limits.full, window=limits.window, sinks=limits.sinks)
            self._store(new)
            return full_attention(attention) if output is None else output
        plain = call.softcap is None and call.sinks is None
        if n == 1 and plain and not call.mask.has_terms:
            if self._fused and self._can_decode(call.query):
                return self._decode(call, *new)
            if limits.grouped:
                return self._attend_grouped(call, *new)
            self._store(new)
            return self._attend_one(call)
        outputs = [self._attend_part(layer, call, part, new) for part in limits.parts]
        self._store(new)
        return self._joined(outputs, 2)

    def _can_decode(self, q: Tensor) -> bool:
        """Return whether the kernel for single tokens can be used in this pass; it has no gradient."""
        here = torch.cuda.current_device() == q.device.index
        return here and q.dtype == self.dtype and not torch.is_grad_enabled()

    def _decode(self, call: AttentionCall, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys of one token per text and return the output of its query, in one kernel."""
        q, limits = call.query, self._limits
        if self._decoder is None or self._decoder.batch != q.shape[0]:
            from wherewhat.caches.cuda import Decoder

            self._decoder = Decoder(limits.stored, limits.ring, q)
        if limits.stored:
            self._all.reserve((k, v), self.count, self.count - 1)
        output: Tensor = self._decoder(
            q,
            k,
            v,
            self._all.tensors,
            self._ring.tensors,
            self._running.scratch(self._decoder.scratch, q.device),
            count=self.count,
            slot=self._slot(self.count - 1),
            scale=call.scale,
        )
        return output

    def _attend_one(self, call: AttentionCall) -> Tensor:
        """Return the output of one query per text, which sees all keys of its part."""
        outputs = []
        for part in self._limits.parts:
            k, v = self._seen(part)
            q = part.heads.of_queries(call.query)
            batch, heads, _, d = q.shape
            # Heads that share keys are rows of one head: without a mask this is the same, and keys are read once.
            rows = q.view(batch, k.shape[1], heads // k.shape[1], d)
            outputs.append(scaled_dot_product_attention(rows, k, v, scale=call.scale).reshape(batch, heads, 1, -1))
        return self._joined(outputs, 1).transpose(1, 2)

    def _attend_grouped(self, call: AttentionCall, k: Tensor, v: Tensor) -> Tensor:
        """Store the keys of one token per text and return the output of its query, with as few kernels as possible.

        Short passes take as long as their kernels take to start.
        """
        limits, q = self._limits, call.query
        batch, heads, _, d = q.shape
        size = heads // k.shape[1]
        mixed = bool(limits.stored and limits.ring)
        if mixed:
            groups = constant_tensor(limits.stored + limits.ring, k.device)
            k, v = k.index_select(1, groups), v.index_select(1, groups)
            q = q.index_select(1, constant_tensor(limits.order, q.device))
        q = q.view(batch, heads // size, size, d)
        outputs, first = [], 0
        for buffer, chosen in ((self._all, limits.stored), (self._ring, limits.ring)):
            if not chosen:
                continue
            if buffer is self._all:
                slot, count = self.count - 1, self.count
                buffer.reserve((k, v), count, slot)
            else:
                slot, count = self._slot(self.count - 1), min(self.count, limits.window + limits.sinks)
            # Not by indexing, which makes a view for every dimension.
            for x, fresh in zip(buffer.tensors, (k, v), strict=True):
                x.narrow(2, slot, 1).copy_(fresh.narrow(1, first, len(chosen)) if mixed else fresh)
            keys, values = (x.narrow(2, 0, count) for x in buffer.tensors)
            rows = q.narrow(1, first, len(chosen)) if mixed else q
            outputs.append(scaled_dot_product_attention(rows, keys, values, scale=call.scale))
            first += len(chosen)
        output = (torch.cat(outputs, 1) if mixed else outputs[0]).reshape(batch, 1, heads, -1)
        return output.index_select(2, constant_tensor(limits.inverse, output.device)) if mixed else output

    def _seen(self, part: _Part) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the last query of a part sees."""
        limits = self._limits
        buffer = self._all if part.stored else self._ring
        count = self.count if part.stored else min(self.count, limits.window + limits.sinks)
        groups, seen = part.heads.groups, []
        for x in buffer.tensors:
            x = x[:, :, :count]
            if part.stored and part.limited and count > limits.window + limits.sinks:
                x = torch.cat([x[:, :, : limits.sinks], x[:, :, count - limits.window :]], 2)
            if groups != tuple(range(x.shape[1])):
                x = x.index_select(1, constant_tensor(groups, x.device))
            seen.append(x)
        return seen[0], seen[1]

    def _attend_part(self, layer: LayerLayout, call: AttentionCall, part: _Part, new: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output of a part's heads over stored and new keys, in the order of the text."""
        limits, n, device = self._limits, new[0].shape[2], call.query.device
        before = self.count - n
        buffer = self._all if part.stored else self._ring
        index = torch.arange(before, device=device)
        if not part.stored and before > limits.window + limits.sinks:
            recent = torch.arange(before - limits.window, before, device=device)
            index = torch.cat([torch.arange(limits.sinks, device=device), recent])
        slots = index if part.stored else self._slot(index)
        groups = constant_tensor(part.heads.groups, device)
        k, v = (
            torch.cat([x.index_select(2, slots), buffer.selected(fresh)], 2).index_select(1, groups)
            for x, fresh in zip(buffer.tensors, new, strict=True)
        )
        index = torch.cat([index, torch.arange(before, self.count, device=device)])
        allowed = None
        if part.limited:
            i = torch.arange(before, self.count, device=device)[:, None]
            allowed = (i - index < limits.window) | (index < limits.sinks)
        attention = replace(
            edited_layer(layer, call),
            rot_q=part.heads.of_queries(call.query),
            rot_k=k,
            value=v,
            mask=mask_of(call.mask, part.heads, index),
            sinks=None if call.sinks is None else part.heads.of_queries(call.sinks, 0),
        )
        return full_attention(attention, allowed=allowed)

    def _joined(self, parts: list[Tensor], axis: int) -> Tensor:
        """Return the outputs of all parts in the order of the layer's heads, which are on ``axis``."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, axis).index_select(axis, constant_tensor(self._limits.inverse, parts[0].device))

    def _slot(self, index: Any) -> Any:
        """Return the place in the ring of tokens by their index."""
        sinks, window = self._limits.sinks, self._limits.window
        if isinstance(index, int):
            return index if index < sinks else sinks + (index - sinks) % window
        return torch.where(index < sinks, index, sinks + (index - sinks) % window)

    def _store(self, new: tuple[Tensor, Tensor]) -> None:
        limits, n = self._limits, new[0].shape[2]
        before = self.count - n
        if limits.stored:
            self._all.reserve(new, self.count, before)
            for x, fresh in zip(self._all.tensors, new, strict=True):
                x[:, :, before : self.count] = self._all.selected(fresh)
        if not limits.ring:
            return
        self._ring.reserve(new, 0, 0)
        for x, fresh in zip(self._ring.tensors, new, strict=True):
            fresh = self._ring.selected(fresh)
            if n == 1:
                x[:, :, self._slot(before)] = fresh[:, :, 0]
                continue
            first = max(before, min(limits.sinks, self.count))
            if before < limits.sinks:
                x[:, :, before:first] = fresh[:, :, : first - before]
            index = torch.arange(max(first, self.count - limits.window), self.count, device=x.device)
            x.index_copy_(2, self._slot(index), fresh.index_select(2, index - before))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`AttendingLayer.map`."""
        for buffer in (self._all, self._ring):
            buffer.tensors = [change(x) for x in buffer.tensors]


def _decodes(k: Tensor, v: Tensor, heads: int) -> bool:
    """Return whether the kernel for single tokens supports keys and values ``(batch, kv_heads, n, d)``."""
    half = k.dtype in (torch.float16, torch.bfloat16)
    small = k.shape == v.shape and 16 <= k.shape[3] <= 256 and heads // k.shape[1] <= 64
    return half and small and has_triton(k.device)
