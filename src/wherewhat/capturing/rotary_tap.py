"""Sees tensors go through a model's rotary function, whatever its signature."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from wherewhat.capturing.calls import Invocation, RotaryCall, observers
from wherewhat.capturing.swaps import Target
from wherewhat.errors import CaptureError

_ROTARY = re.compile(r"^_?apply_(multimodal_)?rot(?!.*(vision|2d|time))")
_depth: ContextVar[int] = ContextVar("wherewhat_rotary_depth", default=0)


def rotary_targets(modules: Sequence[nn.Module]) -> Iterator[Target]:
    """Every rotary function that modules of a model, or the files they come from, define."""
    kinds = set(map(type, modules))
    for file in sorted({cls.__module__ for kind in kinds for cls in kind.__mro__}):
        namespace = sys.modules.get(file)
        names = _rotary_names(vars(namespace)) if namespace else []
        for name in names:
            if callable(getattr(namespace, name)):
                yield Target(namespace, name, observe_rotary)
    methods = {kind: found for kind in kinds if (found := _methods(kind))}
    for module in modules:
        for name in methods.get(type(module), ()):
            if callable(getattr(module, name)):
                yield Target(module, name, observe_rotary)


def _rotary_names(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if "apply_" in name and _ROTARY.match(name))


@functools.lru_cache(maxsize=256)
def _methods(kind: type[nn.Module]) -> list[str]:
    """Names of a class's rotary functions; a large model has few classes, and a capture is opened for every pass."""
    return _rotary_names(dir(kind))


def observe_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what ``function`` does and tells the open captures about it."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        listening = observers.get()
        if not listening or _depth.get():  # families nest these functions; the outermost is the whole rotation
            return function(*args, **kwargs)
        if len(listening) == 1 and not kwargs and listening[0].knows_rotary(function, args):  # most layers
            token = _depth.set(1)
            try:
                return function(*args)
            finally:
                _depth.reset(token)
        arguments: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
        if any(isinstance(a, (tuple, list)) for a in arguments):
            arguments = list(_flatten(tuple(arguments)))
        telling = [observer for observer in listening if not observer.knows_rotary(function, arguments)]
        tensors = [a for a in arguments if isinstance(a, Tensor)] if telling else []
        versions = _versions(tensors)
        token = _depth.set(1)
        try:
            result = function(*args, **kwargs)
        finally:
            _depth.reset(token)
        if not telling:
            return result
        if _versions(tensors) != versions:
            raise CaptureError(f"{function.__name__} rotates in place: there is no pre-rotation tensor to compare with")
        for call in _calls(function, arguments, result):
            for observer in telling:
                observer.on_rotary(call)
        return result

    return observed


def _calls(function: Callable[..., Any], arguments: Sequence[Any], result: Any) -> list[RotaryCall]:
    """Match outputs with the inputs of equal shape, in order; what is left over gives the rotated width."""
    matched: list[tuple[Tensor, Tensor]] = []
    given = list(enumerate(arguments))
    for output in _flatten((result,)):
        for place, (_, candidate) in enumerate(given if isinstance(output, Tensor) else ()):
            if isinstance(candidate, Tensor) and candidate.shape == output.shape and not candidate.is_complex():
                matched.append((candidate, output))
                del given[place]
                break
    others = [x for _, x in given if isinstance(x, Tensor) and x.ndim]
    widths = tuple(sorted({w for x in others for w in (x.shape[-1], 2 * x.shape[-1])}))
    invocation = Invocation(function, len(arguments), given, len(matched))
    return [RotaryCall(before, after, widths, invocation) for before, after in matched]


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each tensor was changed; inference mode does not count."""
    return [x._version for x in tensors if not x.is_inference()]


def _flatten(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flatten(tuple(value))
        else:
            yield value
