"""How long a model was trained, and how far its table of positions goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from wherewhat.errors import ConfigError, MeasureError

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


def trained_length(model: Any) -> int:
    """Number of tokens the model's configuration says it was trained on.

    Raises:
        ConfigError: If it does not say.
    """
    config = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(
        f"{type(model).__name__} does not say how long it was trained: give the method's window, or trained and factor"
    )


def positions_limit(model: nn.Module) -> int | None:
    """Most tokens the model has positions for: rows of its learned table or of its table of angles; None for any."""
    rows = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in _TABLES
    ]
    rows += [
        buffer.shape[0]
        for name, buffer in (*model.named_buffers(), *_plain_tensors(model))
        if name.rsplit(".", 1)[-1] in _TABLES and buffer.ndim == 2
    ]
    return min(rows, default=None)


_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tables that are neither parameters nor buffers."""
    for module in model.modules():
        for name in _TABLES:
            value = vars(module).get(name)
            if isinstance(value, Tensor):
                yield name, value


@contextmanager
def positions_checked(model: nn.Module) -> Iterator[None]:
    """Refuse, until the context ends, texts longer than the model's table of positions."""
    limit = positions_limit(model)
    if limit is None:
        yield
        return

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        cached = 0 if cache is None else int(cache.get_seq_length())
        length = cached + inputs.shape[1] if isinstance(inputs, Tensor) and inputs.ndim == 2 else 0
        if length > limit:
            raise MeasureError(
                f"a text of {length} tokens is longer than the table of {limit} positions of {type(model).__name__}: "
                "no method can run it; give a shorter text"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
