"""Texts that go beyond a model's table of positions, refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from wherewhat.errors import MeasureError
from wherewhat.positions import hard_limit


@contextmanager
def positions_checked(model: nn.Module) -> Iterator[None]:
    """Refuse, until the context ends, texts longer than the model's table of positions."""
    limit = hard_limit(model)
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
