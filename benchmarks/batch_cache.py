"""A cache for a batch of texts that are read a few at a time and leave it when they have ended."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer: new ones are written behind the others, which are not copied."""

    def __init__(self, batch: int, tokens: int) -> None:
        super().__init__()
        self._batch, self._tokens = batch, tokens
        self._buffers: list[Tensor] = []
        self.rows: slice | None = None
        """Texts of the batch that are read first, by themselves; None if all have been."""
        self._count = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Reserve memory."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = [
            x.new_empty(self._batch, x.shape[1], self._tokens, x.shape[3]) for x in (key_states, value_states)
        ]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values ``(texts, kv_heads, n, d)`` of new tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = (key_states, value_states)
        if self.rows is not None:
            self._count = key_states.shape[2]
            for buffer, x in zip(self._buffers, new, strict=True):
                buffer[self.rows, :, : self._count] = x
            return new
        start, self._count = self._count, self._count + key_states.shape[2]
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, start : self._count] = x
        self.keys, self.values = (buffer[:, :, : self._count] for buffer in self._buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return 0 if self.rows is not None else self._count

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some texts of the batch."""
        self._buffers = [buffer[indices] for buffer in self._buffers]


class BatchCache(Cache):  # type: ignore[misc]
    """The layers' keys and values of a batch of texts.

    Args:
        layers: Number of layers.
        batch: Number of texts.
        tokens: Most tokens of a text.
    """

    def __init__(self, layers: int, batch: int, tokens: int) -> None:
        super().__init__(layers=[_Layer(batch, tokens) for _ in range(layers)])

    def fill(self, rows: slice | None) -> None:
        """Store the keys of the next pass, the first of these texts, in their rows; None once all have been read."""
        for layer in self.layers:
            layer.rows = rows


def holds_whole_texts(config: Any) -> bool:
    """Return whether every layer of a model keeps all keys, so that :class:`BatchCache` can be its cache."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "sliding_window", None) is None and all(kind == "full_attention" for kind in kinds)
