"""Observe attention in a model's own code by tracing tensors from query-key product to softmax to value."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name the whole field uses
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from wherewhat.captures.attention import LOW, Mask
from wherewhat.captures.calls import AttentionCall, version_of
from wherewhat.captures.structure import ModelWatch


@dataclass(frozen=True)
class TracedLogits:
    """Record of how a tensor was computed: ``scale · query · keyᵀ`` plus terms, with some keys hidden.

    Attributes:
        query: Queries.
        key: Keys.
        scale: Factor on their product.
        added: Additive terms with their factors.
        hidden: Boolean terms, True where a key is hidden.
        softmaxed: Whether the tensor is the softmax of the logits. (A reference to it would keep both alive.)
    """

    query: Tensor
    key: Tensor
    scale: float = 1.0
    added: tuple[tuple[float, Tensor], ...] = ()
    hidden: tuple[Tensor, ...] = ()
    softmaxed: bool = False

    def scaled(self, factor: float) -> TracedLogits:
        """Return the record of this tensor times a number."""
        added = tuple((factor * c, t) for c, t in self.added)
        return replace(self, scale=self.scale * factor, added=added)


_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_BADDBMM = {torch.baddbmm, Tensor.baddbmm}
_TIMES = {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__imul__, Tensor.__rmul__}
_OVER = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__, torch.true_divide}
_PLUS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}
_MINUS = {torch.sub, Tensor.sub, Tensor.__sub__}
_FILL = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
_WHERE = {torch.where, Tensor.where}
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_SAME = {
    *(Tensor.view, Tensor.reshape, Tensor.to, Tensor.float, Tensor.type, Tensor.type_as, Tensor.contiguous),
    *(Tensor.clone, Tensor.half, Tensor.bfloat16, Tensor.unsqueeze, Tensor.squeeze, Tensor.view_as, Tensor.expand),
    *(torch.reshape, torch.unsqueeze, torch.squeeze, F.dropout, Tensor.unflatten),
    *(Tensor.flatten, torch.flatten, torch.nan_to_num, Tensor.double),
}
_FLOOR = {torch.max, torch.maximum, Tensor.max, Tensor.maximum, torch.clamp, Tensor.clamp}


def _trace(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], notes: list[TracedLogits | None]
) -> TracedLogits | None:
    """Return the record of an operation's result, from those of its first arguments."""
    if func in _PRODUCTS:
        return _product(args[0], args[1])
    if func in _BADDBMM:
        left = args[1] if len(args) > 1 else kwargs["batch1"]
        right = args[2] if len(args) > 2 else kwargs["batch2"]
        product = _product(left, right)
        if product is None:
            return None
        product = product.scaled(float(kwargs.get("alpha", 1.0)))
        beta = float(kwargs.get("beta", 1.0))
        return replace(product, added=((beta, args[0]),)) if beta else product
    if func in _WHERE:
        note = next((n for n in notes if n is not None), None)
        if note is None or len(args) < 3 or notes[1] is None:
            return None
        return replace(note, hidden=(*note.hidden, ~args[0])) if _is_low(args[2]) else None
    if notes[0] is None and func in _PLUS and notes[1] is not None:
        notes, args = [notes[1]], (args[1], args[0])
    note = notes[0]
    if note is None:
        return None
    if note.softmaxed:
        # Setting hidden weights to zero after the softmax changes nothing.
        return note if func in _FILL or func in _SAME else None
    return _follow(func, args, kwargs, note)


def _product(left: Any, right: Any) -> TracedLogits | None:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.ndim < 3 or right.ndim < 3:
        return None
    return TracedLogits(left, right.transpose(-1, -2))


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], note: TracedLogits) -> TracedLogits | None:
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if func in _SOFTMAX:
        return replace(note, softmaxed=True)
    if func in _FLOOR:
        low = other if len(args) > 1 or "other" in kwargs else kwargs.get("min")
        high = args[2] if len(args) > 2 else kwargs.get("max")
        return note if high is None and _is_low(low) else None
    if func in _SAME:
        return note
    if func in _TIMES or func in _OVER:
        if isinstance(other, Tensor) and other.numel() > 1:
            # A factor of zeros and ones is a mask; the term that hides those keys is added next.
            return note if func in _TIMES and bool(((other == 0) | (other == 1)).all()) else None
        factor = float(other)  # type: ignore[arg-type]
        return note.scaled(factor if func in _TIMES else 1 / factor)
    if (func in _PLUS or func in _MINUS) and kwargs.get("alpha", 1) == 1:
        sign = 1.0 if func in _PLUS else -1.0
        return replace(note, added=(*note.added, (sign, other))) if isinstance(other, Tensor) else note
    if func in _FILL:
        value = args[2] if len(args) > 2 else kwargs.get("value")
        return replace(note, hidden=(*note.hidden, args[1])) if _is_low(value) else None
    return None


def _is_low(value: Any) -> bool:
    """Return whether a logit of this value gets no weight."""
    return value is not None and float(value.max() if isinstance(value, Tensor) else value) < LOW


_thread = threading.local()


@contextmanager
def tracing(watch: ModelWatch) -> Iterator[None]:
    """Report the attention computed on this thread inside the context to the observer of ``watch``.

    All observers of a thread share one mode: modes must be left in reverse order of entry, and an outer one would
    observe computations of an inner one's reducer.
    """
    mode: TraceAttention | None = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = TraceAttention()
        mode.__enter__()  # type: ignore[no-untyped-call]
    mode.watches.append(watch)
    try:
        yield
    finally:
        mode.watches.remove(watch)
        here = vars(_thread).get("mode") is mode  # the context may end in another thread
        if here and not mode.watches:
            del _thread.mode
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class TraceAttention(TorchFunctionMode):
    """Traces attention through the operations of forward passes of the models that it watches, on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.watches: list[ModelWatch] = []
        self._notes: MutableMapping[Tensor, tuple[int, TracedLogits]] = WeakIdKeyDictionary()

    def _note(self, x: Tensor) -> TracedLogits | None:
        """Return the record of a tensor, unless it was written to since."""
        version, note = self._notes.get(x, (0, None))
        return note if note is not None and version == version_of(x) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record its result."""
        kwargs = kwargs or {}
        # In-place operations return the tensor they change, so its record is read first.
        notes = [self._note(a) if isinstance(a, Tensor) else None for a in (*args[:3], None, None, None)]
        result = func(*args, **kwargs)
        active = [(watch, module) for watch in self.watches if (module := watch.current()) is not None]
        if not active or not isinstance(result, Tensor):
            return result
        call: Callable[[nn.Module, int, Tensor], AttentionCall | None]
        if func is F.scaled_dot_product_attention:
            call = functools.partial(_sdpa_call, args, kwargs)
        elif func in _PRODUCTS and notes[0] is not None and notes[0].softmaxed:
            # Models may keep their attention weights; queries and keys must not be kept with them.
            self._notes = WeakIdKeyDictionary()
            call = functools.partial(_traced_call, notes[0], args)
        else:
            note = _trace(func, args, kwargs, notes)
            if note is not None:
                self._notes[result] = (version_of(result), note)
            elif result in self._notes:
                del self._notes[result]
            return result
        for watch, module in active:
            event = call(module, watch.batch, result)
            replacement = None if event is None or watch.observer is None else watch.observer.on_attention(event)
            if replacement is not None:
                result = replacement.transpose(1, 2).reshape(result.shape)
        return result


def _sdpa_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module, _: int, result: Tensor
) -> AttentionCall | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    query, mask = named["query"], named.get("attn_mask")
    if query.ndim != 4:
        return None
    terms = () if mask is None else (mask,)
    boolean = mask is not None and mask.dtype == torch.bool
    return AttentionCall(
        module=module,
        query=query,
        key=named["key"],
        value=named["value"],
        output=result.transpose(1, 2),
        scale=named.get("scale") or query.shape[-1] ** -0.5,
        mask=Mask(
            causal=bool(named.get("is_causal", False)),
            added=() if boolean else terms,
            visible_only=terms if boolean else (),
            device=query.device,
        ),
    )


def _traced_call(
    note: TracedLogits, args: tuple[Any, ...], module: nn.Module, batch: int, result: Tensor
) -> AttentionCall:
    def split(x: Tensor) -> Tensor:
        """Return ``(batch·heads, n, d)`` or ``(batch, heads, n, d)`` as the latter."""
        return x.view(batch, -1, *x.shape[-2:]) if x.ndim == 3 else x

    def split_term(x: Tensor) -> Tensor:
        return x.view(batch, heads, *x.shape[1:]) if x.ndim == 3 and x.shape[0] == batch * heads else x

    query, key, weights, value, output = map(split, (note.query, note.key, *args[:2], result))
    heads = query.shape[1]
    return AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        output=output.transpose(1, 2),
        scale=note.scale,
        mask=Mask(
            added=tuple(split_term(t if c == 1 else t * c) for c, t in note.added),
            hidden=tuple(map(split_term, note.hidden)),
            device=query.device,
        ),
        weights=weights,
    )
