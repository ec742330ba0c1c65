"""The one pass a report makes itself: logits of the first tokens as they are, the text in tokens, and what fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof
from wherewhat.errors import ConfigError, TextError
from wherewhat.measures.measurement import Capacity
from wherewhat.models.loaded import LoadedModel
from wherewhat.models.positions import max_positions
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.runs.subject import ModelSubject
from wherewhat.text.documents import Document

ROWS = 48
"""Tokens whose logits are drawn: as many as can be told apart on a small screen."""


@dataclass(frozen=True)
class Look:
    """What was seen.

    Attributes:
        tokens: The first text in pieces, one for each token.
        logits: Lower triangles of the first rows' logits by layer, ``(heads, pairs)``, row after row; NaN where a
            query does not see a key.
        facts: What the model is.
        capacity: What it and the texts allow.
        seconds: Time of the pass for each of its tokens, to estimate other times from.
    """

    tokens: list[str]
    logits: dict[int, Tensor]
    facts: dict[str, Any]
    capacity: Capacity
    seconds: float


def look(loaded: LoadedModel, texts: Sequence[Document], *, tokens: int, proof: Proof | None = None) -> Look:
    """Run the model once on the first tokens of the first text.

    Args:
        loaded: The model.
        texts: The texts that will be measured.
        tokens: Tokens of each: as many as the decomposition will have, for rotations that depend on the length.
        proof: The model's proof; a new one by default.
    """
    loaded.check_length(tokens)
    shortest = min(_check(loaded, text, tokens) for text in texts)
    ids = loaded.encode(texts[0].text, tokens=tokens)
    logits: dict[int, Tensor] = {}
    kv_heads: dict[int, int] = {}
    planes: list[int] = []
    rows = min(ROWS, len(ids))
    i, j = torch.tril_indices(rows, rows).unbind()

    def keep(attention: LayerAttention) -> None:
        first = slice(0, rows)
        scores = attention.attn_scores(first)[0, :, :, :rows].double().cpu()
        seen = attention.visible(first)[..., :rows].expand(1, attention.heads, rows, rows)[0].cpu()
        logits[attention.layer] = scores.masked_fill(~seen, torch.nan)[:, i, j]
        kv_heads[attention.layer] = attention.kv_heads
        if attention.rotation is not None:
            planes.append(attention.rotation.planes)

    subject = ModelSubject(loaded, proof)
    started = time.perf_counter()
    with new_process_settings(weight_dtypes(loaded.model)):
        subject.run(ids[None], keep)
    seconds = (time.perf_counter() - started) / len(ids)
    capacity = Capacity(_trained_length(subject), max_positions(loaded.model)[1], min(planes, default=0), shortest)
    return Look(pieces(loaded, texts[0].text, ids), logits, _facts(loaded, kv_heads, subject.proof), capacity, seconds)


def pieces(loaded: LoadedModel, text: str, ids: Tensor) -> list[str]:
    """The text in pieces, one for each token; together they are the text where the tokenizer tells where they stand."""
    prefix = len(loaded.prefix)
    names = [str(loaded.tokenizer.decode([index])) for index in ids[:prefix].tolist()]
    body = ids[prefix:].tolist()
    if not getattr(loaded.tokenizer, "is_fast", False):
        return [*names, *(str(loaded.tokenizer.decode([index])) for index in body)]
    encoded = loaded.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    end = 0
    for _, stop in encoded["offset_mapping"][: len(body)]:
        # A character of several tokens belongs to the first of them; what stands between tokens to the one behind it.
        names.append(text[end : max(end, stop)])
        end = max(end, stop)
    return names


def _check(loaded: LoadedModel, text: Document, tokens: int) -> int:
    """Number of tokens of a text, which must have so many."""
    body = loaded.tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    found = len(loaded.prefix) + len(body)
    if found < tokens:
        raise TextError(f"document '{text.name}' has {found} tokens, but {tokens} were asked for: use a longer text")
    return found


def _trained_length(subject: ModelSubject) -> int | None:
    try:
        return subject.trained_length()
    except ConfigError:
        return None


def _facts(loaded: LoadedModel, kv_heads: dict[int, int], proof: Proof) -> dict[str, Any]:
    config = loaded.model.config
    return {
        "name": loaded.name,
        "type": str(config.model_type),
        "weights": loaded.weights,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "positions": max_positions(loaded.model)[0],
        "kv_heads": sorted(set(kv_heads.values())),
        "unmeasured": [f"{layer.name}: {layer.reason}" for layer in proof.unmeasured],
        "dtype": loaded.dtype,
    }
