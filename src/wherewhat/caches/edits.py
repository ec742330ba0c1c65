"""Attention of single layers replaced in a pass, and passes that share everything below the changed layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.calls import AttentionCall, Observer, Repetition, Target, replaced
from wherewhat.captures.layer_proofs import input_device, last_logits
from wherewhat.captures.layout import CaptureLayout, LayerLayout
from wherewhat.captures.proof import Proof
from wherewhat.captures.session import Editor, describe, observing
from wherewhat.captures.stream import block_list
from wherewhat.captures.structure import ModelWatch, uncompiled
from wherewhat.errors import CaptureError


class LayerEdits(Observer):
    """Passes attention calls to an editor by layer, without the comparisons of a capture.

    An output ``(batch, n, heads, d_v)`` that the editor returns replaces that of the layer.
    """

    blind = True
    rotations = False

    def __init__(
        self, watch: ModelWatch, plan: CaptureLayout, editor: Callable[[LayerLayout, AttentionCall], Tensor | None]
    ) -> None:
        super().__init__(watch.names)
        self._watch = watch
        self._editor = editor
        self._layers = {(layer.name, layer.occurrence): layer for layer in plan.layers}
        self._occurrences: dict[str, int] = {}
        self._repeats = Repetition()

    def owns(self, module: nn.Module) -> bool:
        """Return whether the module is part of the model and the observer is in use."""
        return id(module) in self.names and self._watch.observer is self

    def start_pass(self) -> None:
        """Reset the state of the previous pass; refuse training mode."""
        self._watch.check_mode()
        self._occurrences = {}
        self._repeats = Repetition()

    def on_attention(self, call: AttentionCall) -> Tensor | None:
        """Return the editor's output of a layer."""
        name = self.names[id(call.module)]
        if self._repeats(call):
            raise CaptureError(f"{type(call.module).__name__} applies its attention twice: it cannot be edited")
        occurrence = self._occurrences.get(name, 0)
        self._occurrences[name] = occurrence + 1
        layer = self._layers.get((name, occurrence))
        if layer is None:
            raise CaptureError(
                f"call {occurrence + 1} of attention in {name} did not run when it was verified: it cannot be edited"
            )
        output = self._editor(layer, call)
        return output if output is None or output.dtype == call.query.dtype else output.to(call.query.dtype)


def edited_layer(layer: LayerLayout, call: AttentionCall) -> LayerAttention:
    """Return a layer's attention, with positions counted from its first key."""
    return describe(layer, call, torch.arange(call.key.shape[2], device=call.key.device))


class SharedPrefix:
    """Runs variants of a model that differ in one layer, from that layer on.

    The hidden states that enter every block are computed once and kept. A variant then starts at its block: lower
    blocks are skipped. This is exact where a block reads nothing but the hidden states before it; compare an unchanged
    variant with :attr:`logits` to make sure. An edit that all variants have in common applies below the changed layer
    and above it.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        ids: Texts ``(texts, n)``.
        keep: Number of last tokens whose logits are returned; None for all.
        edit: The edit of layers that all variants have in common; None for the unchanged model.
    """

    def __init__(
        self, model: Any, proof: Proof, ids: Tensor, *, keep: int | None = None, edit: Editor | None = None
    ) -> None:
        self._model, self._proof, self._edit = model, proof, edit
        self._ids = ids.to(input_device(model))
        self._given: dict[str, Any] = {"use_cache": False} | ({} if keep is None else last_logits(model, keep))
        self._keep = keep
        self._blocks, self._at = block_list(model, proof.layout)
        self._entering: dict[int, Tensor] = {}
        self._tuple: dict[int, int | None] = {}
        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                enter, leave = functools.partial(self._enter, index), functools.partial(self._leave, index)
                stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(leave).remove)
            if edit is not None:
                stack.enter_context(uncompiled())
                stack.enter_context(self._observed(lambda plan, call: edit(edited_layer(plan, call))))
            with torch.no_grad():
                self.logits = self._logits(model(input_ids=self._ids, **self._given))
        """Logits ``(texts, kept tokens, vocabulary)`` without a changed layer."""

    def _enter(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entering[index] = _hidden(args, kwargs)

    def _leave(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        self._tuple[index] = len(output) if isinstance(output, tuple) else None

    def _observed(self, editor: Callable[[LayerLayout, AttentionCall], Tensor | None]) -> AbstractContextManager[None]:
        watch = ModelWatch(self._model)
        return observing(watch, LayerEdits(watch, self._proof.layout, editor), route=self._proof.layout.route)

    def _logits(self, output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits if self._keep is None else logits[:, -self._keep :]

    def run(
        self, layer: int, rows: int, editor: Callable[[LayerAttention], Tensor], *, texts: slice = slice(None)
    ) -> Tensor:
        """Return the logits ``(texts, rows, kept tokens, vocabulary)`` of some variants of a layer.

        Args:
            layer: The layer that they change.
            rows: Number of variants.
            editor: Called with the layer's attention on the texts; returns outputs ``(texts, rows, n, heads, d_v)``.
            texts: Texts to run.
        """
        at = self._at[layer]
        ids = self._ids[texts]
        entering = self._entering[at][texts].repeat_interleave(rows, 0)

        def edit(plan: LayerLayout, call: AttentionCall) -> Tensor | None:
            if plan.layer == layer:
                return editor(_every(edited_layer(plan, call), rows)).flatten(0, 1)
            return None if self._edit is None else self._edit(edited_layer(plan, call))

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = _hidden(args, kwargs)
            return (
                tuple(entering if x is before else x for x in args),
                {name: entering if x is before else x for name, x in kwargs.items()},
            )

        with torch.no_grad(), uncompiled(), _skipped(self._blocks[:at], self._tuple):
            handle = self._blocks[at].register_forward_pre_hook(enter, with_kwargs=True)
            try:
                with self._observed(edit):
                    output = self._model(input_ids=ids.repeat_interleave(rows, 0), **self._given)
            finally:
                handle.remove()
        return torch.unflatten(self._logits(output), 0, (len(ids), rows))


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (kwargs.get("hidden_states"), *args):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
            return value
    raise CaptureError("a block is entered by no hidden states: layers cannot be changed separately")


def _skipped(blocks: list[nn.Module], tuples: dict[int, int | None]) -> AbstractContextManager[None]:
    """Skip some first blocks inside the context: each returns its input."""

    def skip(count: int | None, _: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = _hidden(args, kwargs)
            return hidden if count is None else (hidden, *[None] * (count - 1))

        return forward

    skips = (functools.partial(skip, tuples[index]) for index in range(len(blocks)))
    return replaced(Target(block, "forward", own) for block, own in zip(blocks, skips, strict=True))


def _every(attention: LayerAttention, rows: int) -> LayerAttention:
    """Return the attention of one variant of each text, which are all the same before they are changed."""

    def first(term: Tensor) -> Tensor:
        return term if term.ndim < 4 or term.shape[0] == 1 else term[::rows]

    return replace(
        attention,
        rot_q=attention.rot_q[::rows],
        rot_k=attention.rot_k[::rows],
        value=attention.value[::rows],
        mask=attention.mask.mapped(first),
    )
