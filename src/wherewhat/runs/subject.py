"""A loaded, proved model as measurements use it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.blocks import Blocks, blocks, key_mixing
from wherewhat.captures.chunks import check_chunk, prove_chunks, run_in_chunks
from wherewhat.captures.comparison import input_device, last_logits
from wherewhat.captures.proof import Proof, capture, intervene, prove
from wherewhat.errors import CaptureError
from wherewhat.extend.plan import Plan
from wherewhat.measures.variants import VariantRuns
from wherewhat.models.loaded import LoadedModel, max_positions, trained_length
from wherewhat.runs.continuation import continued
from wherewhat.runs.placement import computing, placed, positions_refused, reordered


class ModelSubject:
    """Runs a loaded, proved model and passes its layers on.

    Args:
        loaded: The model.
        proof: Its proof; by default it is made now.
        chunk: Tokens of a chunk; longer texts are run in chunks through the key-value cache.
        offload: Keep queries and outputs of chunks in main memory until their layer is measured.
    """

    def __init__(
        self, loaded: LoadedModel, proof: Proof | None = None, *, chunk: int | None = None, offload: bool = False
    ) -> None:
        check_chunk(chunk)
        self.loaded = loaded
        self._chunk, self._offload = chunk, offload
        self._proved_chunks = 0
        self._open_orders = 0
        self.proof = proof or prove(loaded.model)
        # The logits (n, vocabulary) are often larger than everything measured. Most model families can skip them.
        self._without_head = last_logits(loaded.model, 1)

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
            reducer: Called with each layer.
            logits: Whether to return logits.
            positions: Positions of the tokens, ``(n,)``; consecutive by default.

        Returns:
            Logits ``(batch, n, vocabulary)`` or None.
        """
        model = self.loaded.model
        ids = ids.to(input_device(model))
        arguments = self._placed(ids, positions)
        # Hidden states in another order need all tokens of the text at once.
        if self._chunk is not None and ids.shape[1] > self._chunk and not self._open_orders:
            self._prove_chunks(ids.shape[1])
            with computing(model, positions):
                return run_in_chunks(
                    model,
                    ids,
                    reducer,
                    proof=self.proof,
                    chunk=self._chunk,
                    offload=self._offload,
                    logits=logits,
                    placed=arguments,
                    without_head=self._without_head,
                )
        with torch.no_grad(), computing(model, positions), capture(model, reducer, proof=self.proof):
            output = model(input_ids=ids, use_cache=False, **arguments, **({} if logits else self._without_head))
        return output.logits if logits else None

    def continued(
        self,
        ids: Tensor,
        continuations: Sequence[Sequence[int]],
        *,
        positions: Tensor | None = None,
        orders: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of continuations; see :func:`wherewhat.runs.continuation.continued`."""
        if positions is not None and self._refusal:
            raise CaptureError(self._refusal)
        return continued(self.loaded.model, self.proof, ids, continuations, positions=positions, orders=orders)

    def _prove_chunks(self, tokens: int) -> None:
        """Prove chunks once, and again for longer texts, which may exceed windows that the last proof did not reach."""
        if tokens > self._proved_chunks:
            prove_chunks(self.loaded.model, self.proof, tokens=tokens)
            self._proved_chunks = tokens

    @contextmanager
    def reordered(self, orders: Mapping[int, Tensor]) -> Iterator[None]:
        """Permute the hidden states that enter layers until the context ends: position i takes that of ``order[i]``."""
        self._open_orders += 1
        try:
            with reordered(self.loaded.model, self.proof, orders):
                yield
        finally:
            self._open_orders -= 1

    @property
    def encoding(self) -> str:
        """Position encoding found by the proof: ``rope``, ``bias``, ``learned`` or ``none``."""
        rotations = [layer.plan.rotation for layer in self.proof.layers]
        if any(rotation is not None and bool(rotation.inv_freq.any()) for rotation in rotations):
            return "rope"
        if any("bias" in layer.features for layer in self.proof.layers):
            return "bias"
        return "learned" if max_positions(self.loaded.model)[1] else "none"

    @functools.cached_property
    def _refusal(self) -> str:
        return positions_refused(self.loaded.model)

    def _placed(self, ids: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Return the arguments that set positions; none by default."""
        if positions is None:
            return {}
        if self._refusal:
            raise CaptureError(self._refusal)
        return placed(self.loaded.model, ids, positions)

    @functools.cached_property
    def _mixing(self) -> dict[int, float]:
        return key_mixing(self.loaded.model, self.proof)

    def trained_length(self) -> int:
        """Return the trained length in tokens, from the model's configuration."""
        return trained_length(self.loaded.model)

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan of a model with other heads or weights."""
        plan.check(self.loaded.model, self.proof, advice="")

    def key_mixing(self) -> Mapping[int, float]:
        """Return how far swapping two inputs of a layer is from swapping its keys, by layer."""
        return self._mixing

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """Return the attention modules of a pass over ``ids`` ``(1, n)``, to be run again on changed inputs."""
        model = self.loaded.model
        return blocks(model, ids.to(input_device(model)), self.proof)

    def variants(self, ids: Tensor) -> VariantRuns:
        """Return runs of variants of the model that differ in one layer, over ``ids`` ``(batch, n)`` as they are."""
        return VariantRuns(self.loaded.model, self.proof, ids, planted=False)

    def edited(
        self, ids: Tensor, editor: Callable[[LayerAttention], Tensor | None], *, positions: Tensor | None = None
    ) -> Tensor:
        """Return logits ``(batch, n, vocabulary)`` with layers' attention outputs replaced by those of ``editor``."""
        model = self.loaded.model
        ids = ids.to(input_device(model))
        arguments = self._placed(ids, positions)
        with torch.no_grad(), computing(model, positions), intervene(model, editor, proof=self.proof):
            logits: Tensor = model(input_ids=ids, use_cache=False, **arguments).logits
        return logits
