"""The mask of a whole text, from those of its chunks: as a rule where they follow one, else kept row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask, Rows
from wherewhat.errors import CaptureError

_SAME_SHIFT = 1e-4
"""Biases of keys may differ between chunks by a constant, which no softmax sees, and by rounding relative to them."""

_Part = Callable[[Mask, slice, int, int], Tensor | None]
"""``Mask.visible`` or ``Mask.bias``."""


@dataclass(frozen=True)
class Piece:
    """The mask of one chunk.

    Attributes:
        start: First query of the chunk in the text.
        stop: One past its last query, and its last key.
        first_key: Keys before this one were gone from the cache.
        mask: The mask, over ``stop - start`` queries and ``stop - first_key`` keys.
    """

    start: int
    stop: int
    first_key: int
    mask: Mask


@dataclass(frozen=True)
class PieceMask(Mask):
    """The mask of a text whose chunks follow no rule that covers them all."""

    pieces: tuple[Piece, ...] = ()

    def visible(self, rows: Rows, n: int, m: int) -> Tensor:
        """True where query may see key; keys that were gone from the cache are hidden."""
        return self._joined(rows, n, m, Mask.visible)

    def bias(self, rows: Rows, n: int, m: int) -> Tensor | None:
        """Finite part of the additive terms; None if there is none."""
        if not any(piece.mask.added for piece in self.pieces):
            return None
        return self._joined(rows, n, m, Mask.bias)

    def _joined(self, rows: Rows, n: int, m: int, part: _Part) -> Tensor:
        """``part`` of the rows of every piece, ``(batch or 1, heads or 1, rows, m)``, zero where a piece has none."""
        if isinstance(rows, Tensor):
            spans = [(row, row + 1) for row in rows.tolist()]
        else:
            start, stop, step = rows.indices(n)
            if start >= stop:
                return self._joined(slice(0, 1), n, m, part)[..., :0, :]
            if step != 1:
                return self._joined(slice(start, stop), n, m, part)[..., ::step, :]
            spans = [(start, stop)]
        found = [here for span in spans for here in self._within(*span, m, part)]
        outer = [max(x.shape[axis] for x in found) for axis in (0, 1)]
        return torch.cat([x.expand(*outer, *x.shape[2:]) for x in found], -2)

    def _within(self, start: int, stop: int, m: int, part: _Part) -> Iterator[Tensor]:
        """``part`` of the rows from ``start`` to ``stop``, one tensor for each piece that has some of them."""
        for piece in self.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            queries, keys = piece.stop - piece.start, piece.stop - piece.first_key
            here = part(piece.mask, slice(low - piece.start, high - piece.start), queries, keys)
            here = torch.zeros(1, 1, 1, 1, device=self.device) if here is None else here.to(self.device)
            here = here.expand(*here.shape[:2], high - low, keys)
            yield torch.nn.functional.pad(here, (piece.first_key, m - piece.stop))


@dataclass
class MaskJoiner:
    """Takes the masks of one layer's chunks and gives that of the whole text.

    Masks that are causal, with or without a window, are kept as that rule: nothing n × n is held for them. Biases that
    are the same for every query are kept once. Others are kept as they are.
    """

    _pieces: list[Piece] = field(default_factory=list)
    _windows: list[tuple[int, int | None]] = field(default_factory=list)
    _by_key: tuple[Tensor, ...] = ()
    _ruled: bool = True

    def add(self, attention: LayerAttention, start: int, stop: int, window: int | None, *, ruled: bool) -> None:
        """Take the mask of the chunk with queries ``start`` to ``stop``.

        Args:
            attention: The chunk.
            start: Its first query.
            stop: One past its last.
            window: Window that :func:`rule` found.
            ruled: Whether it found one at all.
        """
        first_key = stop - attention.m
        rest, by_key = split_terms(attention.mask)
        if ruled:
            self._take_by_key(attention.name, by_key, whole=first_key == 0)
            self._windows.append((stop, window))
            rest = Mask(causal=True, window=window, device=attention.rot_q.device)
        self._ruled &= ruled
        mask = rest if ruled and not by_key else replace(rest, added=(*rest.added, *by_key))
        self._pieces.append(Piece(start, stop, first_key, mask))

    def whole(self) -> Mask:
        """The mask of the text."""
        device = self._pieces[0].mask.device
        windows = {window for _, window in self._windows if window is not None}
        if self._ruled and len(windows) <= 1:
            window = next(iter(windows), None)
            if window is None or all(stop <= window for stop, found in self._windows if found is None):
                return Mask(causal=True, window=window, added=self._by_key, device=device)
        return PieceMask(device=device, pieces=tuple(self._pieces))

    def _take_by_key(self, name: str, terms: tuple[Tensor, ...], *, whole: bool) -> None:
        before, self._by_key = self._by_key, terms
        if not self._pieces or not (before or terms):
            return
        same = whole and len(before) == len(terms)
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
    """A mask without, and only, the additive terms that are the same for every query."""
    by_key = tuple(term for term in mask.added if term.ndim > 1 and term.shape[-2] == 1 and term.shape[-1] > 1)
    rest = tuple(term for term in mask.added if all(term is not other for other in by_key))
    return replace(mask, added=rest), by_key


def rule(attention: LayerAttention, start: int, stop: int) -> tuple[bool, int | None]:
    """Whether a chunk's mask, but for biases of keys, is causal with or without a window; and the window.

    Args:
        attention: The chunk, with queries ``start`` to ``stop`` of the text.
        start: Its first query.
        stop: One past its last query.
    """
    mask, _ = split_terms(attention.mask)
    n, m, everything = attention.n, attention.m, slice(None)
    visible, bias = mask.visible(everything, n, m), mask.bias(everything, n, m)
    if bias is not None and bool((bias * visible).any()):
        return False, None
    seen = int(visible[0, 0, -1].sum())
    window = None if seen == stop else seen
    if window is not None and m - n + 1 < min(window, start + 1):
        return False, None  # the first query would need keys that are gone
    expected = Mask(causal=True, window=window, device=mask.device).visible(everything, n, m)
    return bool((visible == expected).all()), window
