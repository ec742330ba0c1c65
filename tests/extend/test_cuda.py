"""Brute force: the GPU's way of windows against blocks in float32. Runs where there is a GPU and Triton."""

from __future__ import annotations

import pytest
import torch

from helpers.layers import random_layer
from wherewhat.captures.attention import LayerAttention
from wherewhat.extend.windows import LMInfinite, SlidingWindow, StreamingLLM

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)


@pytest.mark.parametrize("n", [257, 1000, 1024])
@pytest.mark.parametrize(("d", "heads", "kv_heads"), [(128, 4, 2), (64, 3, 1), (48, 2, 2)])
@pytest.mark.parametrize("layout", ["interleaved", None])
@pytest.mark.parametrize("method", [SlidingWindow(window=128), StreamingLLM(window=200), LMInfinite(window=256)])
def test_equals_blocks(method, n, d, heads, kv_heads, layout):
    half = random_layer(
        n, d=d, heads=heads, kv_heads=kv_heads, batch=2, layout=layout, device="cuda", dtype=torch.bfloat16
    )
    # A soft-cap too high to matter keeps the kernels out.
    tensors = {name: getattr(half, name).float() for name in ("rot_q", "rot_k", "value")}
    plain = LayerAttention(**{**vars(half), **tensors, "softcap": 1e6})
    ours, exact = method.attend(half), method.attend(plain)
    assert ours.shape == exact.shape
    assert float((ours.float() - exact).abs().max() / exact.abs().max()) < 0.01
