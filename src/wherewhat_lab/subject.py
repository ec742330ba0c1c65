"""Adapters that let measurements of language models run on a laboratory model, and on all of its layers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from wherewhat.caches.plan import Plan
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.blocks import Blocks
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.batches import in_order
from wherewhat_lab.model import LabModel

Editor = Callable[[LayerAttention], Tensor | None]


class LabSubject:
    """Implementation of ``wherewhat.measures.measurement.Subject`` for a laboratory model.

    No verification of the capture is needed: the model itself provides the tensors of its attention.

    Args:
        model: The model, on any device.
        trained_length: Number of tokens of its training sequences.
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
        """Run on ``ids`` ``(batch, n)`` and call ``reducer`` with each layer.

        Args:
            ids: Tokens.
            reducer: Called with each layer's attention.
            logits: Return logits ``(batch, n, vocabulary)``.
            positions: Positions of the tokens, ``(n,)``, or ``(batch, n)`` to run texts one after the other; the causal
                mask does not depend on them.
        """
        rows = None if positions is None or positions.ndim == 1 else positions
        if rows is None:
            output = self._forward(ids, reducer, positions=positions, all_tokens=logits)
        else:
            texts = zip(ids, rows, strict=True)
            output = torch.cat(
                [self._forward(text[None], reducer, positions=own, all_tokens=logits) for text, own in texts]
            )
        return output if logits else None

    def edited(self, ids: Tensor, editor: Editor, *, positions: Tensor | None = None) -> Tensor:
        """Return logits ``(batch, n, vocabulary)`` with attention outputs replaced by the results of ``editor``."""
        return self._forward(ids, editor, positions=positions)

    @contextmanager
    def reordered(self, orders: Mapping[int, Tensor]) -> Iterator[None]:
        """Permute the hidden states that enter layers inside the context: token i gets the state of ``order[i]``."""
        for layer in orders:
            if not 0 <= layer < self.model.config.layers:
                raise ConfigError(f"there is no layer {layer}: choose from 0 to {self.model.config.layers - 1}")
        before, self._orders = self._orders, orders
        try:
            yield
        finally:
            self._orders = before

    def trained_length(self) -> int:
        """Return the number of tokens of the training sequences."""
        return self._trained_length

    def check_plan(self, plan: Plan) -> None:
        """Refuse every plan."""
        raise MeasureError(f"the plan is of {plan.model}, and plans are of models of transformers: leave it out")

    def key_mixing(self) -> Mapping[int, float]:
        """Return 0 for every layer: each key depends on the hidden state of its own token only."""
        return dict.fromkeys(range(self.model.config.layers), 0.0)

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """Return the layers of a pass over ``ids`` ``(1, n)``, which can be run again on changed inputs."""
        return nullcontext(_LabBlocks(self, ids))

    def variants(self, ids: Tensor, *, logits: bool = False) -> NoReturn:
        """Refuse variants of single heads, which start in the middle of a language model of transformers."""
        raise ConfigError("a laboratory model has no batched variants of single heads: measure it without heads=true")

    def stream(self) -> NoReturn:
        """Refuse sums over heads, which are found in a language model of transformers."""
        raise ConfigError("a laboratory model has no sum over heads: its logits are not those of transformers")

    @torch.no_grad()
    def _forward(
        self,
        ids: Tensor,
        editor: Editor,
        *,
        positions: Tensor | None = None,
        all_tokens: bool = True,
        stream: Callable[[int, Tensor], Tensor | None] | None = None,
    ) -> Tensor:
        device = self.model.embedding.device
        orders = {layer: order.to(device) for layer, order in self._orders.items()}

        def reorder(layer: int, x: Tensor) -> Tensor | None:
            return in_order(x, orders[layer]) if layer in orders else None

        logits: Tensor = self.model(
            ids.to(device),
            all_tokens=all_tokens,
            positions=None if positions is None else positions.to(device),
            edit_attention=editor,
            edit_stream=stream or (reorder if orders else None),
        )
        return logits


class _LabBlocks(Blocks):
    """Layers of a laboratory model on changed inputs: the whole model runs again with one layer's input replaced."""

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
        """Return the residual stream that entered a layer, ``(1, n, width)``."""
        return self._streams[layer]

    def run(self, layer: int, hidden: Tensor) -> LayerAttention:
        """Return the attention of a layer on another stream ``(1, n, width)``."""
        layers: dict[int, LayerAttention] = {}
        self._subject._forward(
            self._ids,
            lambda attention: layers.update({attention.layer: attention}),
            stream=lambda index, _: hidden if index == layer else None,
        )
        return layers[layer]


def fold(layers: Sequence[LayerAttention], rows: slice = slice(None)) -> LayerAttention:
    """Return layers of a laboratory model as one layer with a batch of 1 and ``layers · texts · heads`` heads.

    All layers have the same rotation, scale and causal mask; a bias depends on the head, not on the text. Since
    :class:`LayerAttention` does not mix heads, each keeps its logits, weights and output.
    """
    first = layers[0]
    count = first.rot_q[rows].shape[0]

    def joined(name: str, at: int) -> Tensor:
        parts = [getattr(layer, name)[rows] for layer in layers]
        return torch.stack(parts).movedim(at + 1, 2).flatten(0, 2)[None]

    added = tuple(
        torch.stack([layer.mask.added[index] for layer in layers])[:, None]
        .expand(-1, count, -1, -1, -1)
        .reshape(1, -1, *first.mask.added[index].shape[-2:])
        for index in range(len(first.mask.added))
    )
    return replace(
        first,
        rot_q=joined("rot_q", 1),
        rot_k=joined("rot_k", 1),
        value=joined("value", 1),
        output=joined("output", 2).movedim(1, 2),
        mask=Mask(causal=first.mask.causal, added=added, device=first.mask.device),
    )


def unfold(output: Tensor, texts: int) -> Tensor:
    """Return the output ``(1, n, texts · heads, d)`` of one folded layer as ``(texts, n, heads, d)``."""
    return torch.unflatten(output[0], 1, (texts, -1)).movedim(1, 0)


def by_head(values: Tensor, layers: int, texts: int) -> Tensor:
    """Return values ``(layers · texts · heads, …)`` of folded layers as ``(layers, texts, heads, …)``."""
    return torch.unflatten(values, 0, (layers, texts, -1))
