"""What can be captured at all: a transformers causal language model with weights, run on token ids."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.capturing.passes import input_device, logits_of, prompt
from wherewhat.capturing.wrappers import unwrapped
from wherewhat.errors import CaptureError, one_line


def transformers_model(model: Any) -> Any:
    """The model without its wrappers, if it is one of transformers that predicts the next token of the text it reads.

    Raises:
        CaptureError: If it is not.
    """
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
    """The model as it was given, if it is a :func:`transformers_model` inside.

    Raises:
        CaptureError: If it is not.
    """
    transformers_model(model)
    return model


def check_present(model: nn.Module) -> None:
    """Refuse weights that hold no numbers, unless they are offloaded and come when they are used.

    Raises:
        CaptureError: Naming the first of them.
    """
    absent = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if absent is not None and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise CaptureError(
            f"{absent} of {type(model).__name__} is on the meta device and holds no numbers: load weights"
        )


def proof_prompt(model: Any, input_ids: Tensor | None, length: int) -> Tensor:
    """The prompt of a proof, ``(batch, n)``, where the model takes it: the given one, or ``length`` random tokens.

    Raises:
        CaptureError: If it is not a batch of token ids that the model has.
    """
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
    """Logits of the first pass, ``(batch, n, vocabulary)``.

    Raises:
        CaptureError: If the model cannot be run on token ids alone.
    """
    try:
        return logits_of(model, ids)
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may raise anything
        name = type(model).__name__
        raise CaptureError(f"{name} cannot be run on token ids alone: {one_line(error)}") from error


def _is_model(model: Any) -> bool:
    return isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "get_input_embeddings")
