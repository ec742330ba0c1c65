"""The module tree of a model inside its wrappers, the state on which its proof depends, and its running pass.

A capture is opened for every pass, so properties of the module tree are computed once. Other state on which a proof
depends is read every time, in a fraction of a millisecond for a model of 32 layers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from wherewhat.captures.calls import (
    Observer,
    Target,
    interface_targets,
    observers,
    replaced,
    rotary_targets,
    version_of,
)
from wherewhat.errors import CaptureError

State = tuple[Any, ...]
"""State on which a proof depends, to be compared with the state at another time."""

_serial = itertools.count()
_TRAINING = operator.itemgetter("training")


@dataclass(frozen=True, eq=False)
class Structure:
    """The tree of a model's modules. It references all of them but the model itself, which can be freed.

    Attributes:
        serial: Unique number.
        parts: All modules below the model.
        names: Path of each module by its identity, without cross-attention, where distance and order have no meaning.
        parameters: Names of the parameters of the model's forward function.
        frequencies_change: Whether its rotary frequencies depend on the length of the text.
        rotary: Rotary functions to observe.
        interface: Tables of transformers' attention interface to observe.
        branches: Dictionaries of children that are not empty, with their children.
        leaves: Dictionaries of children that are empty.
        weights: Dictionaries of weights that are not empty.
        weightless: Dictionaries of weights that are empty.
        attributes: Attributes of all modules, the model's first.
        configs: Configurations of the modules.
        adapters: Attributes of modules with adapters.
    """

    serial: int
    parts: tuple[nn.Module, ...]
    names: dict[int, str]
    parameters: tuple[str, ...]
    frequencies_change: bool
    rotary: tuple[Target, ...]
    interface: tuple[Target, ...]
    branches: tuple[tuple[dict[str, Any], tuple[Any, ...]], ...]
    leaves: tuple[dict[str, Any], ...]
    weights: tuple[dict[str, Any], ...]
    weightless: tuple[dict[str, Any], ...]
    attributes: tuple[dict[str, Any], ...]
    configs: tuple[Any, ...]
    adapters: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        """Return the structure of a model."""
        named = dict(model.named_modules())
        modules = tuple(named.values())
        cross = {kind for kind in set(map(type, modules)) if re.search("cross", kind.__name__, re.IGNORECASE)}
        own = tuple(module.__dict__ for module in modules)
        children, weights = [x["_modules"] for x in own], [x["_parameters"] for x in own]
        configs = {id(x["config"]): x["config"] for x in own if "config" in x}
        return cls(
            serial=next(_serial),
            parts=modules[1:],
            names={id(module): name for name, module in named.items() if type(module) not in cross},
            parameters=tuple(inspect.signature(model.forward).parameters),
            frequencies_change=any(turns_by_length(config) for config in configs.values()),
            rotary=tuple(rotary_targets(modules)),
            interface=tuple(interface_targets(modules)),
            branches=tuple((x, tuple(x.values())) for x in children if x),
            leaves=tuple(x for x in children if not x),
            weights=tuple(x for x in weights if x),
            weightless=tuple(x for x in weights if not x),
            attributes=own,
            configs=tuple(configs.values()),
            adapters=tuple(x for x in own if "_active_adapter" in x),
        )

    def is_current(self) -> bool:
        """Return whether the tree is unchanged."""
        return (
            not any(self.leaves)
            and not any(self.weightless)
            and all(tuple(now.values()) == before for now, before in self.branches)
        )


_structures: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """Return the model's structure, which is cached while its modules stay the same."""
    known = _structures.get(model)
    if known is None or not known.is_current():
        known = Structure.of(model)
        if not any(target.owner is model for target in known.rotary):
            _structures[model] = known
    return known


def state_of(model: nn.Module) -> State:
    """Return the state on which a proof of the model depends; a proof in another state is not valid.

    This is its modules, their classes and forward functions, adapters and attention implementation, the addresses and
    versions of its weights, and autocast. Rotary frequencies and dtypes are compared in every pass.
    """
    structure = structure_of(model)
    check_mode(model, structure)
    weights = [x for held in structure.weights for x in held.values() if x is not None]
    forwards = [(index, id(own["forward"])) for index, own in enumerate(structure.attributes[1:]) if "forward" in own]
    code = [*map(id, map(type, structure.parts)), forwards]
    adapters = [
        (str(own["_active_adapter"]), own.get("_disable_adapters"), str(own.get("merged_adapters")))
        for own in structure.adapters
    ]
    return (structure.serial, code, _addresses(weights), _versions(weights), adapters, *surroundings(structure))


def same_modules(state: State, other: State) -> bool:
    """Return whether two states of a model differ at most in the values of its weights, as during training."""
    return state[:3] == other[:3] and state[4:] == other[4:]


def surroundings(structure: Structure) -> State:
    """Return the state on which a proof depends outside of the modules: attention functions and autocast."""
    names = [getattr(config, "_attn_implementation", None) for config in structure.configs]
    tables = [getattr(target.owner, target.name, None) for target in structure.interface]
    functions = [_bare(table.get(name)) for table in tables for name in names if name is not None and table is not None]
    functions += [_bare(getattr(target.owner, "eager_attention_forward", None)) for target in structure.interface]
    autocast = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (names, functions, autocast)


def check_mode(model: nn.Module, structure: Structure) -> None:
    """Refuse a model if one of its modules is in training mode."""
    if any(map(_TRAINING, structure.attributes)):
        part = next(module for module in (model, *structure.parts) if module.training)
        where = "the model" if part is model else structure.names.get(id(part), type(part).__name__)
        raise CaptureError(f"{where} is in training mode, where dropout changes passes: call model.eval() first")


def _addresses(weights: list[Tensor]) -> list[int]:
    """Return the address of each weight, which changes with its dtype and device."""
    try:
        return [weight.data_ptr() for weight in weights]
    except RuntimeError:  # quantised formats of several tensors
        return [id(weight) for weight in weights]


def _versions(weights: list[Tensor]) -> list[int]:
    """Return how often each weight was written to."""
    try:
        return [weight._version for weight in weights]
    except RuntimeError:  # inference mode does not count
        return [version_of(weight) for weight in weights]


def _bare(function: Any) -> int:
    """Return the identity of a function, whether observed or not."""
    return id(getattr(function, "__wrapped__", function))


def turns_by_length(config: Any) -> bool:
    """Return whether a configuration has rotary frequencies that depend on the length of the text."""
    return any(kind in str(getattr(config, "rope_parameters", "")) for kind in ("'dynamic'", "'longrope'"))


# Adapters that run a second network or a second pass beside the model, to which a proof of one pass does not apply.
_OWN_PASSES = {"ADAPTION_PROMPT", "POLY", "SHADOW", "XLORA"}


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside wrappers; any other object is returned unchanged.

    Supported are ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, PEFT models and pipelines, in any
    order. Each calls its model, so that a capture of the model observes calls of the wrapper.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: Any) -> Any:
    """Return the model inside the outermost wrapper; None if there is no wrapper."""
    if _made_by(model, "torch._dynamo.eval_frame", "OptimizedModule"):
        return model._orig_mod
    if isinstance(model, DataParallel):
        if len(model.device_ids) > 1:
            raise CaptureError(
                f"DataParallel runs copies of the model on {len(model.device_ids)} devices, which cannot be captured: "
                "use its .module"
            )
        return model.module
    if isinstance(model, DistributedDataParallel):
        return model.module
    if _made_by(model, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise CaptureError(
            "FullyShardedDataParallel flattens and shards the weights of the model it wraps: shard it with fully_shard "
            "(FSDP2) instead"
        )
    if _is_peft(model):
        return _adapted(model)
    if _made_by(model, "transformers.pipelines.base", "Pipeline"):
        return model.model
    return None


def _made_by(model: Any, module: str, *names: str) -> bool:
    """Return whether ``model`` has a class of a Python module, without importing it: that of a wrapper is loaded."""
    loaded = sys.modules.get(module)
    return isinstance(model, tuple(kind for name in names if isinstance(kind := getattr(loaded, name, None), type)))


def _adapted(model: Any) -> nn.Module:
    """Return the model with the adapters of a PEFT model."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind in _OWN_PASSES:
            what = "tokens or keys" if config.is_prompt_learning else "passes or attention"
            raise CaptureError(
                f"the PEFT adapter {name!r} ({kind}) adds {what}, which have no position in the text: only adapters of "
                "weights, such as LoRA, can be captured"
            )
    inner: nn.Module = model.base_model.model
    return inner


_lock = threading.Lock()
_stance = ExitStack()
_users = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable ``torch.compile`` inside the context, since layers of compiled code cannot be observed.

    This applies to the whole process until the last of overlapping contexts ends.
    """
    global _users
    with _lock:
        if _users == 0:
            try:
                _stance.enter_context(torch.compiler.set_stance("force_eager"))
            except RuntimeError:
                raise CaptureError("a capture was opened inside compiled code: open it outside") from None
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _stance.close()


@contextmanager
def opened(model: Any) -> Iterator[Any]:
    """Return the transformers model inside ``model``, which may be called through its wrappers inside the context."""
    with uncompiled(), replaced(_tuners(model)):
        yield unwrapped(model)


def _tuners(model: Any) -> Iterator[Target]:
    """Yield the forward functions of PEFT, which before version 0.21 called the model without its hooks."""
    while model is not None:
        if _is_peft(model):
            yield Target(model.base_model, "forward", functools.partial(_call_model, model.base_model))
        model = _inner(model)


def _is_peft(model: Any) -> bool:
    return _made_by(model, "peft", "PeftModel", "PeftMixedModel")


def _call_model(tuner: Any, _: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: tuner.model(*args, **kwargs)


def transformers_model(model: Any) -> Any:
    """Return the model without its wrappers; refuse objects that are not causal language models of transformers."""
    model = unwrapped(model)
    name = type(model).__name__
    if not _is_model(model):
        advice = "only those can be captured"
        if _is_model(getattr(model, "model", None)):
            advice = "give its .model"
        elif isinstance(model, str | os.PathLike):
            advice = "load it first, and give the .model of what wherewhat.load returns"
        raise CaptureError(f"{name} is not a model of transformers: {advice}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise CaptureError(f"{name} is an encoder-decoder (seq2seq) model: only causal language models can be captured")
    return model


def wrapped_model(model: Any) -> Any:
    """Return the model with its wrappers; refuse those of which :func:`transformers_model` refuses the model."""
    transformers_model(model)
    return model


def _is_model(model: Any) -> bool:
    return isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "get_input_embeddings")


Route = Literal["interface", "trace"]
"""``interface`` (transformers' attention interface) or ``trace`` (the model's own code)."""


class ModelWatch:
    """State of a running forward pass: batch, positions and the current attention module.

    Attributes:
        structure: The model's modules.
        names: Paths of the modules by identity.
        batch: Number of sequences of the pass.
        running: Whether a pass is running.
        observer: The observer of the model, while it is observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.structure = structure_of(model)
        self.names = self.structure.names
        self.batch = 1
        self.running = False
        self.observer: Observer | None = None
        self._position_ids: Tensor | None = None
        self._tokens = 0
        self._cached: int | None = None
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self._mask: Tensor | None = None
        self._before: Tensor | None = None
        self._histories: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._stack: list[nn.Module] = []
        self._model = model

    def check_mode(self) -> None:
        """Refuse training mode."""
        check_mode(self._model, self.structure)

    def current(self) -> nn.Module | None:
        """Return the innermost attention module that is running."""
        return self._stack[-1] if self._stack else None

    def positions(self, keys: int, device: torch.device) -> Tensor:
        """Return the position of every key of the pass, ``(keys,)`` or ``(batch, keys)``.

        Positions of cached keys are known from captured passes. Others are assumed to be consecutive before the first
        token of the pass. Layers with a window cache fewer keys than tokens.
        """
        if self._cached is not None and keys > self._cached + self._tokens:
            raise CaptureError(
                f"{keys} keys for {self._cached} cached and {self._tokens} new tokens: the cache has empty slots, "
                "whose positions are unknown; use the default (dynamic) cache or use_cache=False"
            )
        if (keys, device) not in self._positions:
            self._positions[keys, device] = self._key_positions(keys, device)
        return self._positions[keys, device]

    def _key_positions(self, keys: int, device: torch.device) -> Tensor:
        new = self._new_positions(device)
        if self._cached and self._before is None:
            self._check_cached(new)
        if new is None or new.shape[-1] > keys:
            first = self._cached + self._tokens - keys if self._cached else 0
            return torch.arange(first, first + keys, device=device)
        if self._before is not None:
            before = self._before.to(device)
            before = before.expand(*new.shape[:-1], -1) if before.ndim < new.ndim else before
            return torch.cat([before, new.expand(*before.shape[:-1], -1)], -1)[..., -keys:]
        earlier = new[..., :1] - torch.arange(keys - new.shape[-1], 0, -1, device=device)
        return torch.cat([earlier, new], -1)

    def _new_positions(self, device: torch.device) -> Tensor | None:
        """Return the positions of the pass's tokens, ``(n,)`` or ``(batch, n)``; None if the cache determines them."""
        positions = self._position_ids
        if positions is None:
            # Captured tokens may have had other positions; the model counts on from the cached tokens.
            first = self._cached or 0
            return None if self._before is None else torch.arange(first, first + self._tokens, device=device)
        if positions.ndim > 2:  # one row per image axis, in some families after one for the text
            rows = positions[-3:] if positions.shape[0] > 3 else positions
            if bool((rows != rows[:1]).any()):
                raise CaptureError(
                    "position_ids differ between their rows, as for images: tokens have no single position"
                )
            positions = rows[0]
        return (positions[0] if positions.ndim == 2 and positions.shape[0] == 1 else positions).to(device)

    def _check_cached(self, new: Tensor | None) -> None:
        """Refuse cached keys that were not captured and may not be consecutive before the first new token."""
        cached = self._cached or 0
        if self.structure.frequencies_change:
            raise CaptureError(
                f"{cached} cached keys were made before the capture, maybe with other frequencies, which depend on the "
                "length here: open the capture before the first pass, or use use_cache=False"
            )
        if new is None:
            return
        visible = torch.full((1,), cached, device=new.device)
        last = True
        if self._mask is not None and self._mask.ndim == 2 and self._mask.shape[1] >= cached:
            seen = self._mask[:, :cached].to(new.device).bool()
            visible = seen.sum(-1)
            last = bool((seen[:, 1:] | ~seen[:, :-1]).all())  # no hidden key after a visible one
        if not last or not bool((new.reshape(-1, new.shape[-1])[:, 0] == visible).all()):
            raise CaptureError(
                f"{cached} cached keys were made before the capture and may have any position: open the capture "
                "before the first pass, or use use_cache=False"
            )

    def _remember(self, output: Any) -> None:
        """Store the positions of all keys in the cache that a pass returns, for the pass that continues from it."""
        cache = getattr(output, "past_key_values", None)
        if cache is None or not hasattr(cache, "get_seq_length"):
            return
        total = (self._cached or 0) + self._tokens
        whole = next((x for (keys, _), x in self._positions.items() if keys == total), None)
        if whole is None and self._positions:  # layers with a window hold fewer keys
            whole = self._key_positions(total, next(iter(self._positions.values())).device)
        if whole is not None:
            with contextlib.suppress(TypeError):  # a cache without weak references
                self._histories[cache] = whole

    @contextmanager
    def hooked(self, *, modules: bool) -> Iterator[None]:
        """Hook the model, and with ``modules`` its attention modules, inside the context."""
        handles = [
            self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            self._model.register_forward_hook(self._leave_model, always_call=True),
        ]
        if modules:
            for module in (self._model, *self.structure.parts):
                if re.search("att(entio)?n", type(module).__name__, re.IGNORECASE):
                    handles.append(module.register_forward_pre_hook(self._enter))
                    handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _current_observer(self) -> Observer | None:
        """Return the observer unless it is busy or of another context: other threads may run the same model."""
        observer = self.observer
        return None if observer is None or observer.busy or observer not in observers.get() else observer

    def _enter_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer = self._current_observer()
        if observer is None:
            return
        arguments = dict(zip(self.structure.parameters, args, strict=False)) | kwargs
        inputs = arguments.get("input_ids")
        inputs = arguments.get("inputs_embeds") if inputs is None else inputs
        cache = arguments.get("past_key_values")
        self.batch, self._tokens = inputs.shape[:2] if isinstance(inputs, Tensor) and inputs.ndim > 1 else (1, 0)
        self._cached = int(cache.get_seq_length()) if cache is not None and hasattr(cache, "get_seq_length") else None
        self._position_ids = arguments.get("position_ids")
        self._mask = arguments.get("attention_mask")
        self._before = None  # positions of all cached keys, if they were captured
        if self._cached:
            with contextlib.suppress(TypeError):
                before = self._histories.get(cache)
                self._before = before if before is not None and before.shape[-1] == self._cached else None
        self._positions = {}
        self._stack.clear()
        self.running = True
        observer.start_pass()

    def _leave_model(self, _: nn.Module, __: Any, output: Any) -> None:
        observer = self._current_observer()
        if observer is not None:
            self.running = False
            if output is not None:  # None after an exception
                self._remember(output)
                observer.end_pass(output)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._current_observer() is not None:
            self._stack.append(module)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._current_observer() is not None and self._stack and self._stack.pop() is not module:
            pass
