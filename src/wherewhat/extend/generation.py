"""Greedy generation under a length method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.proof import Proof, prove
from wherewhat.captures.wrappers import unwrapped
from wherewhat.errors import ConfigError
from wherewhat.extend.method import LengthMethod, extended
from wherewhat.models.positions import trained_length


def generate(model: Any, ids: Tensor, method: LengthMethod, steps: int, *, proof: Proof | None = None) -> Tensor:
    """Continue texts by greedy decoding under a length method.

    Each new token is the most likely one in a single pass over the finished text up to it. Parameters that depend on
    the length are set once, for the length of the finished text. Keys are cached if that cannot change the result;
    otherwise each token takes a pass over the whole text.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        ids: Texts ``(batch, n)`` of one length.
        method: The length method.
        steps: Number of tokens to generate.
        proof: The model's proof; by default a new one.

    Returns:
        Texts ``(batch, n + steps)``.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: give 1 or more tokens to generate")
    inner = unwrapped(model)
    found = proof or prove(inner)
    if method.is_open:
        method = method.fitted(trained=trained_length(inner), length=ids.shape[1] + steps)
    # Caches of layers with a window drop keys and no longer count the text's tokens.
    cached = method.cacheable and not _has_window(inner)
    with torch.no_grad(), extended(model, method, proof=found):
        cache, fresh = None, ids
        for _ in range(steps):
            given: dict[str, Any] = {"past_key_values": cache} if cache is not None else {}
            out = model(input_ids=fresh, use_cache=cached, **given)
            best = out.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best.to(ids.device)], -1)
            cache = getattr(out, "past_key_values", None) if cached else None
            fresh = best if cache is not None else ids
    return ids


def _has_window(model: Any) -> bool:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "sliding_window", None) is not None or any(kind != "full_attention" for kind in kinds)
