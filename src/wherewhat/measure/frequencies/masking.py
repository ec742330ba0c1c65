"""Heads without some of their frequencies: planes taken out of the logits, inside the forward pass if wanted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import MeasureError


def frequency_bands(inv_freq: Tensor, bands: int) -> Tensor:
    """Planes of each band, ``(bands, planes)`` bool: sorted by speed, fastest first, and cut into equal parts.

    Raises:
        MeasureError: If there are more bands than planes.
    """
    planes = len(inv_freq)
    if planes < bands:
        raise MeasureError(f"bands={bands} cannot be made of {planes} planes: choose at most {planes}")
    order = inv_freq.abs().argsort(descending=True, stable=True).cpu()
    found = torch.zeros(bands, planes, dtype=torch.bool)
    for row, which in zip(found, order.tensor_split(bands), strict=True):
        row[which] = True
    return found


def without_planes(attention: LayerAttention, keep: Tensor, *, heads: Tensor | None = None) -> LayerAttention:
    """The same layer with only some planes left in its logits.

    The other planes of the queries are zero, so they add nothing to any logit. Dimensions that are not rotated stay, as
    do bias, soft-cap, sinks and values.

    Args:
        attention: One layer, with rotation.
        keep: True for the planes that stay, ``(planes,)``.
        heads: True for the heads to change, ``(heads,)``; None for all.

    Raises:
        MeasureError: If the layer does not rotate, or a shape does not fit.
    """
    if attention.rotation is None:
        raise MeasureError(
            f"layer {attention.layer} does not rotate its queries and keys: it has no planes to take out"
        )
    if keep.shape != (attention.rotation.planes,):
        raise MeasureError(
            f"keep {tuple(keep.shape)} must hold one entry for each of {attention.rotation.planes} planes"
        )
    if heads is not None and heads.shape != (attention.heads,):
        raise MeasureError(f"heads {tuple(heads.shape)} must hold one entry for each of {attention.heads} heads")
    device = attention.rot_q.device
    gone = torch.zeros(attention.rot_q.shape[-1], dtype=torch.bool, device=device)
    gone[attention.rotation.pairs[~keep.bool().cpu()].flatten().to(device)] = True
    changed = torch.ones(attention.heads, dtype=torch.bool) if heads is None else heads.bool()
    both = changed.to(device)[:, None] & gone  # (heads, d)
    return replace(attention, rot_q=attention.rot_q.masked_fill(both[None, :, None], 0.0))


def masked_attention(
    attention: LayerAttention, keep: Tensor, *, heads: Tensor | None = None, block_mib: int = 64
) -> Tensor:
    """Attention output with only some planes left in the logits, a block of queries at a time.

    Args:
        attention: One layer, batch 1, with rotation.
        keep: True for the planes that stay, ``(planes,)``.
        heads: True for the heads to change, ``(heads,)``; None for all.
        block_mib: Memory for one block of logits.

    Returns:
        Output ``(1, n, heads, d_v)``.

    Raises:
        MeasureError: If the layer does not rotate, or a shape does not fit.
    """
    return attend(without_planes(attention, keep, heads=heads), block_mib=block_mib)


def attend(attention: LayerAttention, *, block_mib: int = 64) -> Tensor:
    """Attention output ``(batch, n, heads, d_v)`` computed anew, a block of queries at a time."""
    n, count = attention.n, attention.heads
    rows = max(1, block_mib * 2**20 // (4 * count * attention.m))
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    value = attention.value.to(dtype).repeat_interleave(count // attention.value.shape[1], 1)
    output = torch.empty(value.shape[0], n, count, value.shape[-1], dtype=dtype, device=value.device)
    for start in range(0, n, rows):
        block = slice(start, min(n, start + rows))
        output[:, block] = (attention.pattern(block) @ value).transpose(1, 2)
    return output
