"""Attention modules run again, one at a time, on changed inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.calls import AttentionCall, Observer
from wherewhat.captures.layer_proofs import random_prompt
from wherewhat.captures.layout import LayerLayout
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.captures.session import describe, observing
from wherewhat.captures.structure import ModelWatch
from wherewhat.errors import CaptureError


@dataclass
class _Call:
    """Arguments of a call of an attention module."""

    layout: LayerLayout
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """The hidden states among the arguments, ``(1, n, width)``."""
        first = self.kwargs.get("hidden_states")
        for value in (first, *self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point():
                return value
        raise CaptureError(f"{self.layout.name} is given no hidden states: it cannot be run again alone")


class _CallRecorder(Observer):
    """Records attention calls."""

    def __init__(self, watch: ModelWatch) -> None:
        super().__init__(watch.names)
        self.calls: list[AttentionCall] = []

    def on_attention(self, call: AttentionCall) -> None:
        self.calls.append(call)


class Blocks:
    """The attention modules of one pass, with their inputs."""

    def __init__(self, calls: dict[int, _Call], recorder: _CallRecorder) -> None:
        self._calls = calls
        self._recorder = recorder

    @property
    def layers(self) -> list[int]:
        """Indices of the layers."""
        return list(self._calls)

    def hidden(self, layer: int) -> Tensor:
        """Return the input of a layer's attention, ``(1, n, width)``."""
        return self._calls[layer].hidden

    def run(self, layer: int, hidden: Tensor) -> LayerAttention:
        """Return the attention of a layer on other hidden states ``(1, n, width)``, at the same positions."""
        call = self._calls[layer]
        before = call.hidden
        # Some families pass the same tensor three times, as queries, keys and values.
        args = tuple(hidden if value is before else value for value in call.args)
        kwargs = {name: hidden if value is before else value for name, value in call.kwargs.items()}
        self._recorder.calls.clear()
        try:
            with torch.no_grad():
                call.module(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CaptureError(f"{call.layout.name} cannot be run again alone: {error}") from error
        assert call.positions is not None
        if not self._recorder.calls:
            raise CaptureError(f"{call.layout.name} shows no attention when it is run alone")
        return describe(call.layout, self._recorder.calls[0], call.positions)

    def swapped(self, layer: int, first: int, second: int, *, block: int = 1) -> LayerAttention:
        """Return the attention of a layer with ``block`` hidden states from ``first`` and ``second`` on swapped."""
        hidden = self.hidden(layer).clone()
        span, other_span = slice(first, first + block), slice(second, second + block)
        hidden[:, span], hidden[:, other_span] = hidden[:, other_span].clone(), hidden[:, span].clone()
        return self.run(layer, hidden)


@contextmanager
def blocks(model: Any, ids: Tensor, proof: Proof) -> Iterator[Blocks]:
    """Run ``model`` once on ``ids`` ``(1, n)``, then return its attention modules to be run again.

    The hidden states of all layers are kept in memory inside the context.
    """
    layouts = {(layout.name, layout.occurrence): layout for layout in proof.layout.layers}
    calls: dict[int, _Call] = {}
    seen: dict[str, int] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        occurrence = seen.get(name, 0)
        seen[name] = occurrence + 1
        layout = layouts.get((name, occurrence))
        if layout is not None:
            calls[layout.layer] = _Call(layout, module, args, kwargs)

    def set_positions(attention: LayerAttention) -> None:
        calls[attention.layer].positions = attention.positions

    with ExitStack() as stack:
        for name in {layout.name for layout in proof.layout.layers}:
            hook = functools.partial(record, name)
            handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        with torch.no_grad(), capture(model, set_positions, proof=proof):
            model(input_ids=ids, use_cache=False)
    watch = ModelWatch(model)
    recorder = _CallRecorder(watch)
    with observing(watch, recorder, route=proof.layout.route):
        try:
            yield Blocks(calls, recorder)
        finally:
            recorder.calls.clear()


def key_mixing(model: Any, proof: Proof) -> dict[int, float]:
    """Return the difference between swapping two inputs of a layer and swapping its keys before rotation, by layer.

    Zero up to rounding if each key depends on one token. Large if keys are mixed over tokens, normalised after the
    rotation, or taken from another layer; infinite if the layer cannot be run alone. The number is the largest
    deviation relative to the largest entry of the keys; it includes the queries of the other tokens, which must not
    change.
    """
    with blocks(model, random_prompt(model, PROMPT_TOKENS), proof) as again:
        differences = {layer: _mixing(again, layer) for layer in again.layers}
    # Read last: reading waits for a GPU.
    return {layer: math.inf if x is None else max(x.tolist()) for layer, x in differences.items()}


def _mixing(again: Blocks, layer: int) -> Tensor | None:
    """Return the differences of keys and of queries ``(2,)`` for one layer; None if it cannot be run alone."""
    n = again.hidden(layer).shape[1]
    first, second = 2, n - 3
    try:
        before = again.run(layer, again.hidden(layer))
        k, q = before.k, before.rot_q.clone()
        after = again.swapped(layer, first, second)
        if k.shape[2] != n:
            return None
    except CaptureError:
        return None
    swapped, others = k.clone(), after.rot_q - q
    swapped[:, :, first], swapped[:, :, second] = k[:, :, second], k[:, :, first]
    others[:, :, first] = others[:, :, second] = 0
    pairs = ((after.k - swapped, k), (others, q))
    return torch.stack([change.abs().max().double() / x.abs().max().double().clamp_min(1e-30) for change, x in pairs])
