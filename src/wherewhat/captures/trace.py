"""Observe attention in a model's own code by following tensors from query-key product to softmax to value."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name the whole field uses
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from wherewhat.captures.attention import Mask
from wherewhat.captures.calls import AttentionCall, version_of


@dataclass(frozen=True)
class Logits:
    """Note on a tensor: it is ``scale · query · keyᵀ`` plus terms, with some keys hidden."""

    query: Tensor
    key: Tensor
    scale: float = 1.0
    added: tuple[tuple[float, Tensor], ...] = ()
    hidden: tuple[Tensor, ...] = field(default=())
    # Not the weights themselves: a note that holds the tensor it belongs to would keep both alive.
    softmaxed: bool = False

    def scaled(self, factor: float) -> Logits:
        """The note on this tensor times a number."""
        added = tuple((factor * c, t) for c, t in self.added)
        return replace(self, scale=self.scale * factor, added=added)


PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
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
_LOW = -9e3


def note_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], notes: list[Logits | None]) -> Logits | None:
    """What the result of an operation is, from the notes on its first arguments."""
    if func in PRODUCTS:
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
        # Zeroing hidden weights after the softmax changes nothing that the logits did not say already.
        return note if func in _FILL or func in _SAME else None
    return _follow(func, args, kwargs, note)


def _product(left: Any, right: Any) -> Logits | None:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.ndim < 3 or right.ndim < 3:
        return None
    return Logits(left, right.transpose(-1, -2))


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], note: Logits) -> Logits | None:
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
            # A factor of zeros and ones is a mask on its way; the term that hides those keys is added next.
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
    """Whether a logit of this value gets no weight."""
    return value is not None and float(value.max() if isinstance(value, Tensor) else value) < _LOW


@dataclass(frozen=True, eq=False)
class Listener:
    """Who is told, and how to ask which attention module is at work and on how many sequences."""

    tell: Callable[[AttentionCall], Tensor | None]
    current_module: Callable[[], nn.Module | None]
    batch: Callable[[], int]


_thread = threading.local()


@contextmanager
def tracing(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of the attention computed on this thread until the context ends.

    All listeners of a thread share one mode: modes can only be left in the order opposite to that in which they
    were entered, and an outer one would take the work of an inner one's reducer for the model's.
    """
    mode: TraceAttention | None = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = TraceAttention()
        mode.__enter__()  # type: ignore[no-untyped-call]
    mode.listeners.append(listener)
    try:
        yield
    finally:
        mode.listeners.remove(listener)
        here = vars(_thread).get("mode") is mode  # and not in another thread, which may close it
        if here and not mode.listeners:
            del _thread.mode
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class TraceAttention(TorchFunctionMode):
    """Follows attention through the operations of forward passes on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []
        self._notes: MutableMapping[Tensor, tuple[int, Logits]] = WeakIdKeyDictionary()

    def _note(self, x: Tensor) -> Logits | None:
        """The note on a tensor, unless it was written to since, by its index or through a view."""
        version, note = self._notes.get(x, (0, None))
        return note if note is not None and version == version_of(x) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then take note of what its result is."""
        kwargs = kwargs or {}
        # In-place operations return the tensor they changed, so its note must be read before it is replaced.
        notes = [self._note(a) if isinstance(a, Tensor) else None for a in (*args[:3], None, None, None)]
        result = func(*args, **kwargs)
        at_work = [(who, module) for who in self.listeners if (module := who.current_module()) is not None]
        if not at_work or not isinstance(result, Tensor):
            return result
        if func is F.scaled_dot_product_attention:
            for listener, module in at_work:
                result = _replaced(result, _report_sdpa(listener, module, args, kwargs, result))
        elif func in PRODUCTS and notes[0] is not None and notes[0].softmaxed:
            # Models may hold on to their weights; queries and keys must not live as long as those.
            self._notes = WeakIdKeyDictionary()
            for listener, module in at_work:
                result = _replaced(result, _report(listener, module, notes[0], args, result))
        else:
            note = note_on(func, args, kwargs, notes)
            if note is not None:
                self._notes[result] = (version_of(result), note)
            elif result in self._notes:
                del self._notes[result]
        return result


def _report_sdpa(
    listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> Tensor | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    query, mask = named["query"], named.get("attn_mask")
    if query.ndim != 4:
        return None
    boolean = mask is not None and mask.dtype == torch.bool
    return listener.tell(
        AttentionCall(
            module=module,
            query=query,
            key=named["key"],
            value=named["value"],
            output=result.transpose(1, 2),
            scale=named.get("scale") or query.shape[-1] ** -0.5,
            mask=Mask(
                causal=bool(named.get("is_causal", False)),
                added=() if mask is None or boolean else (mask,),
                visible_only=(mask,) if mask is not None and boolean else (),
                device=query.device,
            ),
        )
    )


def _report(
    listener: Listener, module: nn.Module, note: Logits, args: tuple[Any, ...], result: Tensor
) -> Tensor | None:
    batch = listener.batch()
    split = functools.partial(_split_heads, batch=batch)
    query, key, weights, value, output = (split(t) for t in (note.query, note.key, *args[:2], result))
    heads = query.shape[1]
    return listener.tell(
        AttentionCall(
            module=module,
            query=query,
            key=key,
            value=value,
            output=output.transpose(1, 2),
            scale=note.scale,
            mask=Mask(
                added=tuple(_split_term(t if c == 1 else t * c, heads, batch) for c, t in note.added),
                hidden=tuple(_split_term(t, heads, batch) for t in note.hidden),
                device=query.device,
            ),
            weights=weights,
        )
    )


def _replaced(result: Tensor, replacement: Tensor | None) -> Tensor:
    """The model's attention output, or the one it is replaced by ``(batch, n, heads, d_v)`` in the model's layout."""
    return result if replacement is None else replacement.transpose(1, 2).reshape(result.shape)


def _split_heads(x: Tensor, *, batch: int) -> Tensor:
    """``(batch·heads, n, d)`` or ``(batch, heads, n, d)`` as the latter."""
    return x.view(batch, -1, *x.shape[-2:]) if x.ndim == 3 else x


def _split_term(term: Tensor, heads: int, batch: int) -> Tensor:
    if term.ndim == 3 and term.shape[0] == batch * heads:
        return term.view(batch, heads, *term.shape[1:])
    return term
