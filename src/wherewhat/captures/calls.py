"""Observed calls of rotary and attention functions, and temporary replacement of attributes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from wherewhat.captures.attention import Mask


@dataclass(frozen=True, eq=False)
class Invocation:
    """One call of a rotary function, without the tensors that it rotates.

    Attributes:
        function: The function.
        count: Number of its arguments.
        given: Those that are not rotated, with their index; calls that share them rotate alike.
        rotated: How many tensors it rotates.
    """

    function: Callable[..., Any]
    count: int
    given: Sequence[tuple[int, Any]]
    rotated: int


@dataclass(frozen=True)
class RotaryCall:
    """One tensor that went through a model's rotary function.

    Attributes:
        before: Tensor entering it, in the model's own axis order.
        after: Tensor leaving it, same shape.
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

    ``output`` is empty for observers that are blind to it. ``weights`` are the attention weights the model itself
    computed, if it did: ``(batch, heads, n, m)``.
    ``reweigh`` recomputes them in float32 by the model's own eager code, if that is possible.
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


class Observer(Protocol):
    """What an open capture offers to the taps.

    Attributes:
        blind: Whether it needs no output of the model's own, so that none is computed where it puts one in its place.
    """

    blind: bool

    def knows_rotary(self, function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Whether a rotation given the same was seen in this pass, so that nothing more need be said of this one."""

    def on_rotary(self, call: RotaryCall) -> None:
        """Take note of a rotation."""

    def on_attention(self, call: AttentionCall) -> Tensor | None:
        """Take note of an attention computation; a tensor replaces its output ``(batch, n, heads, d_v)``."""

    def owns(self, module: nn.Module) -> bool:
        """Whether the module belongs to the captured model."""


observers: ContextVar[tuple[Any, ...]] = ContextVar("wherewhat_observers", default=())
"""Open captures of the current context, outermost first."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Let passes until the context ends not be seen by the captures that are open now."""
    token = observers.set(())
    try:
        yield
    finally:
        observers.reset(token)


def version_of(x: Tensor) -> int:
    """How often a tensor, or another view of it, was written to; -1 in inference mode, which does not count."""
    return -1 if x.is_inference() else x._version


class Repetition:
    """Tells whether a call only applies the previous call's attention to other values, as DiffLlama does.

    Compares tensor objects through weak references: nothing is kept alive, and an address that was freed and
    used again for another layer is not mistaken for a repetition.
    """

    def __init__(self) -> None:
        self._query: Callable[[], Tensor | None] = lambda: None
        self._key: Callable[[], Tensor | None] = lambda: None

    def __call__(self, call: AttentionCall) -> bool:
        """Whether ``call`` repeats the one given before it."""
        if self._query() is call.query and self._key() is call.key:
            return True
        self._query, self._key = weakref.ref(call.query), weakref.ref(call.key)
        return False


_MISSING = object()


@dataclass(frozen=True)
class Target:
    """One attribute of one object, and how to make its observer from the original."""

    owner: Any
    name: str
    observe: Callable[[Any], Any]


@dataclass
class _Swapped:
    owner: Any
    own: Any  # what the owner's own dictionary held: instances may only inherit the attribute
    observer: Any
    users: int


_lock = threading.Lock()
_swapped: dict[tuple[int, str], _Swapped] = {}


@contextmanager
def swapped(targets: Iterable[Target]) -> Iterator[None]:
    """Replace each target by its observer until the context ends."""
    taken: list[Target] = []
    try:
        for target in targets:
            _take(target)
            taken.append(target)
        yield
    finally:
        for target in reversed(taken):
            _release(target)


def _take(target: Target) -> None:
    key = (id(target.owner), target.name)
    with _lock:
        if key in _swapped:
            _swapped[key].users += 1
            return
        observer = target.observe(getattr(target.owner, target.name))
        own = vars(target.owner).get(target.name, _MISSING)
        setattr(target.owner, target.name, observer)
        _swapped[key] = _Swapped(target.owner, own, observer, 1)


def _release(target: Target) -> None:
    key = (id(target.owner), target.name)
    with _lock:
        entry = _swapped[key]
        entry.users -= 1
        if entry.users:
            return
        del _swapped[key]
        if vars(entry.owner).get(target.name) is not entry.observer:
            return  # somebody else replaced it meanwhile; theirs is not ours to undo
        if entry.own is _MISSING:
            delattr(entry.owner, target.name)
        else:
            setattr(entry.owner, target.name, entry.own)
