"""Brute force: kernels against the same computation in torch. Runs where there is a GPU and Triton."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helpers.layers import random_layer
from wherewhat.caches.limited_cache import LayerLimits, LimitedLayer, RunningPass
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.calls import AttentionCall
from wherewhat.lengths.windows import LMInfinite, SlidingWindow, StreamingLLM

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)


@pytest.mark.parametrize("method", [SlidingWindow(window=128), StreamingLLM(window=200), LMInfinite(window=256)])
def test_equals_blocks(method):
    shapes = [(128, 4, 2), (64, 3, 1), (48, 2, 2)]
    for n, (d, heads, kv_heads), layout in product((257, 1000, 1024), shapes, ("interleaved", None)):
        half = random_layer(
            n, d=d, heads=heads, kv_heads=kv_heads, batch=2, layout=layout, device="cuda", dtype=torch.bfloat16
        )
        # A soft-cap too high to matter keeps the kernels out.
        tensors = {name: getattr(half, name).float() for name in ("rot_q", "rot_k", "value")}
        plain = LayerAttention(**{**vars(half), **tensors, "softcap": 1e6})
        ours, exact = method.attend(half), method.attend(plain)
        assert ours.shape == exact.shape
        assert float((ours.float() - exact).abs().max() / exact.abs().max()) < 0.01, (n, d, layout)


@pytest.mark.parametrize(("heads", "groups", "d"), [(8, 8, 64), (32, 4, 64), (16, 2, 128), (6, 2, 80)])
def test_decoded_tokens_equal_torch(heads, groups, d):
    for tokens, full in product((100, 255, 5000, 65536), ((), (1,), "all")):
        check_decoded(tokens, heads, groups, d, full)


def check_decoded(tokens, heads, groups, d, full):
    chosen = range(groups) if full == "all" else full
    limits = LayerLimits(tuple(head * groups // heads in chosen for head in range(heads)), groups, 200, 4)

    def random(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    fused, plain = (LimitedLayer(limits, RunningPass()) for _ in range(2))
    k, v = random(3, groups, tokens, d), random(3, groups, tokens, d)
    for layer in (fused, plain):
        layer.update(k, v)
        layer._store((k, v))
        layer.stored = layer.count
    assert fused._fused
    plain._fused = False
    with torch.no_grad():
        for _ in range(3):
            q, k, v = (random(3, 1, count, d).transpose(1, 2) for count in (heads, groups, groups))
            outputs = []
            for layer in (fused, plain):
                layer._running.start()
                keys, values = layer.update(k, v)
                call = AttentionCall(torch.nn.Identity(), q, keys, values, q, d**-0.5, Mask(device=q.device))
                outputs.append(layer.attend(None, call).float())
                layer.stored = layer.count
            assert outputs[0].shape == outputs[1].shape
            assert float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()) < 0.02
    ours, theirs = (layer._all.tensors + layer._ring.tensors for layer in (fused, plain))
    for one, other in zip(ours, theirs, strict=True):
        used = min(tokens + 3, one.shape[2])
        assert torch.equal(one[:, :, :used], other[:, :, :used])
