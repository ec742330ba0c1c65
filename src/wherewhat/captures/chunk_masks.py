"""The mask of a whole text from those of its chunks: a causal mask with or without a window, or all chunks' masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask, Rows
from wherewhat.errors import CaptureError

_SAME_SHIFT = 1e-4
"""Relative tolerance of key biases, which may differ between chunks by a constant without effect on the softmax."""

_Method = Callable[[Mask, slice, int, int], Tensor | None]
"""``Mask.visible`` or ``Mask.bias``."""


@dataclass(frozen=True)
class ChunkMask:
    """The mask of one chunk.

    Attributes:
        start: First query of the chunk in the text.
        stop: One past its last query and key.
        first_key: First key in the cache.
        mask: The mask of ``stop - start`` queries and ``stop - first_key`` keys.
    """

    start: int
    stop: int
    first_key: int
    mask: Mask


@dataclass(frozen=True)
class ChunkedMask(Mask):
    """The mask of a text whose chunks have no common rule.

    Attributes:
        chunks: The masks of the chunks.
    """

    chunks: tuple[ChunkMask, ...] = ()

    def visible(self, rows: Rows, n: int, m: int) -> Tensor:
        """Return True where a query may see a key; keys that were no longer cached are hidden."""
        return self._joined(rows, n, m, Mask.visible)

    def bias(self, rows: Rows, n: int, m: int) -> Tensor | None:
        """Return the finite part of the additive terms; None if there is none."""
        if not any(chunk.mask.added for chunk in self.chunks):
            return None
        return self._joined(rows, n, m, Mask.bias)

    def _joined(self, rows: Rows, n: int, m: int, method: _Method) -> Tensor:
        """Join the results of all chunks, ``(batch or 1, heads or 1, rows, m)``, with zeros where there is none."""
        if isinstance(rows, Tensor):
            spans = [(row, row + 1) for row in rows.tolist()]
        else:
            start, stop, step = rows.indices(n)
            if start >= stop:
                return self._joined(slice(0, 1), n, m, method)[..., :0, :]
            if step != 1:
                return self._joined(slice(start, stop), n, m, method)[..., ::step, :]
            spans = [(start, stop)]
        found = [here for span in spans for here in self._within(*span, m, method)]
        outer = [max(x.shape[axis] for x in found) for axis in (0, 1)]
        return torch.cat([x.expand(*outer, *x.shape[2:]) for x in found], -2)

    def _within(self, start: int, stop: int, m: int, method: _Method) -> Iterator[Tensor]:
        """Yield the result of each chunk with queries from ``start`` to ``stop``."""
        for chunk in self.chunks:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            if low >= high:
                continue
            queries, keys = chunk.stop - chunk.start, chunk.stop - chunk.first_key
            here = method(chunk.mask, slice(low - chunk.start, high - chunk.start), queries, keys)
            here = torch.zeros(1, 1, 1, 1, device=self.device) if here is None else here.to(self.device)
            here = here.expand(*here.shape[:2], high - low, keys)
            yield torch.nn.functional.pad(here, (chunk.first_key, m - chunk.stop))


@dataclass(frozen=True)
class MaskRule:
    """A causal mask with or without a window, apart from biases of keys.

    Attributes:
        window: The window, or None.
    """

    window: int | None


@dataclass
class MaskJoiner:
    """Joins the masks of one layer's chunks.

    Masks with a :class:`MaskRule` are stored as the rule, without n × n tensors. Biases that are the same for every
    query are stored once. Other terms are stored unchanged.
    """

    _chunks: list[ChunkMask] = field(default_factory=list)
    _rules: list[MaskRule | None] = field(default_factory=list)
    _key_terms: tuple[Tensor, ...] = ()

    def add(self, attention: LayerAttention, start: int, stop: int, rule: MaskRule | None) -> None:
        """Add the mask of the chunk with queries ``start`` to ``stop``, for which :func:`mask_rule` found ``rule``."""
        first_key = stop - attention.m
        rest, key_terms = split_terms(attention.mask)
        if rule is not None:
            self._set_key_terms(attention.name, key_terms, complete=first_key == 0)
            rest = Mask(causal=True, window=rule.window, device=attention.rot_q.device)
        self._rules.append(rule)
        mask = replace(rest, added=(*rest.added, *key_terms)) if key_terms else rest
        self._chunks.append(ChunkMask(start, stop, first_key, mask))

    def whole(self) -> Mask:
        """Return the mask of the text."""
        device = self._chunks[0].mask.device
        rules = [(chunk.stop, rule.window) for chunk, rule in zip(self._chunks, self._rules, strict=True) if rule]
        windows = {window for _, window in rules if window is not None}
        if len(rules) == len(self._chunks) and len(windows) <= 1:
            window = next(iter(windows), None)
            if window is None or all(stop <= window for stop, found in rules if found is None):
                return Mask(causal=True, window=window, added=self._key_terms, device=device)
        return ChunkedMask(device=device, chunks=tuple(self._chunks))

    def _set_key_terms(self, name: str, terms: tuple[Tensor, ...], *, complete: bool) -> None:
        """Store biases of keys, which must agree with those of the chunk before."""
        before, self._key_terms = self._key_terms, terms
        if not self._chunks or not (before or terms):
            return
        same = complete and len(before) == len(terms)
        for old, new in zip(before, terms, strict=False):
            new = new[..., : old.shape[-1]]
            if not same or new.shape != old.shape:
                same = False
                break
            shift = (new - old).float()
            size = new.float().abs().max().clamp_min(1.0)
            same = bool((shift.amax(-1) - shift.amin(-1)).max() <= _SAME_SHIFT * size)
        if not same:
            raise CaptureError(f"{name} adds other biases to its keys in each chunk: leave --chunk out")


def split_terms(mask: Mask) -> tuple[Mask, tuple[Tensor, ...]]:
    """Return a mask without the additive terms that are the same for every query, and these terms."""
    key_terms = tuple(term for term in mask.added if term.ndim > 1 and term.shape[-2] == 1 and term.shape[-1] > 1)
    rest = tuple(term for term in mask.added if all(term is not other for other in key_terms))
    return replace(mask, added=rest), key_terms


def mask_rule(attention: LayerAttention, start: int, stop: int) -> MaskRule | None:
    """Return the rule of the mask of the chunk with queries ``start`` to ``stop``; None if it has none."""
    mask, _ = split_terms(attention.mask)
    n, m, everything = attention.n, attention.m, slice(None)
    visible, bias = mask.visible(everything, n, m), mask.bias(everything, n, m)
    if bias is not None and bool((bias * visible).any()):
        return None
    seen = int(visible[0, 0, -1].sum())
    window = None if seen == stop else seen
    if window is not None and m - n + 1 < min(window, start + 1):
        return None  # the first query would need keys that are no longer cached
    expected = Mask(causal=True, window=window, device=mask.device).visible(everything, n, m)
    return MaskRule(window) if bool((visible == expected).all()) else None
