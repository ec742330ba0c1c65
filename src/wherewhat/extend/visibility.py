"""The keys a query attends to under a method, and at which distances: near keys in a window, far keys elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.extend.attention import (
    Far,
    Part,
    attend_parts,
    blocks,
    check_unpadded,
    far_keys,
    only_causal,
    part_scores,
    placed,
    working,
)
from wherewhat.extend.kernels import attend_by_kernels, runs_here

_FEW = 256
"""Far keys up to which all of them are looked at together, beside a kernel for the window."""


def attend_windowed(
    attention: LayerAttention, window: int, far: Far | None = None, *, block_mib: int, fast: bool = True
) -> Tensor:
    """Output ``(batch, n, heads, d_v)`` over the last ``window`` keys and some of those beyond them.

    Only keys that can be seen are touched: beside the far keys, a block of queries costs its window.

    Args:
        attention: One layer.
        window: Keys at a distance below it are seen at that distance.
        far: The keys beyond the window; None for none.
        block_mib: Memory for one block of logits.
        fast: Use the kernels of ``band`` where they can do the job.
    """
    check_unpadded(attention)
    few = far is None or (far.choose is None and far.count <= _FEW)
    if fast and few and only_causal(attention) and runs_here(attention, window):
        return attend_by_kernels(attention, window, far, block_mib=block_mib)
    keys = None if far is None else far_keys(attention, far)
    output = _empty(attention)
    first = attention.m - attention.n
    seen = min(attention.m, 2 * window) + (0 if far is None else far.count)
    for rows in blocks(attention, seen, block_mib=block_mib, most=window):
        i = torch.arange(rows.start, rows.stop, device=output.device) + first
        near = slice(max(0, first + rows.start - window + 1), first + rows.stop)
        j = torch.arange(near.start, near.stop, device=output.device)
        q, k = attention.rot_q[:, :, rows], attention.rot_k[:, :, near]
        parts = [Part(q, k, near, i[:, None] - j < window)]
        if far is not None and keys is not None and first + rows.stop > window:
            parts.append(_far_part(attention, rows, i, window, far, keys))
        output[:, rows] = attend_parts(attention, rows, parts)
    return output


def _empty(attention: LayerAttention) -> Tensor:
    batch, heads, n = attention.rot_q.shape[:3]
    shape = (batch, n, heads, attention.value.shape[-1])
    return torch.empty(shape, dtype=working(attention), device=attention.rot_q.device)


def _far_part(attention: LayerAttention, rows: slice, i: Tensor, window: int, far: Far, keys: Tensor) -> Part:
    """What the queries of a block see beyond their window."""
    # Keys inside the window of the block's last query are inside that of every query.
    stop = min(keys.shape[2], attention.m - attention.n + rows.stop - window)
    j = torch.arange(stop, device=i.device)
    q = placed(attention, attention.rot_q[:, :, rows], i, far.query(i))
    allowed = i[:, None] - j >= window
    if far.choose is None:
        return Part(q, keys[:, :, :stop], slice(0, stop), allowed)
    chosen = far.choose(q, rows)[..., :stop] & allowed
    some = chosen.flatten(0, 1).any(0).nonzero()[:, 0]
    return Part(q, keys[:, :, some], some, chosen[:, None, :, some])


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
