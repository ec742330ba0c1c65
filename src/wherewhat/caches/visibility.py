"""The keys that queries see under a length method and at which distances, for all heads of a layer or some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wherewhat.caches.attention import (
    BLOCK_MIB,
    FarKeys,
    KeySet,
    attend_sets,
    check_unpadded,
    empty_output,
    only_causal,
    query_blocks,
    rotated_to,
    row_indices,
    set_scores,
)
from wherewhat.caches.kept_keys import own_positions, rotated_keys
from wherewhat.caches.kernels import attend_by_kernels, kernel_available
from wherewhat.captures.attention import LayerAttention, Mask, Rows
from wherewhat.captures.rotation import Rotation
from wherewhat.numerics import constant_tensor

_FEW = 256
"""Number of far keys up to which they are processed together, beside a kernel for the window."""


Queries = slice | tuple[int, ...]
"""Some queries: a slice with a start and a stop, or their indices, ascending."""


class Visibility(Protocol):
    """How queries see keys under a length method."""

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """Return the layer's output ``(batch, n, heads, d_v)``, computed by blocks of queries."""

    def scores(self, attention: LayerAttention, rows: Queries) -> Tensor:
        """Return the logits ``(batch, heads, rows, m)`` of some queries, -inf where a key is not visible."""


@dataclass(frozen=True)
class Windowed:
    """The last keys at their true distances, and first keys at other ones.

    Attributes:
        window: Keys at a smaller distance are seen at that distance.
        far: The keys beyond the window; None for none.
    """

    window: int
    far: FarKeys | None = None

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """See :class:`Visibility`. Only visible keys are read: a block of queries needs its window and the far keys."""
        check_unpadded(attention)
        far = self.far
        simple = far is None or (far.choose is None and not _FEW < far.count < attention.m)
        if simple and only_causal(attention) and kernel_available(attention, self.window):
            return attend_by_kernels(attention, self.window, far, block_mib=block_mib)
        far_keys = self.first_keys(attention)
        output = empty_output(attention)
        keys = min(attention.m, 2 * self.window) + (0 if far is None else far.count)
        for rows in query_blocks(attention, keys, block_mib=block_mib, most=self.window):
            sets = self.sets(attention, rows, far_keys)
            if far is not None and far.choose is not None and len(sets) > 1:
                sets[1] = _reached(sets[1])
            output[:, rows] = attend_sets(attention, rows, sets)
        return output

    def scores(self, attention: LayerAttention, rows: Queries) -> Tensor:
        """See :class:`Visibility`."""
        check_unpadded(attention)
        chosen = query_rows(rows, attention.rot_q.device)
        near, *far = self.sets(attention, chosen, self.first_keys(attention))
        out = set_scores(attention, chosen, near)
        if near.keys != slice(0, attention.m):
            whole = torch.full((*out.shape[:3], attention.m), -torch.inf, dtype=out.dtype, device=out.device)
            whole[..., near.keys] = out
            out = whole
        for key_set in far:
            # A pair is allowed in one of the sets, and is -inf in the other.
            out[..., key_set.keys] = torch.maximum(out[..., key_set.keys], set_scores(attention, chosen, key_set))
        return out

    def first_keys(self, attention: LayerAttention) -> Tensor | None:
        """Return the keys beyond the window, rotated to their positions; None for none."""
        far = self.far
        if far is None:
            return None
        if far.count < attention.m and far.choose is None:
            return far.rotated(attention)  # a few, which do not grow with the text
        return rotated_keys(attention, far.key)[:, :, : far.count]

    def sets(self, attention: LayerAttention, rows: Rows, far_keys: Tensor | None) -> list[KeySet]:
        """Return the keys inside the window of some queries, and those beyond it if there are any.

        Queries by index may be anywhere in the text: their sets hold all keys.
        """
        first = attention.m - attention.n
        i = row_indices(rows, attention.rot_q.device) + first
        start, stop = (first + rows.start, first + rows.stop) if isinstance(rows, slice) else (0, attention.m)
        near = slice(max(0, start - self.window + 1), stop)
        j = torch.arange(near.start, near.stop, device=i.device)
        q = attention.rot_q[:, :, rows]
        sets = [KeySet(q, attention.rot_k[:, :, near], near, i[:, None] - j < self.window)]
        if self.far is not None and far_keys is not None and stop > self.window:
            # Keys inside the window of the block's last query are inside that of every query.
            stop = min(far_keys.shape[2], stop - self.window)
            q = rotated_to(attention, q, i, self.far.query(i))
            allowed = (i[:, None] - torch.arange(stop, device=i.device) >= self.window)[None]
            if self.far.choose is not None:
                allowed = allowed & self.far.choose(q, i)[..., :stop]
            sets.append(KeySet(q, far_keys[:, :, :stop], slice(0, stop), allowed[:, None]))
        return sets


_SEARCHED = 4096
"""Number of far keys on a GPU up to which all are read: to know which ones are needed takes longer."""


def _reached(distant: KeySet) -> KeySet:
    """Return a set of keys without those that no query of the block sees."""
    if distant.k.is_cuda and distant.k.shape[2] <= _SEARCHED:
        return distant
    reached = distant.allowed.flatten(0, 2).any(0).nonzero()[:, 0]
    return KeySet(distant.q, distant.k[:, :, reached], reached, distant.allowed[..., reached])


def query_rows(rows: Queries, device: torch.device) -> Rows:
    """Return some queries as a slice, or as indices on a device."""
    return rows if isinstance(rows, slice) else constant_tensor(rows, device)


@dataclass(frozen=True)
class Rescaled:
    """Every key at its true distance, with other frequencies.

    Attributes:
        pieces: Consecutive rows of queries, each with the rotation for them and all keys before them.
    """

    pieces: tuple[tuple[slice, Rotation], ...]

    def attend(self, attention: LayerAttention, *, block_mib: int) -> Tensor:
        """See :class:`Visibility`."""
        check_unpadded(attention)
        if len(self.pieces) == 1:
            return self._attend_piece(attention, *self.pieces[0], block_mib=block_mib)
        output = empty_output(attention)
        for rows, rotation in self.pieces:
            output[:, rows] = self._attend_piece(attention, rows, rotation, block_mib=block_mib)
        return output

    def scores(self, attention: LayerAttention, rows: Queries) -> Tensor:
        """See :class:`Visibility`."""
        check_unpadded(attention)
        scores = []
        for piece, rotation in self.pieces:
            own = _common(rows, piece)
            if own:
                common = query_rows(own, attention.rot_q.device)
                scores.append(set_scores(attention, common, _rerotated(attention, common, rotation, attention.m)))
        return scores[0] if len(scores) == 1 else torch.cat(scores, 2)

    @staticmethod
    def _attend_piece(attention: LayerAttention, rows: slice, rotation: Rotation, *, block_mib: int) -> Tensor:
        """Return the output ``(batch, rows, heads, d_v)`` of some queries under another rotation."""
        rotated = _rerotated(attention, rows, rotation, attention.m - attention.n + rows.stop)
        q, k = rotated.q, rotated.k
        if only_causal(attention) and q.shape[2] == k.shape[2]:
            value = attention.value[:, :, rotated.keys]
            shared = attention.heads != attention.kv_heads
            q, k = q.to(value.dtype), k.to(value.dtype)
            out = scaled_dot_product_attention(q, k, value, is_causal=True, scale=attention.scale, enable_gqa=shared)
            return out.transpose(1, 2)
        piece = replace(attention, rot_q=attention.rot_q[:, :, rows])
        output = empty_output(piece)
        for block in query_blocks(piece, k.shape[2], block_mib=block_mib):
            own = slice(rows.start + block.start, rows.start + block.stop)
            output[:, block] = attend_sets(attention, own, [replace(rotated, q=q[:, :, block])])
        return output


def _common(rows: Queries, piece: slice) -> Queries | None:
    """Return the queries that are in a piece of the text; None for none."""
    if isinstance(rows, tuple):
        return tuple(row for row in rows if piece.start <= row < piece.stop) or None
    common = slice(max(rows.start, piece.start), min(rows.stop, piece.stop))
    return common if common.start < common.stop else None


def _rerotated(attention: LayerAttention, rows: Rows, rotation: Rotation, keys: int) -> KeySet:
    """Return some queries and the first ``keys`` keys under another rotation."""
    first, device = attention.m - attention.n, attention.rot_q.device
    i = row_indices(rows, device) + first
    q = rotated_to(attention, attention.rot_q[:, :, rows], i, i, rotation=rotation)
    if keys == attention.m:
        k = rotated_keys(attention, own_positions, rotation=rotation)
    else:
        j = torch.arange(keys, device=device)
        k = rotated_to(attention, attention.rot_k[:, :, :keys], j, j, rotation=rotation)
    return KeySet(q, k, slice(0, keys), torch.ones(1, 1, dtype=torch.bool, device=device))


def limited_attention(attention: LayerAttention, full: Sequence[bool], *, window: int, sinks: int) -> Tensor | None:
    """Return the output of a layer some heads of which see only the last and the first keys.

    Args:
        attention: One layer, whose queries belong to the last keys.
        full: For each query head, whether it sees all keys that the model lets it see.
        window: Number of last keys that the other heads see, the query's own included.
        sinks: Number of first keys that they see.

    Returns:
        Output ``(batch, n, heads, d_v)``; None if nothing is beyond the window, or no head is limited.
    """
    if all(full) or attention.m <= window:
        return None
    limited = Windowed(window, FarKeys(sinks, lambda i: i, lambda j: j) if sinks else None)

    def attend(part: LayerAttention, sees_all: bool) -> Tensor:
        return full_attention(part) if sees_all else limited.attend(part, block_mib=BLOCK_MIB)

    # Keys are seen at their true distances, so they need not be rotated again.
    return attend_by_heads(replace(attention, rotation=None), full, attend)


def attend_by_heads(
    attention: LayerAttention, flags: Sequence[bool], attend: Callable[[LayerAttention, bool], Tensor]
) -> Tensor:
    """Return the output ``(batch, n, heads, d_v)`` of a layer whose heads are of two kinds.

    Args:
        attention: One layer.
        flags: For each query head, of which kind it is.
        attend: Returns the output of the heads of one kind, from the layer with these heads only and their flag.
    """
    output: Tensor | None = None
    for kind in (True, False):
        heads = [head for head, flag in enumerate(flags) if flag == kind]
        if not heads:
            continue
        chosen = HeadSet.of(heads, count=attention.heads, kv_heads=attention.kv_heads)
        part = attend(with_heads(attention, chosen), kind)
        if chosen.whole:
            return part
        output = empty_output(attention).to(part.dtype) if output is None else output
        output.index_copy_(2, constant_tensor(chosen.heads, output.device), part.to(output.dtype))
    assert output is not None, "a layer has heads"
    return output


def full_attention(attention: LayerAttention, *, allowed: Tensor | None = None) -> Tensor:
    """Return the output ``(batch, n, heads, d_v)`` of a layer as its model computes it, by blocks of queries.

    The queries belong to the last keys. With ``allowed`` ``(n, m)``, keys are hidden besides where it is False.
    """
    if allowed is None and only_causal(attention):
        q, k, v = attention.rot_q, attention.rot_k, attention.value
        shared = attention.heads != attention.kv_heads
        if shared and q.is_cuda and q.dtype == torch.float32:
            # Fused kernels for float32 do not share keys, and the other kernel computes all logits at once.
            k, v = (x.repeat_interleave(attention.heads // attention.kv_heads, 1) for x in (k, v))
            shared = False
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scale, enable_gqa=shared)
        return out.transpose(1, 2)
    output = empty_output(attention)
    everything = torch.ones(1, 1, dtype=torch.bool, device=output.device)
    for rows in query_blocks(attention, attention.m, block_mib=BLOCK_MIB):
        seen = everything if allowed is None else allowed[rows]
        keys = KeySet(attention.rot_q[:, :, rows], attention.rot_k, slice(0, attention.m), seen)
        output[:, rows] = attend_sets(attention, rows, [keys])
    return output


@dataclass(frozen=True)
class HeadSet:
    """Some query heads of a layer with the key heads that they read.

    Attributes:
        heads: The query heads, ascending.
        groups: The key heads, one for each group of ``len(heads) // len(groups)`` of them.
        whole: Whether these are all heads of the layer.
    """

    heads: tuple[int, ...]
    groups: tuple[int, ...]
    whole: bool = False

    @classmethod
    def of(cls, heads: Sequence[int], *, count: int, kv_heads: int) -> HeadSet:
        """Return some of ``count`` query heads over ``kv_heads`` key heads."""
        size = count // kv_heads
        groups = [head // size for head in heads]
        distinct = sorted(set(groups))
        if len(distinct) * size == len(heads):
            groups = distinct
        return cls(tuple(heads), tuple(groups), len(heads) == count)

    def of_queries(self, x: Tensor, axis: int = 1) -> Tensor:
        """Return the heads' part of a tensor of all query heads."""
        return x if self.whole else x.index_select(axis, constant_tensor(self.heads, x.device))

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the part of their key heads of keys or values ``(batch, kv_heads, m, d)``."""
        return x if self.whole else x.index_select(1, constant_tensor(self.groups, x.device))


def with_heads(attention: LayerAttention, heads: HeadSet) -> LayerAttention:
    """Return a layer with some of its heads only; its ``output`` stays as it is."""
    if heads.whole:
        return attention
    return replace(
        attention,
        rot_q=heads.of_queries(attention.rot_q),
        rot_k=heads.of_keys(attention.rot_k),
        value=heads.of_keys(attention.value),
        mask=mask_of(attention.mask, heads),
        sinks=None if attention.sinks is None else heads.of_queries(attention.sinks, 0),
    )


def mask_of(mask: Mask, heads: HeadSet, keys: Tensor | None = None) -> Mask:
    """Return a mask for some heads and, if they are given by index ``(c,)``, some keys."""

    def select(term: Tensor) -> Tensor:
        term = term[(None,) * (4 - term.ndim)]
        term = term if term.shape[1] == 1 else heads.of_queries(term)
        return term if keys is None or term.shape[-1] == 1 else term.index_select(-1, keys)

    return mask.mapped(select) if mask.has_terms else mask
