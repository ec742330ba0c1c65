"""A model as measurements use it: loaded, proved, and run; and its attention on a text, copied."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import WRAPPER_ASSIGNMENTS, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, MaskCopies
from wherewhat.captures.blocks import Blocks, blocks, key_mixing
from wherewhat.captures.chunks import check_chunk, prove_chunks, run_in_chunks
from wherewhat.captures.comparison import input_device, last_logits
from wherewhat.captures.proof import Proof, capture, current_proof, intervene, prove
from wherewhat.errors import CaptureError, ConfigError, TextError
from wherewhat.models import loader
from wherewhat.models.loaded import LoadedModel, max_positions, resolve_device, trained_length
from wherewhat.models.memory import evaluation, load_memory
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import checked
from wherewhat.runs.placement import computing, continued, placed, positions_refused, reordered
from wherewhat.runs.request import MemoryModel, ModelRequest, model_request
from wherewhat.text.documents import Document

if TYPE_CHECKING:
    from wherewhat.caches.plan import Plan
    from wherewhat.measures.variants import VariantRuns

_Options = ParamSpec("_Options")


def _then_proved(load: Callable[_Options, LoadedModel]) -> Callable[_Options, LoadedModel]:
    """Return ``load`` with the same options, followed by a proof."""

    @wraps(load, assigned=[name for name in WRAPPER_ASSIGNMENTS if name not in ("__doc__", "__module__")])
    def proved(*args: _Options.args, **options: _Options.kwargs) -> LoadedModel:
        """Load a causal language model and prove its capture.

        Options are those of :func:`wherewhat.models.loader.load`: ``smollm2`` (embedded), a Hugging Face id, a folder
        or a ``.gguf`` file, and how to load it.
        """
        loaded = load(*args, **options)
        prove(loaded.model)
        return loaded

    return proved


load = _then_proved(loader.load)


def load_model(
    model: ModelRequest | MemoryModel, *, say: Callable[[str], None] | None = None, hashed: bool = True
) -> LoadedModel:
    """Load the model of a request, without proving it.

    ``say`` is called with one line before a slow step; ``hashed`` is whether to hash the weights of a model in memory.
    """
    if isinstance(model, MemoryModel):
        options = {name: getattr(model, name) for name in ("weights", "seed", "loaded")}
        return load_memory(model.module, model.tokenizer, name=model.model, hashed=hashed, **options)
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return loader.load(options.pop("model"), **options, progress=say)


def device_type(loaded: LoadedModel) -> str:
    """Return the type of a model's device; of several, that of the first layers that are not offloaded."""
    return torch.device(next((name for name in loaded.device.split("+") if name != "offloaded"), "cpu")).type


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
        """Run on ``ids`` ``(batch, n)``, call ``reducer`` with each layer, and return the logits if they are wanted.

        Positions of the tokens ``(n,)`` are consecutive by default; logits are ``(batch, n, vocabulary)``.
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
        """Return log-probabilities of continuations; see :func:`wherewhat.runs.placement.continued`."""
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
        rotations = [layer.layout.rotation for layer in self.proof.layers]
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
        from wherewhat.measures.variants import VariantRuns  # needs caches and planted texts, which few need

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


_mixing: weakref.WeakKeyDictionary[Any, tuple[Proof, dict[int, float]]] = weakref.WeakKeyDictionary()


@checked()
def attention(
    model: Any,
    text: Any,
    *,
    tokenizer: Any = None,
    layers: Collection[int] | None = None,
    device: str | None = None,
    tokens: int | None = None,
) -> list[LayerAttention]:
    """Run a model on a text and return the queries, keys and values of its layers, verified and copied.

    The model is run in evaluation mode, without gradients and cache; its mode is restored. Memory is that of the
    queries, keys, values and outputs of the chosen layers; no n × n matrix is kept, except masks that the model itself
    makes.

    Args:
        model: A model of transformers, a PEFT model, a pipeline, what :func:`wherewhat.load` returned, or a name,
            folder or file.
        text: Token ids ``(n,)`` or ``(batch, n)``, a string, or a document.
        tokenizer: Tokenizer of a model in memory, for strings.
        layers: Indices of the layers to return; all by default.
        device: Device of the copies, such as ``cpu``; by default that of each layer.
        tokens: Number of tokens to use, from the first; all by default.

    Examples:
        >>> layers = wherewhat.attention(model, ids)
        >>> layers[3].pattern()  # attention weights of layer 3, (batch, heads, n, n)
    """
    request = model_request(model, tokenizer)
    if not isinstance(request, ModelRequest | MemoryModel):
        raise ConfigError(f"model is of type {type(model).__name__}: give a model of transformers, or a name or folder")
    loaded = load_model(request, hashed=False)
    ids = _ids(loaded, text, tokens)
    target = None if device is None else resolve_device(device)
    copies: MaskCopies = {}
    found: list[LayerAttention] = []
    with evaluation(loaded.model), new_process_settings(weight_dtypes(loaded.model)):
        proof = current_proof(loaded.model)
        known = {layer.layout.layer for layer in proof.layers}
        absent = sorted(set(layers or ()) - known)
        if absent:
            raise ConfigError(f"layers holds {absent[0]}: {loaded.name} has {min(known)} to {max(known)}")
        mixing = _key_mixing(loaded.model, proof)

        def keep(layer: LayerAttention) -> None:
            if layers is None or layer.layer in layers:
                copied = layer.copied(device=target, memo=copies)
                found.append(replace(copied, key_mixing=mixing.get(layer.layer)))

        ModelSubject(loaded, proof).run(ids, keep)
    return found


def _key_mixing(model: Any, proof: Proof) -> dict[int, float]:
    """Return the key mixing of a model, measured once per proof."""
    known = _mixing.get(model)
    if known is None or known[0] is not proof:
        _mixing[model] = known = (proof, key_mixing(model, proof))
    return known[1]


def _ids(loaded: LoadedModel, text: Any, tokens: int | None) -> Tensor:
    """Return token ids ``(batch, n)`` on the model's device."""
    if isinstance(text, Mapping):  # the output of a tokenizer
        mask = text.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise TextError("the text is padded (attention_mask holds 0): give texts of one length, or one at a time")
        text = text.get("input_ids")
    if isinstance(text, Document):
        text = text.text if text.ids is None else list(text.ids)
    if isinstance(text, str):
        return loaded.encode(text, tokens=tokens, allow_beyond=True)[None].to(input_device(loaded.model))
    try:
        ids = torch.as_tensor(text)
    except (TypeError, ValueError, RuntimeError):
        raise TextError(f"text is of type {type(text).__name__}: give a string, or token ids of one length") from None
    if ids.ndim not in (1, 2) or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        shown = f"shape {tuple(ids.shape)} and dtype {str(ids.dtype).removeprefix('torch.')}"
        raise TextError(f"text has {shown}: give a string, or token ids of shape (n,) or (batch, n) in int64")
    rows = [loaded.encode(row, tokens=tokens, allow_beyond=True) for row in ids.view(-1, ids.shape[-1]).tolist()]
    return torch.stack(rows).to(input_device(loaded.model))
