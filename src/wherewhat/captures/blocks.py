"""Attention modules run again, one at a time, on changed inputs: the slow way to see what a change does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.calls import AttentionCall, RotaryCall
from wherewhat.captures.comparison import prompt
from wherewhat.captures.plan import LayerPlan
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.captures.session import describe
from wherewhat.captures.watch import ModelWatch, observing
from wherewhat.errors import CaptureError


@dataclass
class _Call:
    """What one attention module was called with."""

    plan: LayerPlan
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """Hidden states among the arguments, ``(1, n, width)``."""
        first = self.kwargs.get("hidden_states")
        for value in (first, *self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point():
                return value
        raise CaptureError(f"{self.plan.name} is given no hidden states: it cannot be run again by itself")


@dataclass
class _Last:
    """Observer that keeps the attention of the module now running."""

    watch: ModelWatch
    calls: list[AttentionCall] = field(default_factory=list)
    blind: bool = False

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is part of the watched model."""
        return id(module) in self.watch.names

    def knows_rotary(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Rotations were proved in the whole pass."""
        return True

    def on_rotary(self, call: RotaryCall) -> None:
        """They are not looked at."""

    def on_attention(self, call: AttentionCall) -> None:
        """Keep it."""
        self.calls.append(call)


class Blocks:
    """The attention modules of one pass, with the inputs they had."""

    def __init__(self, calls: dict[int, _Call], last: _Last) -> None:
        self._calls = calls
        self._last = last

    @property
    def layers(self) -> list[int]:
        """Indices of the layers."""
        return list(self._calls)

    def hidden(self, layer: int) -> Tensor:
        """Hidden states that entered the attention of a layer, ``(1, n, width)``."""
        return self._calls[layer].hidden

    def run(self, layer: int, hidden: Tensor) -> LayerAttention:
        """Attention of a layer on other hidden states ``(1, n, width)``, positions and mask as they were."""
        call = self._calls[layer]
        before = call.hidden
        # Some families hand the same tensor over three times, as queries, keys and values.
        args = tuple(hidden if value is before else value for value in call.args)
        kwargs = {name: hidden if value is before else value for name, value in call.kwargs.items()}
        self._last.calls.clear()
        try:
            with torch.no_grad():
                call.module(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CaptureError(f"{call.plan.name} cannot be run again by itself: {error}") from error
        assert call.positions is not None
        if not self._last.calls:
            raise CaptureError(f"{call.plan.name} shows no attention when it is run by itself")
        return describe(call.plan, self._last.calls[0], call.positions)

    def swapped(self, layer: int, first: int, second: int, *, block: int = 1) -> LayerAttention:
        """Attention of a layer with the hidden states of two blocks of tokens, that start there, swapped."""
        hidden = self.hidden(layer).clone()
        one, other = slice(first, first + block), slice(second, second + block)
        hidden[:, one], hidden[:, other] = hidden[:, other].clone(), hidden[:, one].clone()
        return self.run(layer, hidden)


@contextmanager
def blocks(model: Any, ids: Tensor, proof: Proof) -> Iterator[Blocks]:
    """Run ``model`` once on ``ids`` ``(1, n)``, then offer its attention modules for running again.

    Holds the hidden states of all layers while open.
    """
    plans = {(plan.name, plan.occurrence): plan for plan in proof.plan.layers}
    calls: dict[int, _Call] = {}
    seen: dict[str, int] = {}
    modules = {plan.name: model.get_submodule(plan.name) for plan in proof.plan.layers}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        occurrence = seen.get(name, 0)
        seen[name] = occurrence + 1
        plan = plans.get((name, occurrence))
        if plan is not None:
            calls[plan.layer] = _Call(plan, module, args, kwargs)

    def place(attention: LayerAttention) -> None:
        calls[attention.layer].positions = attention.positions

    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: note(name, module, args, kwargs), with_kwargs=True
        )
        for name, module in modules.items()
    ]
    try:
        with torch.no_grad(), capture(model, place, proof=proof):
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    watch = ModelWatch(model)
    last = _Last(watch)
    with observing(watch, last, route=proof.plan.route):
        try:
            yield Blocks(calls, last)
        finally:
            last.calls.clear()


def key_mixing(model: Any, proof: Proof) -> dict[int, float]:
    """How far swapping two inputs of a layer is from swapping its keys before rotation, by layer.

    Zero but for rounding where keys are made token by token. Large where they are mixed over tokens, normed after the
    rotation, or taken from another layer; infinite where the layer cannot be run by itself. The number is the largest
    deviation relative to the largest entry of the keys; it also covers the queries of the other tokens, which must
    stay as they were.
    """
    with blocks(model, prompt(model, PROMPT_TOKENS), proof) as again:
        return {layer: _mixing(again, layer) for layer in again.layers}


def _mixing(again: Blocks, layer: int) -> float:
    n = again.hidden(layer).shape[1]
    first, second = 2, n - 3
    order = torch.arange(n)
    order[first], order[second] = second, first
    try:
        before = again.run(layer, again.hidden(layer))
        k, q = before.k, before.rot_q.clone()
        after = again.swapped(layer, first, second)
        if k.shape[2] != n:
            return math.inf
    except CaptureError:
        return math.inf
    others = [t for t in range(n) if t not in (first, second)]
    keys = (after.k - k[:, :, order]).abs().max() / k.abs().max().clamp_min(1e-30)
    queries = (after.rot_q - q)[:, :, others].abs().max() / q.abs().max().clamp_min(1e-30)
    return max(float(keys), float(queries))
