"""Attention in which some heads see only the last and the first keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.extend.attention import FarKeys, KeySet, attend_sets, empty_output, only_causal, query_blocks
from wherewhat.extend.method import BLOCK_MIB
from wherewhat.extend.visibility import Windowed


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
        return x if self.whole else x.index_select(axis, index_tensor(self.heads, x.device))

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the part of their key heads of keys or values ``(batch, kv_heads, m, d)``."""
        return x if self.whole else x.index_select(1, index_tensor(self.groups, x.device))


@functools.lru_cache(maxsize=4096)
def index_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor, made once for each device: copying them takes longer than most kernels."""
    return torch.tensor(values, device=device)


def limited_attention(
    attention: LayerAttention, full: Sequence[bool], *, window: int, sinks: int, block_mib: int = BLOCK_MIB
) -> Tensor | None:
    """Return the output of a layer some heads of which see only the last and the first keys.

    Args:
        attention: One layer, whose queries belong to the last keys.
        full: For each query head, whether it sees all keys that the model lets it see.
        window: Number of last keys that the other heads see, the query's own included.
        sinks: Number of first keys that they see.
        block_mib: Memory for one block of logits.

    Returns:
        Output ``(batch, n, heads, d_v)``; None if nothing is beyond the window, or no head is limited.
    """
    if all(full) or attention.m <= window:
        return None
    # Keys are seen at their true distances, so they need not be rotated again.
    attention = replace(attention, rotation=None)
    far = FarKeys(sinks, lambda i: i, lambda j: j) if sinks else None
    output: Tensor | None = None
    for whole in (True, False):
        heads = [head for head, sees_all in enumerate(full) if sees_all == whole]
        if not heads:
            continue
        chosen = HeadSet.of(heads, count=attention.heads, kv_heads=attention.kv_heads)
        part = with_heads(attention, chosen)
        if whole:
            found = full_attention(part, block_mib=block_mib)
        else:
            found = Windowed(window, far).attend(part, block_mib=block_mib)
        if chosen.whole:
            return found
        output = empty_output(attention).to(found.dtype) if output is None else output
        output.index_copy_(2, index_tensor(chosen.heads, output.device), found.to(output.dtype))
    return output


def full_attention(attention: LayerAttention, *, block_mib: int = BLOCK_MIB, allowed: Tensor | None = None) -> Tensor:
    """Return the output ``(batch, n, heads, d_v)`` of a layer as its model computes it, by blocks of queries.

    Args:
        attention: One layer, whose queries belong to the last keys.
        block_mib: Memory for one block of logits.
        allowed: True for the keys that queries may see besides, ``(n, m)``; None for all.
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
    for rows in query_blocks(attention, attention.m, block_mib=block_mib):
        seen = everything if allowed is None else allowed[rows]
        keys = KeySet(attention.rot_q[:, :, rows], attention.rot_k, slice(0, attention.m), seen)
        output[:, rows] = attend_sets(attention, rows, [keys])
    return output


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

    def selected(terms: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(map(select, terms))

    def select(term: Tensor) -> Tensor:
        while term.ndim < 4:
            term = term.unsqueeze(0)
        term = term if term.shape[1] == 1 else heads.of_queries(term)
        return term if keys is None or term.shape[-1] == 1 else term.index_select(-1, keys)

    if not mask.has_terms:
        return mask
    return replace(
        mask, added=selected(mask.added), hidden=selected(mask.hidden), visible_only=selected(mask.visible_only)
    )
