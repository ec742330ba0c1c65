"""All layers' attention of a model on a text, copied."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, MaskCopies
from wherewhat.captures.blocks import key_mixing
from wherewhat.captures.comparison import input_device
from wherewhat.captures.proof import Proof, current_proof
from wherewhat.errors import ConfigError, TextError
from wherewhat.models.loaded import LoadedModel, resolve_device
from wherewhat.models.memory import evaluation
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import checked
from wherewhat.runs.execution import load_model
from wherewhat.runs.request import MemoryModel, ModelRequest, model_request
from wherewhat.runs.subject import ModelSubject
from wherewhat.text.documents import Document

_mixing: weakref.WeakKeyDictionary[Any, tuple[Proof, dict[int, float]]] = weakref.WeakKeyDictionary()


@checked()
def attention(
    model: Any,
    text: Any,
    *,
    tokenizer: Any = None,
    layers: Collection[int] | None = None,
    device: str | None = None,
    tokens: int | None = None,
) -> list[LayerAttention]:
    """Run a model on a text and return the queries, keys and values of its layers, verified and copied.

    The model is run in evaluation mode, without gradients and cache; its mode is restored. Memory is that of the
    queries, keys, values and outputs of the chosen layers; no n × n matrix is kept, except masks that the model itself
    makes.

    Args:
        model: A model of transformers, a PEFT model, a pipeline, what :func:`wherewhat.load` returned, or a name,
            folder or file.
        text: Token ids ``(n,)`` or ``(batch, n)``, a string, or a document.
        tokenizer: Tokenizer of a model in memory, for strings.
        layers: Indices of the layers to return; all by default.
        device: Device of the copies, such as ``cpu``; by default that of each layer.
        tokens: Number of tokens to use, from the first; all by default.

    Examples:
        >>> layers = wherewhat.attention(model, ids)
        >>> layers[3].pattern()  # attention weights of layer 3, (batch, heads, n, n)
    """
    request = model_request(model, tokenizer)
    if not isinstance(request, ModelRequest | MemoryModel):
        raise ConfigError(f"model is of type {type(model).__name__}: give a model of transformers, or a name or folder")
    loaded = load_model(request, hashed=False)
    ids = _ids(loaded, text, tokens)
    target = None if device is None else resolve_device(device)
    copies: MaskCopies = {}
    found: list[LayerAttention] = []
    with evaluation(loaded.model), new_process_settings(weight_dtypes(loaded.model)):
        proof = current_proof(loaded.model)
        known = {layer.plan.layer for layer in proof.layers}
        absent = sorted(set(layers or ()) - known)
        if absent:
            raise ConfigError(f"layers holds {absent[0]}: {loaded.name} has {min(known)} to {max(known)}")
        mixing = _key_mixing(loaded.model, proof)

        def keep(layer: LayerAttention) -> None:
            if layers is None or layer.layer in layers:
                copied = layer.copied(device=target, memo=copies)
                found.append(replace(copied, key_mixing=mixing.get(layer.layer)))

        ModelSubject(loaded, proof).run(ids, keep)
    return found


def _key_mixing(model: Any, proof: Proof) -> dict[int, float]:
    """Return the key mixing of a model, measured once per proof."""
    known = _mixing.get(model)
    if known is None or known[0] is not proof:
        _mixing[model] = known = (proof, key_mixing(model, proof))
    return known[1]


def _ids(loaded: LoadedModel, text: Any, tokens: int | None) -> Tensor:
    """Return token ids ``(batch, n)`` on the model's device."""
    if isinstance(text, Mapping):  # the output of a tokenizer
        mask = text.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise TextError("the text is padded (attention_mask holds 0): give texts of one length, or one at a time")
        text = text.get("input_ids")
    if isinstance(text, Document):
        text = text.text if text.ids is None else list(text.ids)
    if isinstance(text, str):
        return loaded.encode(text, tokens=tokens, allow_beyond=True)[None].to(input_device(loaded.model))
    try:
        ids = torch.as_tensor(text)
    except (TypeError, ValueError, RuntimeError):
        raise TextError(f"text is of type {type(text).__name__}: give a string, or token ids of one length") from None
    if ids.ndim not in (1, 2) or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        shown = f"shape {tuple(ids.shape)} and dtype {str(ids.dtype).removeprefix('torch.')}"
        raise TextError(f"text has {shown}: give a string, or token ids of shape (n,) or (batch, n) in int64")
    rows = [loaded.encode(row, tokens=tokens, allow_beyond=True) for row in ids.view(-1, ids.shape[-1]).tolist()]
    return torch.stack(rows).to(input_device(loaded.model))
