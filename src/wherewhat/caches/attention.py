"""Attention over several sets of keys with one softmax, and the choice of far keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from wherewhat.captures.attention import LayerAttention, Mask, Rows, shared_product
from wherewhat.captures.rotation import Rotation, over_heads
from wherewhat.errors import MeasureError

BLOCK_MIB = 64
"""Default memory for one block of logits on a CPU, in MiB."""


@dataclass(frozen=True)
class KeySet:
    """A set of keys, with queries and keys rotated to the positions at which they are compared.

    Attributes:
        q: Rotated queries, ``(batch, heads, rows, d)``.
        k: Rotated keys, ``(batch, kv_heads, c, d)``.
        keys: Indices of the keys, a slice or ``(c,)``.
        allowed: True where the method lets a query see a key, broadcastable to ``(batch, 1, rows, c)``.
    """

    q: Tensor
    k: Tensor
    keys: slice | Tensor
    allowed: Tensor


@dataclass(frozen=True)
class FarKeys:
    """The first keys of a text as seen from beyond the window.

    Attributes:
        count: Number of first keys that can be seen from beyond the window.
        query: Position of a query for these keys, from its index ``(rows,)``.
        key: Position of a key, from its index ``(c,)``.
        choose: Keys that single queries may see, ``(batch, rows, count)`` bool, from the rotated queries ``(batch,
            heads, rows, d)`` and their indices among the keys ``(rows,)``; None for all.
    """

    count: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    choose: Callable[[Tensor, Tensor], Tensor] | None = None

    @classmethod
    def capped(cls, count: int, window: int, choose: Callable[[Tensor, Tensor], Tensor] | None = None) -> FarKeys:
        """Return the first keys, all at distance ``window``."""
        return cls(count, lambda i: torch.full_like(i, window), torch.zeros_like, choose)

    @classmethod
    def in_place(cls, count: int, last: int) -> FarKeys:
        """Return the first keys at their own positions; queries after index ``last`` see them from there."""
        return cls(count, lambda i: i.clamp(max=last), lambda j: j)

    def rotated(self, attention: LayerAttention) -> Tensor:
        """Return the keys rotated to their positions, ``(batch, kv_heads, count, d)``."""
        j = torch.arange(min(self.count, attention.m), device=attention.rot_k.device)
        return rotated_to(attention, attention.rot_k[:, :, : len(j)], j, self.key(j))


@dataclass(frozen=True)
class ChosenKeys:
    """Keys that each query and head has chosen for itself, by index, and their logits (-inf where there is no key).

    Both are ``(batch, heads, rows, c)``.
    """

    scores: Tensor
    keys: Tensor


def attend_sets(
    attention: LayerAttention, rows: Rows, sets: Sequence[KeySet], chosen: ChosenKeys | None = None
) -> Tensor:
    """Return the output ``(batch, rows, heads, d_v)`` of one softmax over the keys of all sets.

    The layer's mask, bias, soft-cap and sink column are applied. A pair must be allowed in at most one set.
    """
    parts = [set_scores(attention, rows, key_set) for key_set in sets]
    columns = sum(part.shape[-1] for part in parts)
    if chosen is not None:
        parts.append(chosen.scores)
    if attention.sinks is not None:
        sink = attention.sinks.to(parts[0].dtype).view(1, -1, 1, 1)
        parts.append(sink.expand(*parts[0].shape[:3], 1))
    # Rows that see nothing give 0/0; models leave such rows at zero.
    weights = torch.softmax(torch.cat(parts, -1), -1).nan_to_num(0.0)
    values = [attention.value[:, :, key_set.keys] for key_set in sets]
    value = (values[0] if len(values) == 1 else torch.cat(values, 2)).to(weights.dtype)
    output = shared_product(weights[..., :columns], value)
    if chosen is not None:
        own = weights[..., columns : columns + chosen.keys.shape[-1], None]
        output = output + (own * gathered(attention.value, chosen.keys)).sum(-2)
    return output.transpose(1, 2)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return keys or values ``(batch, kv_heads, m, d)`` by index ``(batch, heads, rows, c)``, with d last."""
    batch, kv_heads, m, d = x.shape
    rows = torch.arange(batch * kv_heads, device=x.device)[:, None]
    if not x.is_contiguous():  # memory that is reserved for later keys is not copied
        return x.flatten(0, 1)[rows, index.view(batch * kv_heads, -1)].view(*index.shape, d)
    flat = index.view(batch * kv_heads, -1) + rows * m
    return x.reshape(-1, d).index_select(0, flat.flatten()).view(*index.shape, d)


def row_indices(rows: Rows, device: torch.device) -> Tensor:
    """Return the indices of some queries, ``(rows,)``; a slice has a start and a stop."""
    if not isinstance(rows, slice):
        return rows
    if rows.stop == rows.start + 1:
        return _index(rows.start, device)
    return torch.arange(rows.start, rows.stop, device=device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the kept tensors are also used outside of inference mode
def _index(start: int, device: torch.device) -> Tensor:
    """Return one index, kept: all layers of a decoded token need it several times."""
    return torch.arange(start, start + 1, device=device)


def set_scores(attention: LayerAttention, rows: Rows, key_set: KeySet) -> Tensor:
    """Return the logits ``(batch, heads, rows, c)`` of a set of keys, -inf where a key is not visible."""
    dtype = score_dtype(attention)
    q = key_set.q.to(dtype)
    count = q.shape[2]
    scores = shared_product(q, key_set.k.to(dtype).mT) * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    mask, columns = _mask_terms(attention, rows, key_set.keys), scores.shape[-1]
    i = row_indices(rows, q.device)[:, None] + (attention.m - attention.n)
    j = row_indices(key_set.keys, q.device)
    visible = key_set.allowed & (j <= i)
    if mask.has_terms:
        visible = visible & mask.visible(slice(None), count, columns)
    if attention.mask.window is not None:
        visible = visible & (i - j < attention.mask.window)
    bias = mask.bias(slice(None), count, columns)
    if bias is not None:
        scores = scores + bias.to(dtype)
    return scores.masked_fill(~visible, -torch.inf)


def rotated_to(
    attention: LayerAttention, x: Tensor, at: Tensor, to: Tensor, *, rotation: Rotation | None = None
) -> Tensor:
    """Return rotated queries or keys at other positions, in float32 or higher precision.

    Args:
        attention: Their layer.
        x: Tensor ``(batch, heads, c, d)`` as the layer rotated it.
        at: Indices of the tokens, ``(c,)``.
        to: New positions, ``(c,)``.
        rotation: New rotation; None for the layer's own.
    """
    own = attention.rotation
    if own is None:
        return x.to(score_dtype(attention))
    return own.moved(x, over_heads(attention.positions[..., at]), to, rotation)


def score_dtype(attention: LayerAttention) -> torch.dtype:
    """Return the dtype of logits: that of the queries, or float32 if that is more precise."""
    return torch.promote_types(attention.rot_q.dtype, torch.float32)


def empty_output(attention: LayerAttention) -> Tensor:
    """Return an uninitialised output ``(batch, n, heads, d_v)``."""
    batch, heads, n = attention.rot_q.shape[:3]
    shape = (batch, n, heads, attention.value.shape[-1])
    return torch.empty(shape, dtype=score_dtype(attention), device=attention.rot_q.device)


def only_causal(attention: LayerAttention) -> bool:
    """Return whether logits are changed by nothing but a causal mask."""
    plain = attention.softcap is None and attention.sinks is None
    return plain and attention.mask.only_causal and attention.n == attention.m


def check_unpadded(attention: LayerAttention) -> None:
    """Refuse padded and packed texts, in which the index of a key is not its place in the text.

    Every token of a text sees itself, whatever the window or the chunk; a padded one is hidden from all queries.
    """
    positions = attention.positions
    if positions not in _consecutive:  # reading a number waits for a GPU, and all layers of a pass have one tensor
        if bool((positions.diff(dim=-1) != 1).any()):
            raise MeasureError(f"positions do not go up one by one in layer {attention.layer}: {ONE_TEXT}")
        _consecutive[positions] = True
    if not attention.mask.has_terms:
        return
    n, m = attention.n, attention.m
    own = _own_terms(attention.mask, n, m).visible(slice(None), 1, n).flatten(0, 2).all(0)
    if n < m and attention.declared_window is None:  # a cached key
        first = _mask_terms(attention, slice(0, 1), slice(0, 1)).visible(slice(None), 1, 1)
        own = torch.cat([first.all()[None], own[1:]])
    hidden = (~own).nonzero().flatten().tolist()
    if hidden:
        what = f"token {hidden[0]}" if hidden[0] else "the first key"
        raise MeasureError(f"{what} is hidden in layer {attention.layer}, as padding is: {ONE_TEXT}")


_consecutive = WeakTensorKeyDictionary()
"""Positions that go up one by one."""

ONE_TEXT = "give one text per row, without padding or packing"
"""What to do about padded and packed texts."""


def _own_terms(mask: Mask, n: int, m: int) -> Mask:
    """Return the terms of a mask at each query and its own key, as a mask of one query and ``n`` keys."""

    def diagonal(term: Tensor) -> Tensor:
        term = term[(None,) * (4 - term.ndim)][..., :m]
        term = term if term.shape[-1] == 1 else term[..., m - n :]
        if 1 in term.shape[-2:]:
            return term if term.shape[-2] == 1 else term.mT
        return term.diagonal(dim1=-2, dim2=-1)[..., None, :]

    return mask.mapped(diagonal, causal=False, window=None)


def default_block_mib(device: torch.device) -> int:
    """Return the memory for one block of logits in MiB: a 64th of a GPU's, where many small blocks are slow."""
    return BLOCK_MIB if device.type != "cuda" else torch.cuda.get_device_properties(device).total_memory >> 26


def query_blocks(attention: LayerAttention, keys: int, *, block_mib: int, most: int | None = None) -> Iterator[slice]:
    """Yield blocks of at most ``most`` queries whose logits over ``keys`` keys fit into ``block_mib`` MiB."""
    batch, heads, n = attention.rot_q.shape[:3]
    width = torch.finfo(score_dtype(attention)).bits // 8
    rows = max(1, block_mib * 2**20 // (width * batch * heads * max(1, keys)))
    rows = rows if most is None else min(rows, most)
    for start in range(0, n, rows):
        yield slice(start, min(n, start + rows))


def _mask_terms(attention: LayerAttention, rows: Rows, keys: slice | Tensor) -> Mask:
    """Return the terms of the layer's mask for some queries and keys, without causality and window."""

    def select(term: Tensor) -> Tensor:
        term = term[(None,) * (4 - term.ndim)]
        term = term if term.shape[-2] == 1 else term[..., rows, :]
        return term if term.shape[-1] == 1 else term[..., : attention.m][..., keys]

    return attention.mask.mapped(select, causal=False, window=None)
