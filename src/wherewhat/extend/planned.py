"""Run a model under a plan, with a key-value cache that holds all keys only for the chosen groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from wherewhat.captures.calls import AttentionCall
from wherewhat.captures.plan import LayerPlan
from wherewhat.captures.proof import Proof, current_proof
from wherewhat.captures.structure import State
from wherewhat.captures.wrappers import opened
from wherewhat.extend.attending_cache import attending_cache, compare_cache
from wherewhat.extend.edits import edited_layer
from wherewhat.extend.limited_cache import LayerLimits, LimitedLayer
from wherewhat.extend.plan import Plan, plannable
from wherewhat.extend.visibility import limited_attention


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


def _limited(model: nn.Module, proof: Proof, plan: Plan, *, small_cache: bool) -> AbstractContextManager[None]:
    """Apply a plan to a model without checking that it belongs to it."""
    limits = {
        layer: LayerLimits(full, count, plan.window, plan.sinks)
        for layer, count in plan.layers.items()
        if not all(full := plan.full_heads(layer))
    }

    def edit(layer: LayerPlan, call: AttentionCall) -> Tensor | None:
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
