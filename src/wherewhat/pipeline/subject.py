"""A loaded model as measurements see it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from wherewhat.capturing import LayerAttention, Proof, capture, intervene, prove
from wherewhat.capturing.blocks import Blocks, blocks, key_mixing
from wherewhat.errors import CaptureError
from wherewhat.extend.training import trained_length
from wherewhat.models import LoadedModel
from wherewhat.pipeline.placing import computing, placed, positions_refused
from wherewhat.pipeline.reordering import reordered


class ModelSubject:
    """Runs a loaded, proved model and shows its layers."""

    def __init__(self, loaded: LoadedModel, proof: Proof | None = None) -> None:
        self.loaded = loaded
        self.proof = proof or prove(loaded.model)
        # The head's output is (n, vocabulary): often larger than everything measured. Most families can skip it.
        accepts = inspect.signature(type(loaded.model).forward).parameters
        self._without_head = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}

    def run(
        self,
        ids: Tensor,
        reducer: Callable[[LayerAttention], None],
        *,
        logits: bool = False,
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Run on ``ids`` ``(batch, n)`` and hand each layer to ``reducer``.

        Args:
            ids: Tokens.
            reducer: Called with each layer.
            logits: Whether logits are wanted.
            positions: Where the tokens stand, ``(n,)``; one after the other by default.

        Returns:
            Logits ``(batch, n, vocabulary)`` if asked for, else None.

        Raises:
            CaptureError: If positions are given to a model that takes none.
            ConfigError: If it has no such positions.
        """
        model = self.loaded.model
        ids = ids.to(model.get_input_embeddings().weight.device)
        arguments = self._placed(ids, positions)
        with torch.no_grad(), computing(model, positions), capture(model, reducer, proof=self.proof):
            output = model(input_ids=ids, use_cache=False, **arguments, **({} if logits else self._without_head))
        return output.logits if logits else None

    def reordered(self, orders: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """While open, hidden states that enter a layer are put in another order: place i takes that of ``order[i]``."""
        return reordered(self.loaded.model, self.proof, orders)

    @functools.cached_property
    def _refusal(self) -> str:
        return positions_refused(self.loaded.model)

    def _placed(self, ids: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Arguments that put tokens at positions; none by default."""
        if positions is None:
            return {}
        if self._refusal:
            raise CaptureError(self._refusal)
        return placed(self.loaded.model, ids, positions)

    @functools.cached_property
    def _mixing(self) -> dict[int, float]:
        return key_mixing(self.loaded.model, self.proof)

    def trained_length(self) -> int:
        """Tokens of the texts it was trained on, as its configuration says.

        Raises:
            ConfigError: If it does not say.
        """
        return trained_length(self.loaded.model)

    def key_mixing(self) -> Mapping[int, float]:
        """How far swapping two inputs of a layer is from swapping its keys, by layer; see `capturing.blocks`."""
        return self._mixing

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """The attention modules of a pass over ``ids`` ``(1, n)``, to be run again on changed inputs."""
        model = self.loaded.model
        return blocks(model, ids.to(model.get_input_embeddings().weight.device), self.proof)

    def edited(
        self, ids: Tensor, editor: Callable[[LayerAttention], Tensor | None], *, positions: Tensor | None = None
    ) -> Tensor:
        """Logits ``(batch, n, vocabulary)`` with layers' attention outputs replaced by what ``editor`` returns."""
        model = self.loaded.model
        ids = ids.to(model.get_input_embeddings().weight.device)
        arguments = self._placed(ids, positions)
        with torch.no_grad(), computing(model, positions), intervene(model, editor, proof=self.proof):
            logits: Tensor = model(input_ids=ids, use_cache=False, **arguments).logits
        return logits
