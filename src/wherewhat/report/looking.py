"""The one pass a report makes itself: logits of the first tokens as they are, and the text in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing import LayerAttention
from wherewhat.models import LoadedModel
from wherewhat.models.limits import max_positions
from wherewhat.pipeline.subject import ModelSubject

ROWS = 48
"""Tokens whose logits are drawn: as many as can be told apart on a small screen."""


@dataclass(frozen=True)
class Look:
    """What was seen.

    Attributes:
        tokens: The text in pieces, one for each token.
        logits: Lower triangles of the first rows' logits by layer, ``(heads, pairs)``, row after row; NaN where a
            query does not see a key.
        facts: What the model is.
    """

    tokens: list[str]
    logits: dict[int, Tensor]
    facts: dict[str, Any]


def look(loaded: LoadedModel, text: str, *, tokens: int) -> Look:
    """Run the model once on the first tokens of a text.

    Args:
        loaded: The model.
        text: The text.
        tokens: Tokens of it: as many as the decomposition had, for rotations that depend on the length.
    """
    ids = loaded.encode(text, tokens=tokens)
    logits: dict[int, Tensor] = {}
    kv_heads: dict[int, int] = {}
    rows = min(ROWS, len(ids))
    i, j = torch.tril_indices(rows, rows).unbind()

    def keep(attention: LayerAttention) -> None:
        first = slice(0, rows)
        scores = attention.attn_scores(first)[0, :, :, :rows].double().cpu()
        seen = attention.visible(first)[..., :rows].expand(1, attention.heads, rows, rows)[0].cpu()
        logits[attention.layer] = scores.masked_fill(~seen, torch.nan)[:, i, j]
        kv_heads[attention.layer] = attention.kv_heads

    ModelSubject(loaded).run(ids[None], keep)
    return Look(pieces(loaded, text, ids), logits, _facts(loaded, kv_heads))


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


def _facts(loaded: LoadedModel, kv_heads: dict[int, int]) -> dict[str, Any]:
    config = loaded.model.config
    return {
        "name": loaded.name,
        "type": str(config.model_type),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "positions": max_positions(loaded.model)[0],
        "kv_heads": sorted(set(kv_heads.values())),
        "dtype": loaded.dtype,
    }
