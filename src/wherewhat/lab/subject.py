"""A laboratory model as measurements see it: every measurement of a language model runs on it unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.blocks import Blocks
from wherewhat.errors import ConfigError
from wherewhat.lab.model import LabModel

Editor = Callable[[LayerAttention], Tensor | None]


class LabSubject:
    """The ``Subject`` of :mod:`wherewhat.measures.measurement` on a laboratory model.

    There is nothing to prove: the model itself hands out the tensors its attention is made of.

    Args:
        model: The model, wherever it is.
        trained_length: Tokens of the texts it was trained on.
    """

    def __init__(self, model: LabModel, *, trained_length: int) -> None:
        self.model = model
        self._trained_length = trained_length
        self._orders: Mapping[int, Tensor] = {}

    def run(
        self,
        ids: Tensor,
        reducer: Callable[[LayerAttention], None],
        *,
        logits: bool = False,
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Run on ``ids`` ``(batch, n)``, hand each layer to ``reducer``, return logits if asked for.

        Args:
            ids: Tokens.
            reducer: Called with each layer.
            logits: Whether logits ``(batch, n, vocabulary)`` are wanted.
            positions: Where the tokens stand, ``(n,)``; who sees whom stays as it is.
        """

        def look(attention: LayerAttention) -> None:
            reducer(attention)

        found = self._forward(ids, look, positions=positions, all_tokens=logits)
        return found if logits else None

    def edited(self, ids: Tensor, editor: Editor, *, positions: Tensor | None = None) -> Tensor:
        """Logits ``(batch, n, vocabulary)`` with layers' attention outputs replaced by what ``editor`` returns."""
        return self._forward(ids, editor, positions=positions)

    @contextmanager
    def reordered(self, orders: Mapping[int, Tensor]) -> Iterator[None]:
        """While open, hidden states that enter a layer are put in another order: place i takes that of ``order[i]``."""
        for layer in orders:
            if not 0 <= layer < self.model.config.layers:
                raise ConfigError(f"there is no layer {layer}: choose of 0 to {self.model.config.layers - 1}")
        before, self._orders = self._orders, orders
        try:
            yield
        finally:
            self._orders = before

    def trained_length(self) -> int:
        """Tokens of the texts it was trained on."""
        return self._trained_length

    def key_mixing(self) -> Mapping[int, float]:
        """0 for every layer: each token makes its own key."""
        return dict.fromkeys(range(self.model.config.layers), 0.0)

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """The layers of a pass over ``ids`` ``(1, n)``, to be run again on changed inputs."""
        return _blocks(self, ids)

    @torch.no_grad()
    def _forward(
        self,
        ids: Tensor,
        look: Editor,
        *,
        positions: Tensor | None = None,
        all_tokens: bool = True,
        stream: Callable[[int, Tensor], Tensor | None] | None = None,
    ) -> Tensor:
        device = self.model.embedding.device
        orders = {layer: order.to(device) for layer, order in self._orders.items()}

        def reorder(layer: int, x: Tensor) -> Tensor | None:
            return x[:, orders[layer]] if layer in orders else None

        logits: Tensor = self.model(
            ids.to(device),
            all_tokens=all_tokens,
            positions=None if positions is None else positions.to(device),
            look=look,
            edit_stream=stream or (reorder if orders else None),
        )
        return logits


class _LabBlocks(Blocks):
    """Layers of a laboratory model on other inputs: the whole model runs again with one layer's input replaced."""

    def __init__(self, subject: LabSubject, ids: Tensor) -> None:
        self._subject, self._ids = subject, ids
        self._streams: dict[int, Tensor] = {}

        def keep(layer: int, x: Tensor) -> None:
            if layer < subject.model.config.layers:
                self._streams[layer] = x

        subject._forward(ids, lambda _: None, stream=keep)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers."""
        return list(self._streams)

    def hidden(self, layer: int) -> Tensor:
        """The residual stream that entered a layer, ``(1, n, width)``."""
        return self._streams[layer]

    def run(self, layer: int, hidden: Tensor) -> LayerAttention:
        """Attention of a layer on another stream ``(1, n, width)``."""
        found: dict[int, LayerAttention] = {}
        self._subject._forward(
            self._ids,
            lambda attention: found.update({attention.layer: attention}),
            stream=lambda index, _: hidden if index == layer else None,
        )
        return found[layer]


@contextmanager
def _blocks(subject: LabSubject, ids: Tensor) -> Iterator[Blocks]:
    yield _LabBlocks(subject, ids)
