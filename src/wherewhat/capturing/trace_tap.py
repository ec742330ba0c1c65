"""Sees attention computed by a model's own code, by following tensors from query-key product to softmax to values.

Families off transformers' attention interface (GPT-J, BLOOM, MPT, Falcon, …, and remote code) write the
computation out in PyTorch. A ``TorchFunctionMode`` is active on this thread while captures are open; it notes
each product of two activations, carries the note through scaling, bias, mask and reshaping, and reports when the
softmax of it meets the values. Anything it cannot follow is dropped, and the proof then refuses the model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name the whole field uses
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from wherewhat.capturing.calls import AttentionCall, version_of
from wherewhat.capturing.logit_notes import PRODUCTS, Logits, note_on
from wherewhat.capturing.masking import Mask


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
