"""A layer of random queries, keys and values, for methods to attend with."""

from __future__ import annotations

from typing import Any

import torch

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation


def random_layer(
    n: int,
    *,
    d: int,
    heads: int,
    kv_heads: int,
    batch: int = 1,
    layout: str | None = "half",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> LayerAttention:
    """Queries ``(batch, heads, n, d)``, keys and values ``(batch, kv_heads, n, d)``, causal.

    They lie in memory token by token, as projections leave them.

    Args:
        n: Tokens.
        d: Dimensions of a head.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        batch: Texts.
        layout: Layout of the rotation; None for no rotation.
        device: Where everything is.
        dtype: Of queries, keys and values.
        options: Further fields of the layer.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, h, d, device=device, generator=generator).to(dtype).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    )
    speeds = 100.0 ** -(torch.arange(d // 2) / (d // 2))
    return LayerAttention(
        layer=0,
        name="attention",
        rot_q=q,
        rot_k=k,
        value=v,
        output=q.transpose(1, 2),
        scale=d**-0.5,
        mask=Mask(causal=True, device=q.device),
        rotation=None if layout is None else Rotation(layout, 0, speeds, 1.0),
        positions=torch.arange(n, device=device),
        **options,
    )


def causal_layer(q, k, *, window=None, sinks=None, scale=1.0):
    """A causal layer without rotation; q ``(heads, n, d)``, k ``(kv_heads, n, d)``."""
    return LayerAttention(
        layer=0,
        name="attention",
        rot_q=q[None],
        rot_k=k[None],
        value=k[None],
        output=q[None].transpose(1, 2),
        scale=scale,
        mask=Mask(causal=True, window=window),
        rotation=None,
        positions=torch.arange(k.shape[1]),
        sinks=sinks,
    )


def random_causal_layer(heads=4, kv_heads=2, n=37, d=8, **options):
    generator = torch.Generator().manual_seed(1)
    return causal_layer(
        torch.randn(heads, n, d, generator=generator),
        torch.randn(kv_heads, n, d, generator=generator),
        **options,
    )
