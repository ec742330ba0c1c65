"""The transformers model inside PEFT, compiled and parallel wrappers."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from wherewhat.captures.calls import Target, replaced
from wherewhat.errors import CaptureError

# Adapters that run a second network or a second pass beside the model, to which a proof of one pass does not apply.
_OWN_PASSES = {"ADAPTION_PROMPT", "POLY", "SHADOW", "XLORA"}


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside wrappers; any other object is returned unchanged.

    Supported are ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, PEFT models and pipelines, in any
    order. Each calls its model, so that a capture of the model observes calls of the wrapper.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: Any) -> Any:
    """Return the model inside the outermost wrapper; None if there is no wrapper."""
    if _made_by(model, "torch._dynamo.eval_frame", "OptimizedModule"):
        return model._orig_mod
    if isinstance(model, DataParallel):
        if len(model.device_ids) > 1:
            raise CaptureError(
                f"DataParallel runs copies of the model on {len(model.device_ids)} devices, which cannot be captured: "
                "use its .module"
            )
        return model.module
    if isinstance(model, DistributedDataParallel):
        return model.module
    if _made_by(model, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise CaptureError(
            "FullyShardedDataParallel flattens and shards the weights of the model it wraps: shard it with fully_shard "
            "(FSDP2) instead"
        )
    if _is_peft(model):
        return _adapted(model)
    if _made_by(model, "transformers.pipelines.base", "Pipeline"):
        return model.model
    return None


def _made_by(model: Any, module: str, *names: str) -> bool:
    """Return whether ``model`` has a class of a Python module, without importing it: that of a wrapper is loaded."""
    loaded = sys.modules.get(module)
    return isinstance(model, tuple(kind for name in names if isinstance(kind := getattr(loaded, name, None), type)))


def _adapted(model: Any) -> nn.Module:
    """Return the model with the adapters of a PEFT model."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind in _OWN_PASSES:
            what = "tokens or keys" if config.is_prompt_learning else "passes or attention"
            raise CaptureError(
                f"the PEFT adapter {name!r} ({kind}) adds {what}, which have no position in the text: only adapters of "
                "weights, such as LoRA, can be captured"
            )
    inner: nn.Module = model.base_model.model
    return inner


_lock = threading.Lock()
_stance = ExitStack()
_users = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable ``torch.compile`` inside the context, since layers of compiled code cannot be observed.

    This applies to the whole process until the last of overlapping contexts ends.
    """
    global _users
    with _lock:
        if _users == 0:
            try:
                _stance.enter_context(torch.compiler.set_stance("force_eager"))
            except RuntimeError:
                raise CaptureError("a capture was opened inside compiled code: open it outside") from None
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _stance.close()


@contextmanager
def opened(model: Any) -> Iterator[Any]:
    """Return the transformers model inside ``model``, which may be called through its wrappers inside the context."""
    with uncompiled(), replaced(_tuners(model)):
        yield unwrapped(model)


def _tuners(model: Any) -> Iterator[Target]:
    """Yield the forward functions of PEFT, which before version 0.21 called the model without its hooks."""
    while model is not None:
        if _is_peft(model):
            yield Target(model.base_model, "forward", functools.partial(_call_model, model.base_model))
        model = _inner(model)


def _is_peft(model: Any) -> bool:
    return _made_by(model, "peft", "PeftModel", "PeftMixedModel")


def _call_model(tuner: Any, _: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: tuner.model(*args, **kwargs)


def transformers_model(model: Any) -> Any:
    """Return the model without its wrappers; refuse objects that are not causal language models of transformers."""
    model = unwrapped(model)
    name = type(model).__name__
    if not _is_model(model):
        advice = "only those can be captured"
        if _is_model(getattr(model, "model", None)):
            advice = "give its .model"
        elif isinstance(model, str | os.PathLike):
            advice = "load it first, and give the .model of what wherewhat.load returns"
        raise CaptureError(f"{name} is not a model of transformers: {advice}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise CaptureError(f"{name} is an encoder-decoder (seq2seq) model: only causal language models can be captured")
    return model


def wrapped_model(model: Any) -> Any:
    """Return the model with its wrappers; refuse those of which :func:`transformers_model` refuses the model."""
    transformers_model(model)
    return model


def _is_model(model: Any) -> bool:
    return isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "get_input_embeddings")
