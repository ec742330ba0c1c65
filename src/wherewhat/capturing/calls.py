"""What the observers see, before it is known which layer and which rotation it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from wherewhat.capturing.masking import Mask


@dataclass(frozen=True)
class RotaryCall:
    """One tensor that went through a model's rotary function.

    Attributes:
        before: Tensor entering it, in the model's own axis order.
        after: Tensor leaving it, same shape.
        widths: Candidate numbers of rotated dimensions, from the shapes of the other arguments.
        given: The function and its other arguments; calls that share them rotate alike.
    """

    before: Tensor
    after: Tensor
    widths: tuple[int, ...]
    given: tuple[Any, ...]


def identities(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Identity of a rotary function and what it was given besides the tensor to rotate.

    Tensors count as the same if they are the same object, not written to in between.
    """
    return tuple(
        (id(x), -1 if x.is_inference() else x._version) if isinstance(x, Tensor) else id(x) if callable(x) else repr(x)
        for x in given
    )


@dataclass(frozen=True)
class AttentionCall:
    """One attention computation. Shapes as in :class:`~wherewhat.capturing.attention.LayerAttention`.

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

    def on_rotary(self, call: RotaryCall) -> None:
        """Take note of a rotation."""

    def on_attention(self, call: AttentionCall) -> Tensor | None:
        """Take note of an attention computation; a tensor replaces its output ``(batch, n, heads, d_v)``."""

    def owns(self, module: nn.Module) -> bool:
        """Whether the module belongs to the captured model."""


observers: ContextVar[tuple[Any, ...]] = ContextVar("wherewhat_observers", default=())
"""Open captures of the current context, outermost first."""


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
