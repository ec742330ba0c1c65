"""Observe calls of transformers' attention interface and of rotary functions."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import Mask
from wherewhat.captures.calls import AttentionCall, Invocation, RotaryCall, Target, observers, version_of
from wherewhat.errors import CaptureError

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
    methods = {kind: found for kind in set(map(type, modules)) if (found := _rotary_methods(kind))}
    for module in modules:
        for name in methods.get(type(module), ()):
            if callable(getattr(module, name)):
                yield Target(module, name, _observe_rotary)


def _namespaces(modules: Iterable[nn.Module]) -> list[ModuleType]:
    """Return the Python modules that define the classes of a model's modules."""
    files = {cls.__module__ for kind in set(map(type, modules)) for cls in kind.__mro__}
    return [found for file in sorted(files) if (found := sys.modules.get(file)) is not None]


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
        found = self._table.get(implementation, default)
        return self._observe(found, implementation) if callable(found) else found

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
    given = list(enumerate(arguments))
    for output in _flatten((result,)):
        for index, (_, candidate) in enumerate(given if isinstance(output, Tensor) else ()):
            if isinstance(candidate, Tensor) and candidate.shape == output.shape and not candidate.is_complex():
                matched.append((candidate, output))
                del given[index]
                break
    others = [x for _, x in given if isinstance(x, Tensor) and x.ndim]
    widths = tuple(sorted({w for x in others for w in (x.shape[-1], 2 * x.shape[-1])}))
    invocation = Invocation(function, len(arguments), given, len(matched))
    return [RotaryCall(before, after, widths, invocation) for before, after in matched]


def _flatten(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flatten(tuple(value))
        else:
            yield value
