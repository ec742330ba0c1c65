"""Notes on tensors that are attention logits in the making: what of a model's arithmetic they already contain."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name the whole field uses


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
