"""Brute force: each length method equals loops over pairs of a query and a key, by the distances its rule gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.capture import run, shared, tokens
from lengths.loops import dense, infllm_blocks
from wherewhat.captures.attention import LayerAttention
from wherewhat.lengths.frequencies import DynamicNTK, NTKAware, PositionInterpolation, YaRN
from wherewhat.lengths.method import LengthMethod
from wherewhat.lengths.windows import InfLLM, LMInfinite, ReRoPE, SelfExtend, SlidingWindow, StreamingLLM

N = 29
CLOSE = {"atol": 2e-5, "rtol": 0}


@functools.cache
def last_layer(family: str) -> LayerAttention:
    more = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    return run(shared(family, **more), tokens(N))[-1]


@pytest.fixture(params=["llama", "gptj", "gpt_neox", "gemma3_text"])
def layer(request: pytest.FixtureRequest) -> LayerAttention:
    """Halves and interleaved pairs, some or all dimensions rotated, keys that heads share, and a window."""
    return last_layer(request.param)


def sliding(i: int, j: int) -> int | None:
    return i - j if i - j < 7 else None


def streaming(i: int, j: int) -> int | None:
    if i - j < 7:
        return i - j
    return min(i, 3 + 7 - 1) - j if j < 3 else None


def lambda_shaped(i: int, j: int) -> int | None:
    return min(i - j, 7) if i - j < 7 or j < 3 else None


def grouped(i: int, j: int) -> int:
    return i - j if i - j < 7 else i // 3 - j // 3 + 7 - 7 // 3


def capped(i: int, j: int) -> int:
    return min(i - j, 7)


def check(layer: LayerAttention, method: LengthMethod, distance: Callable[[int, int], float | None], **options):
    expected = dense(layer, distance, **options)
    torch.testing.assert_close(
        method.attend(layer).double(), expected, **CLOSE, msg=lambda message: f"{method}: {message}"
    )


def test_distances_follow_the_rule(layer: LayerAttention):
    check(layer, SlidingWindow(window=7), sliding)
    check(layer, StreamingLLM(sinks=3, window=7), streaming)
    check(layer, LMInfinite(sinks=3, window=7), lambda_shaped)
    check(layer, SelfExtend(window=7, group=3), grouped)
    check(layer, ReRoPE(window=7), capped)


def test_frequencies_follow_the_rule(layer: LayerAttention):
    speeds, p = layer.rotation.inv_freq, layer.rotation.planes

    def slowed(factor: float) -> torch.Tensor:
        return speeds * torch.tensor([factor ** (-f / max(1, p - 1)) for f in range(p)])

    def apart(i: int, j: int) -> int:
        return i - j

    check(layer, PositionInterpolation(factor=2.5), lambda i, j: (i - j) / 2.5)
    check(layer, NTKAware(factor=2.5), apart, inv_freq=lambda _: slowed(2.5))
    for step in (1, 4):
        lengths = [10 + step * math.ceil(max(0, i + 1 - 10) / step) for i in range(N)]
        check(layer, DynamicNTK(trained=10, step=step), apart, inv_freq=lambda i, x=lengths: slowed(x[i] / 10))
    yarn = YaRN(factor=4.0, trained=64, fast=8, slow=1)
    mixed = yarn.rescaled(layer.rotation, 4.0).inv_freq  # compared with transformers' in test_frequencies.py
    check(layer, yarn, apart, inv_freq=lambda _: mixed, factor=0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox"])
def test_infllm(family: str):
    for scaling in (1.0, 3.0):
        layer = last_layer(family)
        layer = replace(layer, rotation=replace(layer.rotation, scaling=scaling))
        chosen = infllm_blocks(layer, s=2, window=6, block=3, top=2, reps=2)
        assert any(len(keys) == 6 for keys in chosen)

        def distance(i: int, j: int, chosen=chosen) -> int | None:
            return i - j if i - j < 6 else 6 if j < 2 or j in chosen[i] else None

        check(layer, InfLLM(sinks=2, window=6, block=3, top=2, representatives=2), distance)


def test_soft_cap_and_sink_column_stay():
    capped_layer, sink_layer = last_layer("gemma2"), last_layer("gpt_oss")
    assert capped_layer.softcap is not None
    assert sink_layer.sinks is not None
    check(capped_layer, LMInfinite(sinks=3, window=7), lambda_shaped)
    check(sink_layer, StreamingLLM(sinks=3, window=7), streaming)


def test_first_keys_by_hand():
    """Query 9 with a cache of 2 + 3, and keys 7, 8, 9 at 2, 1, 0.

    StreamingLLM puts it at place 4, so that first keys are 4 and 3 away; to LM-Infinite both are 3 away.
    """
    layer = run(shared("llama"), tokens(10))[0]
    for method, first in ((StreamingLLM, (4, 3)), (LMInfinite, (3, 3))):
        places = {0: first[0], 1: first[1], 7: 2, 8: 1, 9: 0}
        expected = dense(layer, lambda i, j, at=places: at.get(j) if i == 9 else i - j)[:, 9]
        got = method(sinks=2, window=3).attend(layer)[:, 9].double()
        torch.testing.assert_close(got, expected, **CLOSE)
