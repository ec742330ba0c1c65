"""Identity: no tensor that a method makes grows faster than the text, and window methods never look at all pairs."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.layers import random_layer
from wherewhat.lengths.frequencies import NTKAware
from wherewhat.lengths.windows import InfLLM, LMInfinite, ReRoPE, SelfExtend, SlidingWindow, StreamingLLM

HEADS, D = 4, 8


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements of any tensor that comes out of an operation, views aside."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor) and x._base is None:
                self.found = max(self.found, x.numel())
        return out


def test_memory_is_linear_and_small():
    """With a soft-cap, blocks of queries are used in place of kernels."""
    n = 1024
    for softcap in (None, 30.0):
        for method in (SlidingWindow(window=16), StreamingLLM(window=16), LMInfinite(window=16)):
            with Largest() as seen:
                method.attend(random_layer(n, d=D, heads=HEADS, kv_heads=2, softcap=softcap))
            # Queries as the fused kernels hold them, or a block of rows with its window.
            assert seen.found <= 2 * HEADS * n * D, (method, softcap)


def test_a_block_of_logits_is_as_large_as_asked():
    n = 1280
    methods = (
        ReRoPE(window=16),
        SelfExtend(window=16, group=4),
        NTKAware(factor=2.0),
        InfLLM(window=16, sinks=4, block=8, top=2),
    )
    for softcap in (None, 30.0):
        for method in methods:
            with Largest() as seen:
                method.attend(random_layer(n, d=D, heads=HEADS, kv_heads=2, softcap=softcap), block_mib=1)
            assert seen.found <= max(2 * 2**20 // 4, 2 * HEADS * n * D) < HEADS * n * n // 8, (method, softcap)
