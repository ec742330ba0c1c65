"""Observed calls of attention and rotary functions: what is reported, to whom, and how functions are replaced."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import Mask
from wherewhat.errors import CaptureError


@dataclass(frozen=True, eq=False)
class Invocation:
    """One call of a rotary function, without the tensors that it rotates.

    Attributes:
        function: The function.
        count: Number of its arguments.
        given: The arguments that are not rotated, with their index; calls that share them have the same rotation.
        rotated: Number of tensors it rotates.
    """

    function: Callable[..., Any]
    count: int
    given: Sequence[tuple[int, Any]]
    rotated: int


@dataclass(frozen=True)
class RotaryCall:
    """One tensor rotated by a model's rotary function.

    Attributes:
        before: Input tensor, in the model's own axis order.
        after: Output tensor of the same shape.
        widths: Candidate numbers of rotated dimensions, from the shapes of the other arguments.
        invocation: The call of the function, one object for all tensors that it rotates.
    """

    before: Tensor
    after: Tensor
    widths: tuple[int, ...]
    invocation: Invocation


@dataclass(slots=True)
class AttentionCall:
    """One attention computation. Shapes as in :class:`~wherewhat.captures.attention.LayerAttention`.

    Attributes:
        module: The attention module.
        query: Queries after rotation.
        key: Keys after rotation.
        value: Values.
        output: Output; empty for blind observers.
        scale: Factor on the dot product.
        mask: Mask and additive bias.
        softcap: Soft-cap of the logits, if any.
        sinks: Logits of the sink column, if any.
        window: Sliding window that the model declares, if any.
        weights: Attention weights ``(batch, heads, n, m)``, if the model computed them.
        reweigh: Recomputes them in float32 by the model's own eager code, if possible.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    mask: Mask
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None
    weights: Tensor | None = None
    reweigh: Callable[[], Tensor | None] | None = None


class Observer:
    """Receives the rotations and the attention of a running model; by default rotations are ignored.

    Attributes:
        names: Paths of the model's modules by identity.
        blind: Whether it does not read outputs, so that none is computed for layers whose output it replaces.
        rotations: Whether it reads rotations.
        busy: Whether it handles a call: models that it runs meanwhile, even its own, are not observed by it.
    """

    blind = False
    rotations = True
    busy = False

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names

    def owns(self, module: nn.Module) -> bool:
        """Return whether the module belongs to the observed model."""
        return id(module) in self.names

    def start_pass(self) -> None:
        """Receive the beginning of a forward pass."""

    def end_pass(self, output: Any) -> None:
        """Receive the output of a complete forward pass."""

    def knows_rotary(self, function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Return whether a rotation need not be reported."""
        return True

    def on_rotary(self, call: RotaryCall) -> None:
        """Receive a rotation."""

    def on_attention(self, call: AttentionCall) -> Tensor | None:
        """Receive an attention computation; a returned tensor replaces its output ``(batch, n, heads, d_v)``."""
        raise NotImplementedError


observers: ContextVar[tuple[Observer, ...]] = ContextVar("wherewhat_observers", default=())
"""Open captures of the current context, outermost first."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide passes inside the context from the captures that are open now."""
    token = observers.set(())
    try:
        yield
    finally:
        observers.reset(token)


def version_of(x: Tensor) -> int:
    """Return how often a tensor, or another view of it, was written to; -1 in inference mode, which does not count."""
    return -1 if x.is_inference() else x._version


class Repetition:
    """Detects calls that only apply the previous call's attention to other values, as in DiffLlama.

    Compares tensor objects through weak references, so that nothing is kept alive and a reused address of another layer
    is not taken for a repetition.
    """

    def __init__(self) -> None:
        self._query: Callable[[], Tensor | None] = lambda: None
        self._key: Callable[[], Tensor | None] = lambda: None

    def __call__(self, call: AttentionCall) -> bool:
        """Return whether ``call`` has the queries and keys of the previous one."""
        if self._query() is call.query and self._key() is call.key:
            return True
        self._query, self._key = weakref.ref(call.query), weakref.ref(call.key)
        return False


@dataclass(frozen=True)
class Target:
    """An attribute of ``owner`` to be replaced; ``observe`` makes the replacement from the original."""

    owner: Any
    name: str
    observe: Callable[[Any], Any]


@dataclass
class _Replacement:
    original: Any  # the entry of the owner's own dictionary: instances may only inherit the attribute
    observer: Any
    users: int = 1


_MISSING = object()
_lock = threading.Lock()
_replaced: dict[tuple[int, str], _Replacement] = {}


@contextmanager
def replaced(targets: Iterable[Target]) -> Iterator[None]:
    """Replace each target by its observer inside the context."""
    done: list[Target] = []
    try:
        for target in targets:
            _replace(target)
            done.append(target)
        yield
    finally:
        for target in reversed(done):
            _restore(target)


def _replace(target: Target) -> None:
    key = (id(target.owner), target.name)
    with _lock:
        if key in _replaced:
            _replaced[key].users += 1
            return
        observer = target.observe(getattr(target.owner, target.name))
        original = vars(target.owner).get(target.name, _MISSING)
        setattr(target.owner, target.name, observer)
        _replaced[key] = _Replacement(original, observer)


def _restore(target: Target) -> None:
    key = (id(target.owner), target.name)
    with _lock:
        entry = _replaced[key]
        entry.users -= 1
        if entry.users:
            return
        del _replaced[key]
        if vars(target.owner).get(target.name) is not entry.observer:
            return  # replaced by other code in the meantime, which must not be undone
        if entry.original is _MISSING:
            delattr(target.owner, target.name)
        else:
            setattr(target.owner, target.name, entry.original)


_TABLE = "ALL_ATTENTION_FUNCTIONS"
_ROTARY = re.compile(r"^_?apply_(multimodal_)?rot(?!.*(vision|2d|time))")


class _Thread(threading.local):
    """State of one thread: whether a rotary function is running."""

    rotating = False


_thread = _Thread()


def interface_targets(modules: Iterable[nn.Module]) -> Iterator[Target]:
    """Yield the table of attention functions in every file that defines modules of a model."""
    for namespace in _namespaces(modules):
        if hasattr(namespace, _TABLE) and not namespace.__name__.endswith("modeling_utils"):
            yield Target(namespace, _TABLE, ObservedTable)


def rotary_targets(modules: Sequence[nn.Module]) -> Iterator[Target]:
    """Yield every rotary function of a model's modules and of the files that define them."""
    for namespace in _namespaces(modules):
        for name in _rotary_names(vars(namespace)):
            if callable(getattr(namespace, name)):
                yield Target(namespace, name, _observe_rotary)
    methods = {kind: names for kind in set(map(type, modules)) if (names := _rotary_methods(kind))}
    for module in modules:
        for name in methods.get(type(module), ()):
            if callable(getattr(module, name)):
                yield Target(module, name, _observe_rotary)


def _namespaces(modules: Iterable[nn.Module]) -> list[ModuleType]:
    """Return the Python modules that define the classes of a model's modules."""
    files = {cls.__module__ for kind in set(map(type, modules)) for cls in kind.__mro__}
    return [namespace for file in sorted(files) if (namespace := sys.modules.get(file)) is not None]


def _rotary_names(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if "apply_" in name and _ROTARY.match(name))


@functools.lru_cache(maxsize=256)
def _rotary_methods(kind: type[nn.Module]) -> list[str]:
    return _rotary_names(dir(kind))


class ObservedTable:
    """Replaces the table of attention functions and returns observed functions."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._observed: dict[tuple[Callable[..., Any], str | None], Callable[..., Any]] = {}

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the observed function for an implementation."""
        return self._observe(self._table.get_interface(implementation, default), implementation)

    def get(self, implementation: str, default: Any = None) -> Any:
        """Return the observed function for an implementation, or ``default``."""
        function = self._table.get(implementation, default)
        return self._observe(function, implementation) if callable(function) else function

    def __getitem__(self, implementation: str) -> Callable[..., Any]:
        return self._observe(self._table[implementation], implementation)

    def __setitem__(self, implementation: str, function: Callable[..., Any]) -> None:
        self._table[implementation] = function

    def __contains__(self, implementation: object) -> bool:
        return implementation in self._table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def _observe(self, function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
        """Return the observed function, made once for all layers."""
        key = (function, implementation)
        if key not in self._observed:
            self._observed[key] = _observe(function, implementation)
        return self._observed[key]


def _observe(function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs["module"]
        listening = [observer for observer in observers.get() if observer.owns(module)]
        if len(listening) == 1 and listening[0].blind:
            call = _describe(function, implementation or "eager", args, kwargs, None)
            replacement = listening[0].on_attention(call)
            return function(*args, **kwargs) if replacement is None else (replacement, None)
        result = function(*args, **kwargs)
        if listening:
            call = _describe(function, implementation or "eager", args, kwargs, result)
            for observer in listening:
                replacement = observer.on_attention(call)
                if replacement is not None:
                    result = (replacement.view_as(call.output), *result[1:])
        return result

    return observed


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _describe(
    function: Callable[..., Any],
    implementation: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> AttentionCall:
    named = kwargs
    if len(args) == 5:  # the call of most families; this runs for every layer
        module, query, key, value, mask = args
    else:
        names = _parameters(function)
        named = dict(zip(names, args, strict=False)) | kwargs
        module, query, key, value, mask = (named.get(name) for name in names[:5])
    assert isinstance(module, nn.Module)
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    if mask is not None and not isinstance(mask, Tensor):
        raise CaptureError(
            f"the attention of {type(module).__name__} uses a {type(mask).__name__} as mask, which cannot be read: "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    scale = named.get("scaling")
    output = _no_output(query.dtype, query.device) if result is None else result[0]
    weights = result[1] if result is not None and len(result) > 1 else None
    sinks = named.get("s_aux")
    return AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        output=output,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=_mask(module, implementation, query, mask, named),
        softcap=named.get("softcap"),
        sinks=sinks if isinstance(sinks, Tensor) else None,
        window=named.get("sliding_window"),
        weights=weights if isinstance(weights, Tensor) else None,
        reweigh=functools.partial(_weights_in_float32, function, args, kwargs),
    )


def _weights_in_float32(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return attention weights from the model's own function in float32, without the rounding of half precision."""

    def up(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    result = function(*(up(a) for a in args), **{name: up(a) for name, a in kwargs.items()})
    return result[1] if isinstance(result[1], Tensor) else None


@functools.lru_cache(maxsize=256)
def _no_output(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the empty output of blind observers, made once."""
    return torch.empty(0, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _plain_mask(causal: bool, window: int | None, device: torch.device) -> Mask:
    """Return a mask without tensors."""
    return Mask(causal=causal, window=window, device=device)


def _mask(module: nn.Module, implementation: str, query: Tensor, mask: Tensor | None, named: dict[str, Any]) -> Mask:
    """Return the effect of the mask under the implementation."""
    added: list[Tensor] = []
    visible_only: list[Tensor] = []
    causal, window = False, None
    flash = "flash" in implementation
    if mask is None or flash:
        is_causal = named.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal = causal and implementation != "eager" and query.shape[2] > 1
        window = named.get("sliding_window") if flash else None
    if mask is not None:
        if mask.ndim == 2:
            visible_only.append(mask[:, None, None, :].bool())
        else:
            (visible_only if mask.dtype == torch.bool else added).append(mask)
    bias = named.get("position_bias")
    if isinstance(bias, Tensor):
        added.append(bias)
    if mask is None and bias is None:
        return _plain_mask(causal, window, query.device)
    return Mask(causal=causal, added=tuple(added), visible_only=tuple(visible_only), window=window, device=query.device)


def _observe_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` and reports it to the open captures."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        listening = observers.get()
        if not listening or _thread.rotating:  # nested functions are part of the outermost one
            return function(*args, **kwargs)
        if len(listening) == 1 and not kwargs and listening[0].knows_rotary(function, args):  # most layers
            _thread.rotating = True
            try:
                return function(*args)
            finally:
                _thread.rotating = False
        arguments: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
        if any(isinstance(a, (tuple, list)) for a in arguments):
            arguments = list(_flatten(tuple(arguments)))
        interested = [observer for observer in listening if not observer.knows_rotary(function, arguments)]
        tensors = [a for a in arguments if isinstance(a, Tensor)] if interested else []
        versions = list(map(version_of, tensors))
        _thread.rotating = True
        try:
            result = function(*args, **kwargs)
        finally:
            _thread.rotating = False
        if not interested:
            return result
        if list(map(version_of, tensors)) != versions:
            raise CaptureError(f"{function.__name__} rotates in place: there is no pre-rotation tensor to compare with")
        for call in _calls(function, arguments, result):
            for observer in interested:
                observer.on_rotary(call)
        return result

    return observed


def _calls(function: Callable[..., Any], arguments: Sequence[Any], result: Any) -> list[RotaryCall]:
    """Match outputs with inputs of equal shape, in order; the other inputs give candidate widths."""
    matched: list[tuple[Tensor, Tensor]] = []
    remaining = list(enumerate(arguments))
    for output in _flatten((result,)):
        for index, (_, candidate) in enumerate(remaining if isinstance(output, Tensor) else ()):
            if isinstance(candidate, Tensor) and candidate.shape == output.shape and not candidate.is_complex():
                matched.append((candidate, output))
                del remaining[index]
                break
    others = [x for _, x in remaining if isinstance(x, Tensor) and x.ndim]
    widths = tuple(sorted({w for x in others for w in (x.shape[-1], 2 * x.shape[-1])}))
    invocation = Invocation(function, len(arguments), remaining, len(matched))
    return [RotaryCall(before, after, widths, invocation) for before, after in matched]


def _flatten(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flatten(tuple(value))
        else:
            yield value
