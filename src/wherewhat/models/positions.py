"""How many positions a model has, and whether that is a wall or a habit."""

from __future__ import annotations

from typing import Any

import torch

from wherewhat.errors import ConfigError

# Attribute names under which causal models keep one row per position. A table of rows is a wall:
# position n of a table with n rows is an index error, whatever the model was trained on.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
_CONFIG_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)


def max_positions(model: Any) -> tuple[int | None, bool]:
    """The largest number of tokens a model takes.

    Args:
        model: A causal language model of transformers.

    Returns:
        `(limit, hard)`. `limit` is None where nothing limits it (ALiBi). `hard` is True where a longer
        text cannot be computed at all: learned positions (GPT-2, OPT), GPT-J's and CodeGen's table of
        sines, MPT's table of biases. Otherwise the limit is what the model was made for (RoPE).
    """
    config = _text_config(model)
    stated = _stated(config)
    kind = getattr(config, "model_type", None)
    if kind == "mpt":
        return stated, True
    if kind == "bloom" or getattr(config, "alibi", False):
        return None, False
    rows = _table_rows(model)
    if rows is None:
        return stated, False
    return (rows if stated is None else min(rows, stated)), True


def hard_limit(model: Any) -> int | None:
    """Number of tokens beyond which a model cannot be computed at all; None if it can be at any length."""
    limit, hard = max_positions(model)
    return limit if hard else None


def trained_length(model: Any) -> int:
    """Number of tokens the model's configuration says it was trained on, and no more than it has positions for."""
    found = hard_limit(model) or _stated(_text_config(model))
    if found is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how long it was trained: give the method's window, or trained and "
            "factor"
        )
    return found


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _stated(config: Any) -> int | None:
    for name in _CONFIG_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _table_rows(model: torch.nn.Module) -> int | None:
    """Usable rows of the smallest position table, or None where there is none."""
    rows = [count for name, module in model.named_modules() if (count := _rows(name, module)) is not None]
    return min(rows) if rows else None


def _rows(name: str, module: torch.nn.Module) -> int | None:
    if any(part in name for part in ("vision", "audio", "image", "visual")):
        return None
    if isinstance(module, torch.nn.Embedding) and name.rsplit(".", 1)[-1] in _TABLES:
        rows = int(module.num_embeddings)
        if isinstance(offset := getattr(module, "offset", None), int):
            return rows - offset  # OPT and BART count from a row beyond the first
        # RoBERTa's kind counts from the row after the padding row.
        return rows if module.padding_idx is None else rows - module.padding_idx - 1
    for table in _TABLES:
        buffer = getattr(module, table, None)
        # GPT-J and CodeGen keep (positions, rotary size), CTRL (positions, hidden size), as plain tensors.
        if isinstance(buffer, torch.Tensor) and buffer.ndim == 2:
            return int(buffer.shape[0])
    return None
