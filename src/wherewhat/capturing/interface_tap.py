"""Sees every call through transformers' attention interface, with the arguments the kernel gets.

The model keeps its own implementation and mask: instead of registering one more implementation (which loses the
mask unless it is registered too, and the family's own eager function), the table of implementations is looked up
through an observer for the time of the capture.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.capturing.calls import AttentionCall, observers
from wherewhat.capturing.masking import Mask
from wherewhat.capturing.swaps import Target
from wherewhat.errors import CaptureError

_TABLE = "ALL_ATTENTION_FUNCTIONS"


def interface_targets(modules: Iterable[nn.Module]) -> Iterator[Target]:
    """The table of attention functions in every file that modules of a model come from."""
    kinds = set(map(type, modules))
    files = {cls.__module__ for kind in kinds for cls in kind.__mro__}
    for file in sorted(files):
        namespace = sys.modules.get(file)
        if namespace is not None and hasattr(namespace, _TABLE) and not file.endswith("modeling_utils"):
            yield Target(namespace, _TABLE, ObservedTable)


class ObservedTable:
    """Stands in for the table of attention functions; each function it hands out is observed."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._observed: dict[tuple[Callable[..., Any], str | None], Callable[..., Any]] = {}

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The function the model is about to call, observed."""
        return self._observe(self._table.get_interface(implementation, default), implementation)

    def get(self, implementation: str, default: Any = None) -> Any:
        """Like a dictionary's ``get``."""
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
        """The observed function, made once: every layer asks for the same."""
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
    if len(args) == 5:  # as most families call it; this is done for every layer
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
    output, weights = (
        (query.new_empty(0), None) if result is None else (result[0], result[1] if len(result) > 1 else None)
    )
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
    """Attention weights by the model's own function on the same tensors in float32, free of half-precision noise."""

    def up(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    result = function(*(up(a) for a in args), **{name: up(a) for name, a in kwargs.items()})
    return result[1] if isinstance(result[1], Tensor) else None


@functools.lru_cache(maxsize=256)
def _plain_mask(causal: bool, window: int | None, device: torch.device) -> Mask:
    """A mask without tensors."""
    return Mask(causal=causal, window=window, device=device)


def _mask(module: nn.Module, implementation: str, query: Tensor, mask: Tensor | None, named: dict[str, Any]) -> Mask:
    """Say in one form what the implementation does with the mask it is given."""
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
    return Mask(
        causal=causal,
        added=tuple(added),
        visible_only=tuple(visible_only),
        window=window,
        device=query.device,
    )
