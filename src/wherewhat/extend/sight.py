"""What a rule lets queries see, and where: the one statement of a rule that outputs and logits are both made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wherewhat.capturing import LayerAttention
from wherewhat.extend.far import Far
from wherewhat.extend.parts import Part, check_unpadded, part_scores, placed, working
from wherewhat.extend.windowed import attend_windowed


class Sight(Protocol):
    """How queries see keys under a rule."""

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """Output ``(batch, n, heads, d_v)`` of the layer, a block of queries at a time."""

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """Logits ``(batch, heads, rows, m)`` of some queries as they enter softmax, -inf where a key is not seen."""


@dataclass(frozen=True)
class Windowed:
    """The last keys at their true distances, and keys beyond them elsewhere.

    Attributes:
        window: Keys at a distance below it are seen at that distance.
        far: The keys beyond the window; None for none.
    """

    window: int
    far: Far | None = None

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """See :class:`Sight`."""
        return attend_windowed(attention, self.window, self.far, block_mib=block_mib)

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """See :class:`Sight`."""
        check_unpadded(attention)
        batch, heads, m = attention.rot_q.shape[0], attention.heads, attention.m
        device, first = attention.rot_q.device, attention.m - attention.n
        i = torch.arange(first + rows.start, first + rows.stop, device=device)
        out = torch.full((batch, heads, len(i), m), -torch.inf, dtype=working(attention), device=device)
        near = slice(max(0, first + rows.start - self.window + 1), first + rows.stop)
        j = torch.arange(near.start, near.stop, device=device)
        q = attention.rot_q[:, :, rows]
        part = Part(q, attention.rot_k[:, :, near], near, i[:, None] - j < self.window)
        out[..., near] = part_scores(attention, rows, part)
        beyond = 0 if self.far is None else max(0, min(self.far.count, first + rows.stop - self.window))
        if self.far is None or beyond == 0:
            return out
        j = torch.arange(beyond, device=device)
        q = placed(attention, q, i, self.far.query(i))
        k = placed(attention, attention.rot_k[:, :, :beyond], j, self.far.key(j))
        allowed = (i[:, None] - j >= self.window)[None]
        if self.far.choose is not None:
            allowed = allowed & self.far.choose(q, rows)[..., :beyond]
        part = Part(q, k, slice(0, beyond), allowed[:, None])
        # A pair is allowed in one of the two parts, and is -inf in the other.
        out[..., :beyond] = torch.maximum(out[..., :beyond], part_scores(attention, rows, part))
        return out
