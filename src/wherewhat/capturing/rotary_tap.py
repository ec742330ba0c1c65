"""Sees tensors go through a model's rotary function, whatever its signature."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from wherewhat.capturing.calls import RotaryCall, observers
from wherewhat.capturing.swaps import Target
from wherewhat.errors import CaptureError

_ROTARY = re.compile(r"^_?apply_(multimodal_)?rot(?!.*(vision|2d|time))")
_depth: ContextVar[int] = ContextVar("wherewhat_rotary_depth", default=0)


def rotary_targets(model: nn.Module) -> Iterator[Target]:
    """Every rotary function the model's files or modules define."""
    modules = list(model.modules())
    kinds = {type(module) for module in modules}
    for file in sorted({cls.__module__ for kind in kinds for cls in kind.__mro__}):
        namespace = sys.modules.get(file)
        for name, value in sorted(vars(namespace).items()) if namespace else ():
            if _ROTARY.match(name) and callable(value):
                yield Target(namespace, name, observe_rotary)
    methods = {kind: [name for name in dir(kind) if _ROTARY.match(name)] for kind in kinds}
    for module in modules:
        for name in methods[type(module)]:
            if callable(getattr(module, name)):
                yield Target(module, name, observe_rotary)


def observe_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what ``function`` does and tells the open captures about it."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        listening = observers.get()
        if not listening or _depth.get():  # families nest these functions; the outermost is the whole rotation
            return function(*args, **kwargs)
        arguments = (*args, *kwargs.values())
        versions = _versions(arguments)
        token = _depth.set(1)
        try:
            result = function(*args, **kwargs)
        finally:
            _depth.reset(token)
        if _versions(arguments) != versions:
            raise CaptureError(f"{function.__name__} rotates in place: there is no pre-rotation tensor to compare with")
        for call in _calls(function, arguments, result):
            for observer in listening:
                observer.on_rotary(call)
        return result

    return observed


def _calls(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> Iterator[RotaryCall]:
    """Match outputs with the inputs of equal shape, in order; what is left over gives the rotated width."""
    inputs = [a for a in _flatten(arguments) if isinstance(a, Tensor)]
    flags = [a for a in _flatten(arguments) if not isinstance(a, Tensor)]
    outputs = [r for r in _flatten((result,)) if isinstance(r, Tensor)]
    matched: list[tuple[Tensor, Tensor]] = []
    for output in outputs:
        for index, candidate in enumerate(inputs):
            if candidate.shape == output.shape and not candidate.is_complex():
                matched.append((inputs.pop(index), output))
                break
    widths = {w for x in inputs if x.ndim for w in (x.shape[-1], 2 * x.shape[-1])}
    for before, after in matched:
        yield RotaryCall(before, after, tuple(sorted(widths)), (function, *flags, *inputs))


def _versions(arguments: tuple[Any, ...]) -> list[int]:
    """How often each tensor was changed; inference mode does not count."""
    return [a._version for a in _flatten(arguments) if isinstance(a, Tensor) and not a.is_inference()]


def _flatten(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flatten(tuple(value))
        else:
            yield value
