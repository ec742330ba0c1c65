"""Observed calls of rotary and attention functions, and temporary replacement of attributes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from wherewhat.captures.attention import Mask


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
