"""A key-value cache whose layers compute the attention over their own keys, and passes of a model with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from wherewhat.caches.attention import ONE_TEXT, check_unpadded
from wherewhat.caches.edits import LayerEdits, edited_layer
from wherewhat.captures.calls import AttentionCall, unobserved
from wherewhat.captures.chunks import CHUNK_TOLERANCE
from wherewhat.captures.layer_proofs import random_prompt
from wherewhat.captures.layout import LayerLayout
from wherewhat.captures.proof import PROMPT_TOKENS, Proof
from wherewhat.captures.session import observing
from wherewhat.captures.structure import ModelWatch
from wherewhat.errors import CaptureError, MeasureError, one_line

_OTHER_RULE = "the cache was filled under another plan or method: start with a new one"


class RunningPass:
    """State that the layers of a pass share.

    Attributes:
        layer: The layer that has new keys, until its attention is computed.
        count: Number of tokens after this pass, which is that of all layers; None before the first of them.
        closed: Whether the context of the plan has been left.
    """

    def __init__(self) -> None:
        self.closed = False
        self._scratch: Tensor | None = None
        self.start()

    def start(self) -> None:
        """Forget the previous pass, which may have failed."""
        self.layer: AttendingLayer | None = None
        self.count: int | None = None
        self._shape: tuple[Any, ...] = ()
        self._placeholder: Tensor | None = None

    def placeholder(self, new: Tensor, count: int) -> Tensor:
        """Return a tensor of the shape of ``count`` keys like ``new``, without memory for them.

        Its values are not used. Layers share it: one view takes as long to make as a small kernel to start.
        """
        shape = (new.shape, count, new.dtype, new.device)
        if self._placeholder is None or self._shape != shape:
            batch, heads, _, d = new.shape
            self._shape, self._placeholder = shape, new.new_zeros(1).expand(batch, heads, count, d)
        return self._placeholder

    def scratch(self, size: int, device: torch.device) -> Tensor:
        """Return memory for at least ``size`` float32 numbers, which layers use one after the other."""
        if self._scratch is None or self._scratch.numel() < size or self._scratch.device != device:
            self._scratch = torch.empty(size, dtype=torch.float32, device=device)
        return self._scratch

    def __deepcopy__(self, _: Any) -> RunningPass:
        """Return the same object: a copied cache is used in the same context."""
        return self


class AttendingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Cache of one layer that computes the attention over its keys itself.

    Keys are stored when the layer's attention is computed, by a rule that says which of them are needed. Until then
    :meth:`update` returns tensors of the shape that the model expects, without memory for keys that are not stored as
    one tensor.
    """

    def __init__(self, rule: Any, running: RunningPass) -> None:
        super().__init__()
        self._rule, self._running = rule, running
        self._new: tuple[Tensor, Tensor] | None = None
        self.count = 0
        """Number of tokens so far."""
        self.stored = 0
        """Number of tokens whose keys are stored: smaller than :attr:`count` after a pass that failed."""
        self.offset: Tensor | None = None
        """Position of the first token, ``(batch or 1, 1)``; None if it is unknown."""

    @property
    def batch(self) -> int:
        """Number of texts whose keys are stored."""
        raise NotImplementedError

    def attend(self, layer: LayerLayout, call: AttentionCall) -> Tensor:
        """Return the output ``(batch, n, heads, d_v)`` of the new tokens' queries, and store their keys."""
        raise NotImplementedError

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.count

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def enter(self, rule: Any, running: RunningPass) -> None:
        """Use the cache in a context, which may be a later one with the same rule."""
        if self._running is running:
            return
        if rule != self._rule:
            raise MeasureError(_OTHER_RULE)
        self._running = running

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values of new tokens, ``(batch, kv_heads, n, d)``."""
        if self._running.closed:
            raise MeasureError("the cache was used outside of the context that filled it: use it inside the same one")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.count and self.batch != key_states.shape[0]:
            raise MeasureError(
                f"the cache is of {self.batch} texts, and {key_states.shape[0]} are given: start with a new one"
            )
        failed = self.stored < self.count
        self._new = key_states, value_states
        self.count += key_states.shape[2]
        if failed or self._running.count not in (None, self.count):
            raise MeasureError("a pass with this cache has failed, so that some of its keys are missing: use a new one")
        self._running.count = self.count
        self._running.layer = self
        if key_states.shape[2] == self.count:
            return key_states, value_states
        keys = self._running.placeholder(key_states, self.count)
        same = value_states.shape == key_states.shape
        return keys, keys if same else self._running.placeholder(value_states, self.count)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change all stored tensors along their batch dimension."""
        raise NotImplementedError

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some texts of the batch."""
        self.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each text of the batch."""
        self.map(lambda x: x.repeat_interleave(repeats, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take texts in another order, as beam search does."""
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        """Forget all keys."""
        self.__init__(self._rule, self._running)  # type: ignore[misc]

    def crop(self, *_: Any, **__: Any) -> None:
        """Refuse to remove last tokens: the keys that they have replaced are not stored."""
        raise MeasureError("the cache cannot be cropped: use a method of generation that only adds tokens")


@contextmanager
def attending_cache(
    model: nn.Module,
    proof: Proof,
    rules: Mapping[int, Any],
    make: Callable[[Any, RunningPass], AttendingLayer],
    edit: Callable[[LayerLayout, AttentionCall], Tensor | None],
) -> Iterator[None]:
    """Replace the attention of ``model`` inside the context, in passes with a cache by that of the cache's layers.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        rules: Rules of the layers whose cache is replaced; empty for the model's own cache.
        make: Returns the cache of a layer from its rule.
        edit: Returns the output ``(batch, n, heads, d_v)`` of a layer in passes without such a cache.
    """
    running = RunningPass()
    named = {plan.layer: getattr(model.get_submodule(plan.name), "layer_idx", None) for plan in proof.layout.layers}
    cached = {layer if at is None else int(at): rules[layer] for layer, at in named.items() if layer in rules}

    def attend(layer: LayerLayout, call: AttentionCall) -> Tensor | None:
        stored, running.layer = running.layer, None
        if stored is None:
            return edit(layer, call)
        if call.mask.has_terms:
            check_unpadded(edited_layer(layer, call))
        output = stored.attend(layer, call)
        stored.stored = stored.count
        return output

    def place(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        running.start()
        arguments = dict(zip(watch.structure.parameters, args, strict=False)) | kwargs
        accepted = "past_key_values" in watch.structure.parameters
        new = _with_cache(model, arguments, cached, make, running, accepted=accepted) if cached else {}
        _check_positions(arguments | new)
        return args, kwargs | new

    watch = ModelWatch(model)
    handle = model.register_forward_pre_hook(place, with_kwargs=True)
    try:
        with observing(watch, LayerEdits(watch, proof.layout, attend), route=proof.layout.route):
            yield
    finally:
        running.closed = True
        handle.remove()


def _with_cache(
    model: Any,
    arguments: Mapping[str, Any],
    rules: Mapping[int, Any],
    make: Callable[[Any, RunningPass], AttendingLayer],
    running: RunningPass,
    *,
    accepted: bool,
) -> dict[str, Any]:
    """Replace the layers of a pass's cache; return the argument with a new one if it has none and uses one."""
    cache, wanted = arguments.get("past_key_values"), arguments.get("use_cache")
    new: dict[str, Any] = {}
    if cache is None:
        wanted = getattr(model.config.get_text_config(), "use_cache", False) if wanted is None else wanted
        if not wanted or not accepted:
            return {}
        cache = DynamicCache(config=model.config)
        new = {"past_key_values": cache}
    known = {i: x for i, x in enumerate(getattr(cache, "layers", None) or ()) if isinstance(x, AttendingLayer)}
    for index, layer in known.items():
        layer.enter(rules.get(index), running)
    if known:
        if any(index in rules and type(layer) is DynamicLayer for index, layer in enumerate(cache.layers)):
            raise MeasureError(_OTHER_RULE)
        return new
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        filled = f"{type(cache).__name__} with {cache.get_seq_length()} tokens"
        raise MeasureError(
            f"a new DynamicCache on the model's device is needed here, not a {filled}: leave past_key_values out, or "
            "use use_cache=False"
        )
    layers = DynamicCache(config=model.config).layers
    cache.layers = [
        make(rules[index], running) if index in rules and type(layer) is DynamicLayer else layer
        for index, layer in enumerate(layers)
    ]
    cache.layer_class_to_replicate = None
    return new


def _check_positions(arguments: Mapping[str, Any]) -> None:
    """Refuse positions that do not continue those of the cached tokens one by one."""
    positions = arguments.get("position_ids")
    layers = getattr(arguments.get("past_key_values"), "layers", None) or ()
    layer = next((x for x in layers if isinstance(x, AttendingLayer)), None)
    if layer is None:
        if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
            raise MeasureError(f"positions do not go up one by one: {ONE_TEXT}")
        return
    offset = torch.zeros(1, 1, dtype=torch.long)  # positions that are not given continue those of the cache
    if positions is not None:
        offset = positions - torch.arange(layer.count, layer.count + positions.shape[-1], device=positions.device)
    first = offset[..., :1] if layer.offset is None else layer.offset.to(offset.device)
    if not bool((offset == first).all()):
        raise MeasureError(f"positions do not go up one by one: {ONE_TEXT}")
    # One row for all texts if it is the same, which stays right when texts of the batch are repeated or selected.
    layer.offset = first[:1] if bool((first == first[:1]).all()) else first


def compare_cache(model: Any, context: AbstractContextManager[None], *, otherwise: str) -> None:
    """Show on random tokens that passes with a cache give the same logits as one without inside a context.

    If they do not, the error says what to do: ``otherwise``.
    """
    ids = random_prompt(model, PROMPT_TOKENS)
    start = ids.shape[1] - 6
    pieces = [(0, start), *((i, i + 1) for i in range(start, start + 3)), (start + 3, ids.shape[1])]
    with unobserved(), torch.no_grad(), context:
        expected = model(input_ids=ids, use_cache=False).logits
        cache, logits = None, []
        try:
            for first, last in pieces:
                cached: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
                output = model(input_ids=ids[:, first:last], use_cache=True, **cached)
                cache = output.past_key_values
                logits.append(output.logits)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            raise CaptureError(
                f"{type(model).__name__} cannot use this cache ({one_line(error)}): {otherwise}"
            ) from error
    difference = float((torch.cat(logits, 1) - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    allowed = CHUNK_TOLERANCE.get(expected.dtype, 1e-1)
    if not difference <= allowed:
        raise CaptureError(
            f"{type(model).__name__} with this cache differs from a pass without a cache by {difference:.2g} (allowed "
            f"{allowed:g}): {otherwise}"
        )
