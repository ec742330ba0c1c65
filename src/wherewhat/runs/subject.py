"""A model as measurements use it: loaded, proved, and run: on a text, at chosen positions, over continuations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import WRAPPER_ASSIGNMENTS, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn

from wherewhat.caches.kept_keys import KeptKeys, keys_kept
from wherewhat.captures.attention import LayerAttention, MaskCopies
from wherewhat.captures.blocks import Blocks, blocks, key_mixing
from wherewhat.captures.chunks import check_chunk, prove_chunks, run_in_chunks
from wherewhat.captures.layer_proofs import input_device, last_logits, random_prompt
from wherewhat.captures.proof import Proof, capture, current_proof, intervene, prove
from wherewhat.captures.stream import ResidualStream
from wherewhat.errors import CaptureError, ConfigError, MeasureError, TextError, one_line
from wherewhat.measures.batches import in_order
from wherewhat.models import loader
from wherewhat.models.loaded import LoadedModel, evaluation, max_positions, resolve_device, trained_length
from wherewhat.models.memory import load_memory
from wherewhat.numerics import free_memory, new_process_settings, weight_dtypes
from wherewhat.options import checked
from wherewhat.runs.request import MemoryModel, ModelRequest, model_request
from wherewhat.text.documents import Document

if TYPE_CHECKING:
    from wherewhat.caches.plan import Plan
    from wherewhat.measures.variants import VariantRuns

_PROBE_TOKENS = 8


def placed(model: Any, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over ``ids`` ``(batch, n)`` that put the tokens at ``positions``.

    They are ``(n,)``, or ``(batch, n)`` for each text its own. Without a mask, transformers takes every step other
    than 1 for the start of another text and masks what is before. A mask of ones marks it as one text; windows and the
    causal mask follow the order of the tokens.
    """
    if positions.shape not in (ids.shape[1:], ids.shape):
        raise ConfigError(f"{positions.shape[-1]} positions were given for {ids.shape[1]} tokens: give one for each")
    low, high = int(positions.min()), int(positions.max())
    if low < 0:
        raise ConfigError(f"position {low} is negative: positions start at 0")
    limit, hard = max_positions(model)
    if hard and limit is not None and high >= limit:
        raise ConfigError(f"position {high} is beyond the last of the model's {limit} positions: ask for fewer tokens")
    return {
        "position_ids": positions.to(ids.device).expand(ids.shape),
        "attention_mask": torch.ones_like(ids),
    }


@contextmanager
def computing(model: Any, positions: Tensor | None) -> Iterator[None]:
    """Turn the error of a model that cannot run at given positions into a CaptureError of one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        if positions is None:
            raise
        reason = one_line(error)
        raise CaptureError(
            f"{type(model).__name__} cannot be run at other positions ({reason}): leave kinds of positions out"
        ) from error


def positions_refused(model: Any) -> str:
    """Return in one line why the positions of tokens cannot be set in a model; empty if they can.

    A short pass with reversed positions must differ from a plain one, and one with the usual positions must not.
    """
    kind = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"{kind} takes no position_ids: positions cannot be perturbed; leave kinds of positions out"
    ids = random_prompt(model, _PROBE_TOKENS)
    usual = torch.arange(_PROBE_TOKENS, device=ids.device)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits.float()
        same = model(input_ids=ids, use_cache=False, **placed(model, ids, usual)).logits.float()
        other = model(input_ids=ids, use_cache=False, **placed(model, ids, usual.flip(0))).logits.float()
    size = float(plain.abs().max().clamp_min(1e-30))
    rounding = 1e-4 if next(model.parameters()).element_size() >= 4 else 2e-2
    if float((same - plain).abs().max()) > rounding * size:
        return f"{kind} changes its output when it is given its default positions: positions cannot be perturbed"
    if float((other - plain).abs().max()) <= 1e-6 * size:
        return f"{kind} ignores position_ids (ALiBi or no positions): leave kinds of positions out"
    return ""


@contextmanager
def reordered(model: nn.Module, proof: Proof, orders: Mapping[int, Tensor]) -> Iterator[None]:
    """Permute the hidden states that enter blocks until the context ends.

    Orders ``(n,)``, or ``(batch, n)`` for each text its own, are by index of the block: position i takes the hidden
    state of token ``order[i]``.
    """
    # All blocks are looked up before the first hook, so that an error leaves the model unchanged.
    blocks = {layer: _block(model, proof, layer) for layer in orders}
    with ExitStack() as stack:
        for layer, block in blocks.items():
            hook = _permuting(layer, orders[layer])
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _block(model: nn.Module, proof: Proof, layer: int) -> nn.Module:
    """Return the block of a layer's attention: the numbered module that contains it."""
    plans = [plan for plan in proof.layout.layers if plan.layer == layer]
    if not plans:
        known = sorted(plan.layer for plan in proof.layout.layers)
        raise ConfigError(f"there is no layer {layer} with attention: choose one from {known[0]} to {known[-1]}")
    name = plans[0].name
    match = re.match(r"(.*\.\d+)\.", name)
    if match is None or sum(plan.name == name for plan in proof.layout.layers) > 1:
        raise CaptureError(f"{name} is not in its own block: its input cannot be reordered")
    return model.get_submodule(match[1])


def _permuting(layer: int, order: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = (kwargs.get("hidden_states"), *args)
        before = next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)
        if before is None or before.ndim != 3 or before.shape[1] != order.shape[-1]:
            shape = "nothing" if before is None else f"a tensor {tuple(before.shape)}"
            raise CaptureError(f"layer {layer} is entered by {shape}, not by hidden states of {order.shape[-1]} tokens")
        after = in_order(before, order.to(before.device))
        return (
            tuple(after if x is before else x for x in args),
            {name: after if x is before else x for name, x in kwargs.items()},
        )

    return hook


def continued(
    model: Any,
    proof: Proof,
    ids: Tensor,
    continuations: Sequence[Sequence[int]],
    *,
    positions: Tensor | None = None,
    orders: Mapping[int, Tensor] | None = None,
    shared: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each continuation of a text.

    The text is run once and its keys and values are cached for the continuations, which follow in one batch; those of
    a single token need no second pass. Where a model caches anything but all keys and values (windows, recurrent
    states), each longer continuation is run with its text.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof, which names its layers.
        ids: The text, ``(1, n)``.
        continuations: Token ids of each.
        positions: Positions of the tokens, ``(n + longest continuation - 1,)``; consecutive by default.
        orders: Order in which the text's hidden states enter layers, ``(n,)`` by layer.
        shared: Whether continuations share one pass; False for models that depend on the length of the text.

    Returns:
        Log-probabilities ``(continuations,)`` float64 in nats, and whether each is the model's greedy continuation,
        ``(continuations,)`` bool.
    """
    if not ids.shape[1] or not continuations or not all(map(len, continuations)):
        raise MeasureError("a text and each of its continuations must have tokens: give at least one of each")
    ids = ids.to(input_device(model))
    run = _Run(model, proof, ids, positions, orders or {})
    with torch.no_grad(), computing(model, positions):
        scores = run.together(continuations) if shared else [run.alone(tokens) for tokens in continuations]
    return torch.stack([x for x, _ in scores]), torch.stack([x for _, x in scores])


class _Run:
    """A text and how the model is run on it."""

    def __init__(
        self, model: Any, proof: Proof, ids: Tensor, positions: Tensor | None, orders: Mapping[int, Tensor]
    ) -> None:
        self.model, self.proof, self.ids, self.positions, self.orders = model, proof, ids, positions, orders
        self.n = ids.shape[1]

    def together(self, continuations: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        longer = [tokens for tokens in continuations if len(tokens) > 1]
        with keys_kept() if longer else nullcontext() as kept:
            output = self._pass(self.ids, keep=1, use_cache=bool(longer))
            first, cache = output.logits[0, -1:], getattr(output, "past_key_values", None)
            if kept is not None and _keeps_all(cache, self.n):
                after = iter(self._after(cache, kept, longer))
                return [
                    scored(torch.cat([first, next(after)]) if len(tokens) > 1 else first, tokens)
                    for tokens in continuations
                ]
        return [scored(first, tokens) if len(tokens) == 1 else self.alone(tokens) for tokens in continuations]

    def _after(self, cache: Any, kept: KeptKeys, continuations: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after the tokens of continuations ``(continuations, longest - 1, vocabulary)``."""
        count = max(map(len, continuations)) - 1
        # Padding follows all tokens that are scored, so the causal mask hides it.
        rows = [[*continuation[:-1], *[0] * (count + 1 - len(continuation))] for continuation in continuations]
        tokens = torch.tensor(rows, device=self.ids.device)
        cache.batch_repeat_interleave(len(rows))
        kept.select(torch.zeros(len(rows), dtype=torch.int64))
        arguments: dict[str, Any] = {}
        if self.positions is not None:
            arguments = placed(self.model, tokens, self.positions[self.n : self.n + count])
            arguments["attention_mask"] = tokens.new_ones(len(rows), self.n + count)
        logits: Tensor = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **arguments).logits
        return logits

    def alone(self, continuation: Sequence[int]) -> tuple[Tensor, Tensor]:
        more = torch.tensor([continuation[:-1]], dtype=self.ids.dtype, device=self.ids.device)
        output = self._pass(torch.cat([self.ids, more], 1), keep=len(continuation), use_cache=False)
        return scored(output.logits[0, -len(continuation) :], continuation)

    def _pass(self, ids: Tensor, *, keep: int, use_cache: bool) -> Any:
        count = ids.shape[1]
        arguments: dict[str, Any] = last_logits(self.model, keep)
        if self.positions is not None:
            arguments |= placed(self.model, ids, self.positions[:count])
        behind = torch.arange(self.n, count)
        orders = {layer: torch.cat([order.cpu(), behind]) for layer, order in self.orders.items()}
        with reordered(self.model, self.proof, orders) if orders else nullcontext():
            return self.model(input_ids=ids, use_cache=use_cache, **arguments)


def scored(logits: Tensor, continuation: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a continuation and whether it is greedy, from the logits of its tokens."""
    rows = logits[: len(continuation)].float()
    tokens = torch.tensor(continuation, device=rows.device)
    logprobs = rows.log_softmax(-1).gather(1, tokens[:, None])
    return logprobs.double().sum().cpu(), (rows.argmax(-1) == tokens).all().cpu()


def _keeps_all(cache: Any, n: int) -> bool:
    """Return whether a cache holds the keys and values of n tokens in every layer, and nothing else."""
    from transformers.cache_utils import DynamicLayer

    layers: list[Any] = getattr(cache, "layers", None) or []
    return bool(layers) and all(type(layer) is DynamicLayer and layer.get_seq_length() == n for layer in layers)


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
    model: ModelRequest | MemoryModel,
    *,
    say: Callable[[str], None] | None = None,
    hashed: bool = True,
    tokenizer: Any = None,
) -> LoadedModel:
    """Load the model of a request, without proving it.

    ``say`` is called with one line before a slow step; ``hashed`` is whether to hash the weights of a model in memory;
    ``tokenizer`` is that of the same model by name, if it is loaded already.
    """
    if isinstance(model, MemoryModel):
        options = {name: getattr(model, name) for name in ("weights", "seed", "loaded")}
        return load_memory(model.module, model.tokenizer, name=model.model, hashed=hashed, **options)
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return loader.load(options.pop("model"), **options, tokenizer=tokenizer, progress=say)


def device_type(loaded: LoadedModel) -> str:
    """Return the type of a model's device; of several, that of the first layers that are not offloaded."""
    return torch.device(next((name for name in loaded.device.split("+") if name != "offloaded"), "cpu")).type


def memory(model: Any, tokens: int, *, together: bool = False, chunk: int | None = None) -> float:
    """Return the approximate number of bytes of a forward pass: the weights and the activations of one block.

    No n × n matrix is stored, and only one layer's queries and keys unless the text is run in chunks, so memory grows
    linearly with the length of the text. Documents that are measured ``together`` need float64 sums of every layer's
    queries and keys; with texts in chunks, all layers' queries, keys, values and outputs are stored.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = next(model.parameters()).element_size()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    sums = config.num_hidden_layers * tokens * 4 * hidden * 8 if together else 0
    at_once = min(tokens, chunk or tokens)
    held = 0 if at_once == tokens else config.num_hidden_layers * tokens * 4 * hidden * size
    return float(weights + at_once * (6 * hidden + 3 * inner) * size + sums + held)


_ON_CPU, _ON_GPU = 128, 8192
"""Tokens that go through a model together: more gain little, and on a CPU long texts do not stay in its caches."""


def texts_at_once(model: Any, tokens: int) -> int:
    """Return the number of texts of ``tokens`` tokens that go through a model together, at least 1.

    On a GPU as many as fit into half of its free memory, beside the intermediate results of a layer's measurements.
    """
    device = next((x.device for x in model.parameters() if x.device.type == "cuda"), None)
    if device is None:
        return max(1, _ON_CPU // tokens)
    most = max(1, _ON_GPU // tokens)
    config = model.config.get_text_config()
    hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", 1)
    # A measurement holds queries and keys about eight times in float64, and several blocks of logits.
    each = memory(model, tokens) - memory(model, 0) + 64 * 2 * hidden * tokens + 16 * heads * tokens * min(tokens, 2048)
    free = free_memory(device)
    while most > 1 and most * each > free / 2:
        most //= 2
    return most


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
        if chunk is not None:
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

        Positions of the tokens, ``(n,)`` or ``(batch, n)``, are consecutive by default; logits are ``(batch, n,
        vocabulary)``.
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
        """Return log-probabilities of continuations; see :func:`continued`."""
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
        """Permute the hidden states that enter layers until the context ends: position i takes that of ``order[i]``.

        Orders are ``(n,)``, or ``(batch, n)`` for each text its own.
        """
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
        return _key_mixing(self.loaded.model, self.proof)

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

    def variants(self, ids: Tensor, *, logits: bool = False) -> VariantRuns:
        """Return runs of variants of the model that differ in one layer, over ``ids`` ``(batch, n)`` as they are."""
        from wherewhat.measures.variants import VariantRuns  # needs caches and planted texts, which few need

        return VariantRuns(self.loaded.model, self.proof, ids, planted=False, logits=logits)

    def stream(self) -> ResidualStream:
        """Return how the heads add to the logits, found once."""
        return self._stream

    @functools.cached_property
    def _stream(self) -> ResidualStream:
        return ResidualStream(self.loaded.model, self.proof)

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
    copied: list[LayerAttention] = []
    with evaluation(loaded.model), new_process_settings(weight_dtypes(loaded.model)):
        proof = current_proof(loaded.model)
        known = {layer.layout.layer for layer in proof.layers}
        absent = sorted(set(layers or ()) - known)
        if absent:
            raise ConfigError(f"layers holds {absent[0]}: {loaded.name} has {min(known)} to {max(known)}")
        mixing = _key_mixing(loaded.model, proof)

        def keep(layer: LayerAttention) -> None:
            if layers is None or layer.layer in layers:
                copy = layer.copied(device=target, memo=copies)
                copied.append(replace(copy, key_mixing=mixing.get(layer.layer)))

        ModelSubject(loaded, proof).run(ids, keep)
    return copied


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
