"""Find the transformers model inside PEFT, compiled and parallel wrappers, and check that it can be captured."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from wherewhat.captures.calls import Target, swapped
from wherewhat.captures.comparison import input_device, logits_of, prompt
from wherewhat.errors import CaptureError, one_line

# Adapters that run a second network or a second pass beside the model: what is proved of one pass says nothing then.
_OWN_PASSES = {"ADAPTION_PROMPT", "POLY", "SHADOW", "XLORA"}


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside wrappers; anything else is returned as it is.

    Known are ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, PEFT models and pipelines, in any order.
    Each calls the model it holds, so a capture of that model sees what runs when the wrapper is called.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: Any) -> Any:
    """What the outermost wrapper holds; None if there is no wrapper."""
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
    """Whether ``model`` is of a class of a module; nothing is imported, since a wrapper's module is there already."""
    loaded = sys.modules.get(module)
    return isinstance(model, tuple(kind for name in names if isinstance(kind := getattr(loaded, name, None), type)))


def _adapted(model: Any) -> nn.Module:
    """The model that a PEFT model put its adapters into."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind in _OWN_PASSES:
            what = "tokens or keys" if config.is_prompt_learning else "passes or attention"
            raise CaptureError(
                f"the PEFT adapter {name!r} ({kind}) adds {what} of its own, which have no place in the text: only "
                "adapters of weights, such as LoRA, can be captured"
            )
    inner: nn.Module = model.base_model.model
    return inner


_lock = threading.Lock()
_stance = ExitStack()
_users = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run code compiled by ``torch.compile`` as it was written, until the context ends.

    Compiled code has no layers to look into. This holds for the whole process, until the last of overlapping contexts
    ends.
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
    """Return the transformers model inside ``model``, which may be run through its wrappers until the context ends."""
    with uncompiled(), swapped(_tuners(model)):
        yield unwrapped(model)


def _tuners(model: Any) -> Iterator[Target]:
    """Have PEFT call its model, hooks included: before version 0.21 it called the model's ``forward``."""
    while model is not None:
        if _is_peft(model):
            yield Target(model.base_model, "forward", functools.partial(_call_model, model.base_model))
        model = _inner(model)


def _is_peft(model: Any) -> bool:
    return _made_by(model, "peft", "PeftModel", "PeftMixedModel")


def _call_model(tuner: Any, _: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: tuner.model(*args, **kwargs)


def transformers_model(model: Any) -> Any:
    """Return the model without its wrappers, if it is a transformers model that predicts the next token."""
    model = unwrapped(model)
    name = type(model).__name__
    if not _is_model(model):
        way_out = "only those can be captured"
        if _is_model(getattr(model, "model", None)):
            way_out = "give its .model"
        elif isinstance(model, str | os.PathLike):
            way_out = "load it first, and give the .model of what wherewhat.load returns"
        raise CaptureError(f"{name} is not a model of transformers: {way_out}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise CaptureError(f"{name} is an encoder-decoder (seq2seq) model: only causal language models can be captured")
    return model


def wrapped_model(model: Any) -> Any:
    """The model as it was given, if it is a :func:`transformers_model` inside."""
    transformers_model(model)
    return model


def check_present(model: nn.Module) -> None:
    """Refuse weights that hold no numbers, unless they are offloaded and come when they are used."""
    absent = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if absent is not None and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise CaptureError(
            f"{absent} of {type(model).__name__} is on the meta device and holds no numbers: load weights"
        )


def proof_prompt(model: Any, input_ids: Tensor | None, length: int) -> Tensor:
    """The prompt of a proof, ``(batch, n)``, where the model takes it: the given one, or ``length`` random tokens."""
    if input_ids is None:
        if length < 1:
            raise CaptureError(f"length is {length}: a prompt of no tokens proves nothing, 23 are usual")
        return prompt(model, length)
    shape, dtype = tuple(input_ids.shape), input_ids.dtype
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_meta:
        raise CaptureError(f"input_ids has shape {shape} on {input_ids.device}: give token ids of shape (1, n)")
    if dtype not in (torch.int64, torch.int32):
        raise CaptureError(f"input_ids has dtype {str(dtype).removeprefix('torch.')}: give token ids in int64")
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= rows:
        raise CaptureError(f"input_ids holds {low if low < 0 else high}: token ids of this model are 0 to {rows - 1}")
    return input_ids.to(input_device(model))


def first_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of the first pass, ``(batch, n, vocabulary)``."""
    try:
        return logits_of(model, ids)
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may raise anything
        name = type(model).__name__
        raise CaptureError(f"{name} cannot be run on token ids alone: {one_line(error)}") from error


def _is_model(model: Any) -> bool:
    return isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "get_input_embeddings")
