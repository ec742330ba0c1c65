"""One layer's attention: queries, keys, values, mask and bias, without n × n tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.rotation import Rotation, over_heads
from wherewhat.errors import MeasureError
from wherewhat.options import short_repr

LOW = -9e3
"""Logits below this get no weight in a short text: models hide keys by -inf, the dtype's minimum or -1e4."""

Rows = slice | Tensor
"""Some queries: a slice or their indices."""


@dataclass(frozen=True)
class Mask:
    """The mask and additive bias of one attention call.

    Models mix the two: a float mask may contain ALiBi, and a bias may be separate from the mask. Each additive term is
    kept as the model made it. Its entries near the minimum of its dtype hide a key, and the others are bias, however
    negative: ALiBi reaches -13,000 in 16,000 tokens. Models that hide keys by another number, such as -1e4, show it in
    their proof, which gives ``hides``.

    Attributes:
        causal: The kernel hides keys after the query (SDPA's ``is_causal``).
        added: Terms added to the logits, each broadcastable to ``(batch, heads, n, m)``.
        hidden: Boolean terms, True where the key is hidden.
        visible_only: Boolean terms, True where the key is visible.
        window: The kernel hides keys at distance ``window`` and more (flash attention).
        device: Device of the terms.
        hides: Entries of additive terms at or below it hide a key; None for half the minimum of each term's dtype.
    """

    causal: bool = False
    added: tuple[Tensor, ...] = ()
    hidden: tuple[Tensor, ...] = ()
    visible_only: tuple[Tensor, ...] = ()
    window: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hides: float | None = None

    __repr__ = short_repr

    @property
    def has_terms(self) -> bool:
        """Whether there are terms of any kind, that is, more than causality and a window."""
        return bool(self.added or self.hidden or self.visible_only)

    @property
    def only_causal(self) -> bool:
        """Whether it only hides later keys, known without reading a tensor."""
        return self.causal and self.window is None and not self.has_terms

    def mapped(self, change: Callable[[Tensor], Tensor], **values: Any) -> Mask:
        """Return the mask with ``change`` applied to every term, and with other ``values`` of its fields."""
        added, hidden, visible_only = (tuple(map(change, x)) for x in (self.added, self.hidden, self.visible_only))
        return replace(self, added=added, hidden=hidden, visible_only=visible_only, **values)

    def visible(self, rows: Rows, n: int, m: int) -> Tensor:
        """Return True where a query sees a key: ``(batch or 1, heads or 1, rows, m)`` for ``rows`` of ``n`` queries."""
        shown, hidden = self._shown(rows, n, m), self._hidden(rows, m)
        return shown if hidden is None else shown & ~hidden

    def bias(self, rows: Rows, n: int, m: int) -> Tensor | None:
        """Return the finite part of the additive terms, broadcastable to ``(batch, heads, rows, m)``, or None."""
        hidden = self._hidden(rows, m)
        if hidden is None:
            return None
        parts = (_rows(term, rows, m) for term in self.added)
        total = sum(part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts)
        return torch.where(hidden, 0.0, total)

    def _shown(self, rows: Rows, n: int, m: int) -> Tensor:
        """Return the visible keys without regard to the additive terms."""
        i = range(n)[rows] if isinstance(rows, slice) else rows
        if isinstance(i, Tensor):
            out = _seen(self.causal, self.window, i + (m - n), m)
        else:
            band = _band if len(i) * m <= _KEPT else _band.__wrapped__
            out = band(self.causal, self.window, i, n, m, self.device)
        for term in self.hidden:
            out = out & ~_rows(term, rows, m)
        for term in self.visible_only:
            out = out & _rows(term, rows, m)
        return out

    def _hidden(self, rows: Rows, m: int) -> Tensor | None:
        """Return True where an additive term hides a key, broadcastable to ``(batch, heads, rows, m)``, or None."""
        hidden: Tensor | None = None
        for term in self.added:
            limit = torch.finfo(term.dtype).min / 2 if self.hides is None else self.hides
            here = _rows(term, rows, m) <= limit
            hidden = here if hidden is None else hidden | here
        return hidden


_KEPT = 2**22
"""Largest number of pairs of which the visible ones are kept for the next layers."""


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # the cached tensors are also used outside of inference mode
def _band(causal: bool, window: int | None, rows: range, n: int, m: int, device: torch.device) -> Tensor:
    """Return the keys that some queries see; kept, because making them again takes many small kernels."""
    i = torch.arange(rows.start, rows.start + rows.step * len(rows), rows.step, device=device)
    return _seen(causal, window, i + (m - n), m)


def _seen(causal: bool, window: int | None, i: Tensor, m: int) -> Tensor:
    """Return the keys that queries at indices ``i`` ``(rows,)`` see, ``(1, 1, rows, m)`` bool."""
    distance = i[:, None] - torch.arange(m, device=i.device)
    out = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return (out if window is None else out & (distance < window))[None, None]


def _rows(term: Tensor, rows: Rows, m: int) -> Tensor:
    """Return the rows of a broadcastable term as ``(batch or 1, heads or 1, rows or 1, m or 1)``."""
    term = term[(None,) * (4 - term.ndim)][..., :m]
    return term if term.shape[-2] == 1 else term[..., rows, :]


def _is_repeated(x: Tensor) -> bool:
    """Return whether all rows of ``x`` ``(rows, ...)`` are the same; read from the device only if they are stored."""
    return x.shape[0] == 1 or x.stride(0) == 0 or bool((x[1:] == x[:1]).all())


def shared_product(x: Tensor, shared: Tensor) -> Tensor:
    """Return ``x`` ``(batch, heads, rows, c)`` times ``shared`` ``(batch, kv_heads, c, d)`` without repeating it."""
    batch, heads, rows, columns = x.shape
    kv_heads, d = shared.shape[1], shared.shape[3]
    return (x.reshape(batch, kv_heads, heads // kv_heads * rows, columns) @ shared).view(batch, heads, rows, d)


MaskCopies = dict[tuple[int, torch.Size, tuple[int, ...]], tuple[Tensor, Tensor]]
"""Terms of masks and their copies, by address and shape of the original."""


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer in one forward pass.

    Names follow TransformerLens: ``q`` and ``k`` are before rotation, ``rot_q`` and ``rot_k`` after it,
    ``attn_scores`` the logits, ``pattern`` the attention weights. The tensors belong to the running forward
    pass: a reducer must copy those that it keeps.

    The logits are ``softcap(scale · rot_q · rot_kᵀ) + bias``, hidden by the mask, with ``sinks`` as one more
    column in the softmax.

    Attributes:
        layer: Index of the block in the model.
        name: Path of the attention module in the model.
        rot_q: Queries after rotation (and any norm), ``(batch, heads, n, d)``.
        rot_k: Keys after rotation, cached ones included, ``(batch, kv_heads, m, d)``.
        value: Values, ``(batch, kv_heads, m, d_v)``.
        output: Attention output per head before the output projection, ``(batch, n, heads, d_v)``.
        scale: Factor on the dot product.
        mask: Mask and additive bias.
        rotation: Rotation of queries and keys; None for layers without rotation.
        positions: Position of every key, ``(m,)`` or ``(batch, m)``; the last n are the queries'.
        softcap: If given, ``softcap · tanh(logit / softcap)`` is applied before the mask.
        sinks: Logit of the sink column of each head, ``(heads,)``.
        declared_window: Sliding window that the model declares for this layer, if any.
        key_mixing: How much keys depend on the inputs of other tokens, see
            :func:`~wherewhat.captures.blocks.key_mixing`; None if that was not measured.
    """

    layer: int
    name: str
    rot_q: Tensor
    rot_k: Tensor
    value: Tensor
    output: Tensor
    scale: float
    mask: Mask
    rotation: Rotation | None
    positions: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None
    declared_window: int | None = None
    key_mixing: float | None = None

    def copied(self, *, device: torch.device | None = None, memo: MaskCopies | None = None) -> LayerAttention:
        """Return a copy that stays valid after the forward pass.

        Args:
            device: Device of the copy; that of the layer by default.
            memo: Masks that were copied before: layers that share a mask then share its copy.
        """
        known: MaskCopies = {} if memo is None else memo

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device or tensor.device, copy=True)

        def shared(term: Tensor) -> Tensor:
            key = (term.data_ptr(), term.shape, term.stride())
            if key not in known:
                known[key] = (term, copy(term))  # the original is held, so that its address stays its own
            return known[key][1]

        return replace(
            self,
            rot_q=copy(self.rot_q),
            rot_k=copy(self.rot_k),
            value=copy(self.value),
            output=copy(self.output),
            mask=self.mask.mapped(shared, device=device or self.mask.device),
            positions=copy(self.positions),
            sinks=None if self.sinks is None else copy(self.sinks),
        )

    def __repr__(self) -> str:
        batch, heads, n, d = self.rot_q.shape
        dtype = str(self.rot_q.dtype).removeprefix("torch.")
        shown = [
            f"layer {self.layer}",
            f"{heads} heads" if heads == self.kv_heads else f"{heads} heads / {self.kv_heads} kv",
            f"{n} tokens" if n == self.m else f"{n} tokens over {self.m} keys",
            f"d {d}",
            "no rotation" if self.rotation is None else f"RoPE {self.rotation.pairing}",
            *([] if self.declared_window is None else [f"window {self.declared_window:,}"]),
            *([] if batch == 1 else [f"batch {batch}"]),
            f"{dtype} on {self.rot_q.device}",
        ]
        return f"LayerAttention({', '.join(shown)})"

    @property
    def texts(self) -> int:
        """Number of texts of the pass."""
        return self.rot_q.shape[0]

    def text(self, index: int) -> LayerAttention:
        """Return the layer of one of its texts."""
        own = self.selected(slice(index, index + 1))
        return own if own is self or own.positions.ndim == 1 else replace(own, positions=own.positions[0])

    def selected(self, texts: slice) -> LayerAttention:
        """Return the layer of some of its texts."""
        if texts.indices(self.texts) == (0, self.texts, 1):
            return self
        return replace(
            self,
            rot_q=self.rot_q[texts],
            rot_k=self.rot_k[texts],
            value=self.value[texts],
            output=self.output[texts],
            mask=self.mask.mapped(lambda term: term[texts] if term.ndim == 4 and term.shape[0] > 1 else term),
            positions=self.positions if self.positions.ndim == 1 else self.positions[texts],
        )

    @cached_property
    def merged(self) -> LayerAttention:
        """The same layer as one text whose heads are those of all texts, texts outermost.

        Head h of text t is head ``t · heads + h``, and reads key head ``t · kv_heads + h // (heads // kv_heads)``, so
        that functions of one text compute all texts at once. The texts must share mask and positions.
        """
        if self.texts == 1:
            return self
        heads, kv_heads = self.texts * self.heads, self.texts * self.kv_heads

        def merge(term: Tensor) -> Tensor:
            """Return a term of the mask for the heads of all texts; one that is the same for all heads stays so."""
            term = term[(None,) * (4 - term.ndim)]
            if term.shape[0] > 1 and not _is_repeated(term):
                return term.expand(-1, self.heads, -1, -1).reshape(1, heads, *term.shape[2:])
            return term[:1] if term.shape[1] == 1 else term[:1].repeat(1, self.texts, 1, 1)

        positions = self.positions
        if positions.ndim == 2:
            if not _is_repeated(positions):
                raise MeasureError(f"texts of layer {self.layer} have different positions: measure one text at a time")
            positions = positions[0]
        return replace(
            self,
            rot_q=self.rot_q.reshape(1, heads, *self.rot_q.shape[2:]),
            rot_k=self.rot_k.reshape(1, kv_heads, *self.rot_k.shape[2:]),
            value=self.value.reshape(1, kv_heads, *self.value.shape[2:]),
            # Editors that replace the output do not have the model's own.
            output=self.output.transpose(0, 1).flatten(1, 2)[None] if self.output.ndim == 4 else self.output,
            mask=self.mask.mapped(merge),
            positions=positions,
            sinks=None if self.sinks is None else self.sinks.repeat(self.texts),
        )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.rot_q.shape[1]

    @property
    def kv_heads(self) -> int:
        """Number of key heads; query head h reads key head ``h // (heads // kv_heads)``."""
        return self.rot_k.shape[1]

    @property
    def n(self) -> int:
        """Number of queries."""
        return self.rot_q.shape[2]

    @property
    def m(self) -> int:
        """Number of keys."""
        return self.rot_k.shape[2]

    @cached_property
    def q(self) -> Tensor:
        """Queries before rotation in the layout of ``rot_q``, ``(batch, heads, n, d)``.

        In float32 or higher precision; ``rot_q`` itself, in the model's dtype, for layers without rotation.
        """
        if self.rotation is None:
            return self.rot_q
        return self.rotation.unrotate(self.rot_q, over_heads(self.positions[..., self.m - self.n :]))

    @cached_property
    def k(self) -> Tensor:
        """Keys before rotation in the layout of ``rot_k``, ``(batch, kv_heads, m, d)``; dtype as for ``q``."""
        if self.rotation is None:
            return self.rot_k
        return self.rotation.unrotate(self.rot_k, over_heads(self.positions))

    def attn_scores(self, rows: Rows = slice(None)) -> Tensor:
        """Return the logits of some queries with scale, soft-cap and bias, unmasked: ``(batch, heads, rows, m)``."""
        dtype = torch.promote_types(self.rot_q.dtype, torch.float32)
        scores = shared_product(self.rot_q[:, :, rows].to(dtype), self.rot_k.to(dtype).mT) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        bias = self.bias(rows)
        return scores if bias is None else scores + bias.to(dtype)

    def bias(self, rows: Rows = slice(None)) -> Tensor | None:
        """Return the additive bias (ALiBi) of some queries, broadcastable to ``(batch, heads, rows, m)``, or None."""
        return self.mask.bias(rows, self.n, self.m)

    def visible(self, rows: Rows = slice(None)) -> Tensor:
        """Return True where a query may see a key, broadcastable to ``(batch, heads, rows, m)``."""
        return self.mask.visible(rows, self.n, self.m)

    def pattern(self, rows: Rows = slice(None)) -> Tensor:
        """Return the attention weights of some queries, ``(batch, heads, rows, m)``, zero if no key is visible."""
        return self.weigh(self.attn_scores(rows), rows)

    def weigh(self, scores: Tensor, rows: Rows = slice(None)) -> Tensor:
        """Return the attention weights for logits ``(batch, heads, rows, m)`` of some queries under the mask."""
        visible = self.visible(rows)
        weights = torch.softmax(self.masked(scores, visible), -1)[..., : self.m]
        if self.mask.only_causal and self.n <= self.m:  # every query sees a key: its own
            return weights
        return torch.where(visible.any(-1, keepdim=True), weights, 0.0)

    def masked(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Return logits ``(batch, heads, rows, m)`` with -inf for hidden keys, and with the sink column if any."""
        scores = torch.where(visible, scores, -torch.inf)
        if self.sinks is None:
            return scores
        sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1)
