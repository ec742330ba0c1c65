"""Brute force: the GPU's way of windows against blocks in float32. Runs where there is a GPU and Triton."""

from __future__ import annotations

import pytest
import torch

from wherewhat.capturing import LayerAttention, Mask, Rotation
from wherewhat.extend import LMInfinite, SlidingWindow, StreamingLLM

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)


def layer(n: int, *, d: int, heads: int, kv_heads: int, rotated: bool, dtype: torch.dtype) -> LayerAttention:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, n, h, d, device="cuda", generator=generator).to(dtype).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    )
    return LayerAttention(
        layer=0,
        name="attention",
        rot_q=q,
        rot_k=k,
        value=v,
        output=q.transpose(1, 2),
        scale=d**-0.5,
        mask=Mask(causal=True, device=q.device),
        rotation=Rotation("interleaved", 0, 100.0 ** -(torch.arange(d // 2) / (d // 2)), 1.0) if rotated else None,
        positions=torch.arange(n, device="cuda"),
    )


@pytest.mark.parametrize("n", [257, 1000, 1024])
@pytest.mark.parametrize(("d", "heads", "kv_heads"), [(128, 4, 2), (64, 3, 1), (48, 2, 2)])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("method", [SlidingWindow(window=128), StreamingLLM(window=200), LMInfinite(window=256)])
def test_equals_blocks(method, n, d, heads, kv_heads, rotated):
    half = layer(n, d=d, heads=heads, kv_heads=kv_heads, rotated=rotated, dtype=torch.bfloat16)
    # A soft-cap too high to matter keeps the kernels out.
    tensors = {name: getattr(half, name).float() for name in ("rot_q", "rot_k", "value")}
    plain = LayerAttention(**{**vars(half), **tensors, "softcap": 1e6})
    ours, exact = method.attend(half), method.attend(plain)
    assert ours.shape == exact.shape
    assert float((ours.float() - exact).abs().max() / exact.abs().max()) < 0.01
