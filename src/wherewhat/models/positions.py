"""Number of positions of a model: a hard limit or the trained length."""

from __future__ import annotations

from typing import Any

import torch

from wherewhat.errors import ConfigError

# Attributes in which causal models store one row per position. Such a table is a hard limit: position n of a table
# with n rows is an index error.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")


def max_positions(model: Any) -> tuple[int | None, bool]:
    """Return the largest number of tokens of a model.

    Args:
        model: A causal language model of transformers.

    Returns:
        `(limit, hard)`. `limit` is None if there is none (ALiBi). `hard` is True if a longer text cannot be computed:
        learned positions (GPT-2, OPT), the sine table of GPT-J and CodeGen, the bias table of MPT. Otherwise the limit
        is the length the model was designed for (RoPE).
    """
    config = _text_config(model)
    stated = _stated_length(config)
    kind = getattr(config, "model_type", None)
    if kind == "mpt":
        return stated, True
    if kind == "bloom" or getattr(config, "alibi", False):
        return None, False
    tables = [rows for name, module in model.named_modules() if (rows := _table_rows(name, module)) is not None]
    if not tables:
        return stated, False
    return min(tables if stated is None else [*tables, stated]), True


def hard_limit(model: Any) -> int | None:
    """Return the number of tokens beyond which a model cannot be computed; None if there is no such limit."""
    limit, hard = max_positions(model)
    return limit if hard else None


def trained_length(model: Any) -> int:
    """Return the training length in the model's configuration, limited by its number of positions."""
    found = hard_limit(model) or _stated_length(_text_config(model))
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} does not state its training length: give the method's window, or its trained and "
            "factor"
        )
    return found


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _stated_length(config: Any) -> int | None:
    for name in _LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _table_rows(name: str, module: torch.nn.Module) -> int | None:
    """Return the number of usable rows of a module's position table; None if it has no table."""
    if any(part in name for part in ("vision", "audio", "image", "visual")):
        return None
    if isinstance(module, torch.nn.Embedding) and name.rsplit(".", 1)[-1] in _TABLES:
        rows = int(module.num_embeddings)
        if isinstance(offset := getattr(module, "offset", None), int):
            return rows - offset  # OPT and BART do not use the first rows
        # Models like RoBERTa start after the padding row.
        return rows if module.padding_idx is None else rows - module.padding_idx - 1
    for table in _TABLES:
        buffer = getattr(module, table, None)
        # GPT-J and CodeGen store (positions, rotary size), CTRL (positions, hidden size), as plain tensors.
        if isinstance(buffer, torch.Tensor) and buffer.ndim == 2:
            return int(buffer.shape[0])
    return None
