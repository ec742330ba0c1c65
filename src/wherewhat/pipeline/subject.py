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
from wherewhat.models import LoadedModel


class ModelSubject:
    """Runs a loaded, proved model and shows its layers."""

    def __init__(self, loaded: LoadedModel, proof: Proof | None = None) -> None:
        self.loaded = loaded
        self.proof = proof or prove(loaded.model)
        # The head's output is (n, vocabulary): often larger than everything measured. Most families can skip it.
        accepts = inspect.signature(type(loaded.model).forward).parameters
        self._without_head = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}

    def run(self, ids: Tensor, reducer: Callable[[LayerAttention], None], *, logits: bool = False) -> Tensor | None:
        """Run on ``ids`` ``(batch, n)`` and hand each layer to ``reducer``.

        Returns:
            Logits ``(batch, n, vocabulary)`` if asked for, else None.
        """
        model = self.loaded.model
        ids = ids.to(model.get_input_embeddings().weight.device)
        with torch.no_grad(), capture(model, reducer, proof=self.proof):
            output = model(input_ids=ids, use_cache=False, **({} if logits else self._without_head))
        return output.logits if logits else None

    @functools.cached_property
    def _mixing(self) -> dict[int, float]:
        return key_mixing(self.loaded.model, self.proof)

    def key_mixing(self) -> Mapping[int, float]:
        """How far swapping two inputs of a layer is from swapping its keys, by layer; see `capturing.blocks`."""
        return self._mixing

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """The attention modules of a pass over ``ids`` ``(1, n)``, to be run again on changed inputs."""
        model = self.loaded.model
        return blocks(model, ids.to(model.get_input_embeddings().weight.device), self.proof)

    def edited(self, ids: Tensor, editor: Callable[[LayerAttention], Tensor | None]) -> Tensor:
        """Logits ``(batch, n, vocabulary)`` with layers' attention outputs replaced by what ``editor`` returns."""
        model = self.loaded.model
        ids = ids.to(model.get_input_embeddings().weight.device)
        with torch.no_grad(), intervene(model, editor, proof=self.proof):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits
