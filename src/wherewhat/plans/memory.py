"""What a plan saves: bytes of the key-value cache per token and at a length, and how many texts fit into a memory."""

from __future__ import annotations

from typing import Any

import torch

from wherewhat.boundary import size_in_words
from wherewhat.caches.plan import Plan
from wherewhat.captures.calls import unobserved
from wherewhat.captures.layer_proofs import random_prompt
from wherewhat.captures.proof import Proof
from wherewhat.models.loaded import describe_dtype, known_length


def layer_indices(model: Any, proof: Proof) -> dict[int, int]:
    """Return the index of each proved layer among the layers of the model's cache and configuration."""
    modules = {x.layer: model.get_submodule(x.name) for x in proof.layout.layers}
    indices = {layer: getattr(module, "layer_idx", None) for layer, module in modules.items()}
    return {layer: layer if index is None else int(index) for layer, index in indices.items()}


def cache_use(
    model: Any, proof: Proof, plan: Plan, *, context: int | None = None, memory: int | None = None
) -> dict[str, Any]:
    """Return the bytes of the key-value cache with and without a plan, from the cache of a pass over one token.

    Layers with a window of their own hold at most one key less than that window, as in transformers. Models that do
    not use transformers' attention interface keep their whole cache under a plan.

    Args:
        model: The model.
        proof: Its proof.
        plan: Its plan.
        context: Number of tokens; by default the trained length.
        memory: Bytes that weights and caches have to share; by default those of the GPUs, if the model is on some.

    Returns:
        JSON values: ``context``, ``dtype``, ``share_of_units``, ``share_of_cache`` (of a text of ``context`` tokens),
        ``full`` and ``plan`` with ``per_token`` (bytes that each further token adds), ``bytes`` (at ``context``
        tokens) and ``texts`` (of that length that fit beside the weights; None without a memory), ``weights`` and
        ``memory`` in bytes.
    """
    context = context or known_length(model) or plan.window + plan.sinks
    with torch.no_grad(), unobserved():
        cache = getattr(model(input_ids=random_prompt(model, 1), use_cache=True), "past_key_values", None)
    planned = {index: layer for layer, index in layer_indices(model, proof).items() if layer in plan.layers}
    smaller = proof.layout.route == "interface"
    full = kept = full_bytes = kept_bytes = 0.0
    for index, stored in enumerate(getattr(cache, "layers", None) or ()):
        tensors = [x for x in (getattr(stored, "keys", None), getattr(stored, "values", None)) if x is not None]
        each = sum(x.nbytes for x in tensors)
        own = getattr(stored, "sliding_window", None)
        if own is not None:
            full_bytes += each * min(context, own - 1)
            kept_bytes += each * min(context, own - 1)
            continue
        full, full_bytes = full + each, full_bytes + each * context
        whole = _whole_groups(plan, planned[index]) if smaller and index in planned else 1.0
        kept += each * whole
        kept_bytes += each * (whole * context + (1 - whole) * min(context, plan.window + plan.sinks))
    weights = sum(x.nbytes for x in model.parameters())
    gpus = {x.device for x in model.parameters() if x.device.type == "cuda"}
    if memory is None and gpus:
        memory = sum(torch.cuda.get_device_properties(device).total_memory for device in gpus)

    def use(per_token: float, total: float) -> dict[str, Any]:
        texts = None if memory is None or not total else max(0, int((memory - weights) // total))
        return {"per_token": round(per_token), "bytes": round(total), "texts": texts}

    return {
        "context": context,
        "dtype": describe_dtype(model),
        "share_of_units": plan.share,
        "share_of_cache": kept_bytes / full_bytes if full_bytes else 1.0,
        "full": use(full, full_bytes),
        "plan": use(kept, kept_bytes),
        "weights": weights,
        "memory": memory,
    }


def _whole_groups(plan: Plan, layer: int) -> float:
    """Return the share of a layer's key heads of which a plan's cache holds all keys."""
    heads, count = plan.full_heads(layer), plan.layers[layer]
    size = count.heads // count.groups
    return sum(any(heads[group * size : (group + 1) * size]) for group in range(count.groups)) / count.groups


def describe_use(use: dict[str, Any], unit: str) -> str:
    """Return in two sentences or three what :func:`cache_use` found."""
    full, plan = use["full"], use["plan"]
    if not full["bytes"]:
        return "The model returned no key-value cache whose bytes can be counted."
    text = (
        f"The cache of a text of {use['context']:,} tokens has {size_in_words(full['bytes'])} in {use['dtype']}, under "
        f"the plan {size_in_words(plan['bytes'])}: {use['share_of_cache']:.0%} of the cache for "
        f"{use['share_of_units']:.0%} of the {unit}s. Each further token adds {size_in_words(full['per_token'])}, "
        f"under the plan {size_in_words(plan['per_token'])}."
    )
    if full["texts"] is not None:
        text += (
            f" Beside {size_in_words(use['weights'])} of weights, {size_in_words(use['memory'])} hold the caches of "
            f"{full['texts']:,} such texts, under the plan {plan['texts']:,}; activations are not counted."
        )
    return text
