"""What a query may look at, and what is added to its logits, without ever holding more than some rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_HIDDEN_BELOW = -9e3
"""Under the row's best key by more than this, a key is hidden: models write -inf, the dtype's minimum or -1e4."""

Rows = slice | Tensor
"""Some queries: a stretch of them, or their indices."""


@dataclass(frozen=True)
class Mask:
    """The mask and additive bias of one attention call.

    Models mix the two: a float mask may carry ALiBi, a bias may come apart from the mask. Here each additive
    term is kept as the model made it and their sum is split row by row: entries far below the row's best one
    hide a key, the others are bias. Not below zero: in a long text ALiBi takes whole rows that low.

    Attributes:
        causal: The kernel itself hides keys after the query (SDPA's ``is_causal``).
        added: Terms added to the logits, each broadcastable to ``(batch, heads, n, m)``.
        hidden: Boolean terms, True where the key is hidden.
        visible_only: Boolean terms, True where the key may be seen.
        window: Keys at distance ``window`` and more are hidden by the kernel itself (flash attention).
    """

    causal: bool = False
    added: tuple[Tensor, ...] = ()
    hidden: tuple[Tensor, ...] = ()
    visible_only: tuple[Tensor, ...] = ()
    window: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def only_causal(self) -> bool:
        """Whether it hides later keys and does nothing else, which no tensor has to be looked at for."""
        return self.causal and self.window is None and not (self.added or self.hidden or self.visible_only)

    def visible(self, rows: Rows, n: int, m: int) -> Tensor:
        """True where query may see key: ``(batch or 1, heads or 1, rows, m)`` for ``rows`` of ``n`` queries."""
        shown, total = self._shown(rows, n, m), self._total(rows, n, m)
        return shown if total is None else shown & (total > self._floor(total, shown))

    def bias(self, rows: Rows, n: int, m: int) -> Tensor | None:
        """Finite part of the additive terms, broadcastable to ``(batch, heads, rows, m)``; None if there is none."""
        total = self._total(rows, n, m)
        if total is None:
            return None
        return torch.where(total > self._floor(total, self._shown(rows, n, m)), total, 0.0)

    def _shown(self, rows: Rows, n: int, m: int) -> Tensor:
        """What everything but the additive terms lets be seen."""
        i = torch.arange(n, device=self.device)[rows, None] + (m - n)
        j = torch.arange(m, device=self.device)[None, :]
        out = torch.ones(1, 1, i.shape[0], m, dtype=torch.bool, device=self.device)
        if self.causal:
            out = out & (j <= i)
        if self.window is not None:
            out = out & (i - j < self.window)
        for term in self.hidden:
            out = out & ~_rows(term, rows, m)
        for term in self.visible_only:
            out = out & _rows(term, rows, m)
        return out

    def _total(self, rows: Rows, n: int, m: int) -> Tensor | None:
        """Sum of the additive terms, in float32 at least."""
        total: Tensor | None = None
        for term in self.added:
            part = _rows(term, rows, m)
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            total = part if total is None else total + part
        return total

    def _floor(self, total: Tensor, shown: Tensor) -> Tensor:
        """At or below this the summed terms hide a key, ``(batch or 1, heads or 1, rows, 1)``."""
        best = total.masked_fill(~shown, -torch.inf).amax(-1, keepdim=True)
        nothing = max(-1e30, *(0.99 * torch.finfo(term.dtype).min for term in self.added))
        return torch.where(best > nothing, best + _HIDDEN_BELOW, best)


def _rows(term: Tensor, rows: Rows, m: int) -> Tensor:
    """The rows of a broadcastable term as ``(batch or 1, heads or 1, rows or 1, m or 1)``."""
    while term.ndim < 4:
        term = term.unsqueeze(0)
    if term.shape[-1] > m:
        term = term[..., :m]
    return term if term.shape[-2] == 1 else term[..., rows, :]
