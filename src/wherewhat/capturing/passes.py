"""The passes of a proof: on a short prompt, recorded, under the model's own eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing.calls import AttentionCall
from wherewhat.capturing.learn import Plan, Recorder, plan_from
from wherewhat.capturing.watch import ModelWatch, Route, observing
from wherewhat.errors import CaptureError
from wherewhat.positions import hard_limit


def input_device(model: Any) -> torch.device:
    """Where tokens go: to the embedding, or to the CPU where that is offloaded and tokens are moved on by a hook."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def prompt(model: Any, length: int) -> Tensor:
    """Random tokens ``(1, length)``, none of them special; fewer where the model has fewer positions."""
    length = min(length, hard_limit(model) or length)
    config = model.config.get_text_config()
    embedding = next(model.get_input_embeddings().parameters())
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, embedding.shape[0], (1, 4 * length), generator=generator, device="cpu")
    ordinary = [i for i in ids[0].tolist() if i not in special][:length]
    return torch.tensor([ordinary], device=input_device(model))


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits of one pass, ``(1, n, vocabulary)``."""
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if not isinstance(logits, Tensor):
        raise CaptureError(f"{type(model).__name__} returns no logits: it is not a causal language model")
    return logits


def record_pass(model: Any, ids: Tensor) -> tuple[Plan, list[AttentionCall], Tensor]:
    """Run once with everything recorded; tries the attention interface first, then tracing."""
    routes: tuple[Route, ...] = ("interface", "trace")
    for route in routes:
        watch = ModelWatch(model)
        record = Recorder(watch)
        with observing(watch, record, route=route):
            logits = logits_of(model, ids)
        if record.attention:
            return plan_from(model, watch, record, route), record.attention, logits
    raise CaptureError(f"{type(model).__name__} shows no softmax attention: there is nothing to measure")


def largest_change(model: Any, ids: Tensor, plain: Tensor, captured: Tensor) -> float:
    """Change of the logits by capturing, beyond what the model itself varies between two plain passes."""
    change = float((plain.float() - captured.float()).abs().max())
    if change == 0:
        return 0.0
    own = float((plain.float() - logits_of(model, ids).float()).abs().max())
    return 0.0 if 0 < change <= own else change


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Run the model's own eager attention until the context ends."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: getattr(c, "_attn_implementation_internal", None) for key, c in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
