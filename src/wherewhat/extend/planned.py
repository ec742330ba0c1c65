"""Run a model under a plan, with a key-value cache that holds all keys only for the chosen groups."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from wherewhat.captures.calls import AttentionCall, unobserved
from wherewhat.captures.comparison import random_prompt
from wherewhat.captures.plan import LayerPlan
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, current_proof
from wherewhat.captures.session import observing
from wherewhat.captures.structure import State
from wherewhat.captures.watch import ModelWatch
from wherewhat.captures.wrappers import opened
from wherewhat.errors import CaptureError, MeasureError, one_line
from wherewhat.extend.edits import LayerEdits, edited_layer
from wherewhat.extend.limited_cache import LayerLimits, LimitedLayer, RunningPass
from wherewhat.extend.limits import limited_attention
from wherewhat.extend.plan import Plan, plannable

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Largest difference between the logits with the smaller cache and without a cache, relative to the largest one."""


@contextmanager
def planned(
    model: Any, plan: Plan, *, proof: Proof | None = None, other_weights: bool = False, small_cache: bool = True
) -> Iterator[None]:
    """Limit the heads of ``model`` as ``plan`` says inside the context, with a smaller cache.

    Passes with a cache, such as those of ``model.generate``, store all keys only for groups with a head that sees
    everything. A short comparison shows first that they give the same logits as passes without a cache; models that
    do not use transformers' attention interface keep their own cache. Texts must not be padded on the left.

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
        found = current_proof(inner, proof)
        plan.check(inner, found, other_weights=other_weights)
        small = small_cache and found.plan.route == "interface"
        if small:
            _prove_cache(inner, found)
        with _limited(inner, found, plan, small_cache=small):
            yield


@contextmanager
def _limited(model: nn.Module, proof: Proof, plan: Plan, *, small_cache: bool) -> Iterator[None]:
    """Apply a plan to a model without checking that it belongs to it."""
    limits = {
        layer: LayerLimits(full, count, plan.window, plan.sinks)
        for layer, count in plan.layers.items()
        if not all(full := plan.full_heads(layer))
    }
    running = RunningPass()
    cached = {index: limits[layer] for layer, index in _cache_indices(model, proof).items() if layer in limits}

    def edit(layer: LayerPlan, call: AttentionCall) -> Tensor | None:
        stored, running.layer = running.layer, None
        if stored is not None:
            return stored.attend(layer, call)
        own = limits.get(layer.layer)
        if own is None:
            return None
        return limited_attention(edited_layer(layer, call), own.full, window=own.window, sinks=own.sinks)

    def place(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        running.start()
        return args, kwargs | _with_cache(model, watch.structure.parameters, args, kwargs, cached, running)

    watch = ModelWatch(model)
    handle = model.register_forward_pre_hook(place, with_kwargs=True) if small_cache and cached else None
    try:
        with observing(watch, LayerEdits(watch, proof.plan, edit), route=proof.plan.route):
            yield
    finally:
        running.closed = True
        if handle is not None:
            handle.remove()


def _cache_indices(model: nn.Module, proof: Proof) -> dict[int, int]:
    """Return the index in the cache of each layer."""
    named = {plan.layer: getattr(model.get_submodule(plan.name), "layer_idx", None) for plan in proof.plan.layers}
    return {layer: layer if index is None else int(index) for layer, index in named.items()}


def _with_cache(
    model: Any,
    parameters: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limits: dict[int, LayerLimits],
    running: RunningPass,
) -> dict[str, Any]:
    """Limit the layers of a pass's cache; return the argument with a new one if it has none and uses one."""
    given = dict(zip(parameters, args, strict=False)) | kwargs
    cache, wanted = given.get("past_key_values"), given.get("use_cache")
    new: dict[str, Any] = {}
    if cache is None:
        wanted = getattr(model.config.get_text_config(), "use_cache", False) if wanted is None else wanted
        if not wanted or "past_key_values" not in parameters:
            return {}
        cache = DynamicCache(config=model.config)
        new = {"past_key_values": cache}
    known = {i: x for i, x in enumerate(getattr(cache, "layers", None) or ()) if isinstance(x, LimitedLayer)}
    for index, layer in known.items():
        layer.enter(limits.get(index), running)
    if known:
        return new
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        filled = f"{type(cache).__name__} with {cache.get_seq_length()} tokens"
        raise MeasureError(
            f"a plan needs a new DynamicCache on the model's device, not a {filled}: leave past_key_values out, or use "
            "use_cache=False"
        )
    made = DynamicCache(config=model.config).layers
    cache.layers = [
        LimitedLayer(limits[index], running) if index in limits and type(layer) is DynamicLayer else layer
        for index, layer in enumerate(made)
    ]
    cache.layer_class_to_replicate = None
    return new


_proved: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


def _prove_cache(model: Any, proof: Proof) -> None:
    """Show on random tokens that passes with the smaller cache give the same logits as one without, once per state."""
    if _proved.get(model) == proof.state:
        return
    layers = plannable(proof)
    # Every other group sees everything; the ring is shorter than the prompt.
    full = {layer: tuple(range(index % 2, count.groups, 2)) for index, (layer, count) in enumerate(layers.items())}
    plan = Plan(proof.name, "", window=4, sinks=2, layers=layers, full=full)
    ids = random_prompt(model, PROMPT_TOKENS)
    start = ids.shape[1] - 6
    pieces = [(0, start), *((i, i + 1) for i in range(start, start + 3)), (start + 3, ids.shape[1])]
    with unobserved(), torch.no_grad(), _limited(model, proof, plan, small_cache=True):
        run = functools.partial(model, use_cache=True)
        expected = model(input_ids=ids, use_cache=False).logits
        cache, found = None, []
        try:
            for first, last in pieces:
                output = run(input_ids=ids[:, first:last], **({} if cache is None else {"past_key_values": cache}))
                cache = output.past_key_values
                found.append(output.logits)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            raise CaptureError(
                f"{type(model).__name__} cannot use the cache of a plan ({one_line(error)}): use small_cache=False"
            ) from error
    difference = float((torch.cat(found, 1) - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    allowed = _TOLERANCE.get(expected.dtype, 1e-1)
    if not difference <= allowed:
        raise CaptureError(
            f"{type(model).__name__} with the cache of a plan differs from a pass without a cache by {difference:.2g} "
            f"(allowed {allowed:g}): use small_cache=False"
        )
    _proved[model] = proof.state
