"""Brute force: each length method equals loops over pairs of a query and a key, by the distances its rule gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from extend.loops import dense, infllm_blocks
from helpers.capture import run, shared, tokens
from wherewhat.captures.attention import LayerAttention
from wherewhat.extend.frequencies import DynamicNTK, NTKAware, PositionInterpolation, YaRN
from wherewhat.extend.method import LengthMethod
from wherewhat.extend.windows import InfLLM, LMInfinite, ReRoPE, SelfExtend, SlidingWindow, StreamingLLM

N = 29
FAMILIES = ["llama", "gptj", "gpt_neox", "gemma3_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def layer(request: pytest.FixtureRequest) -> LayerAttention:
    layers = run(shared(request.param), tokens(N))
    return layers[-1]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "distance"),
    [
        (SlidingWindow(window=7), sliding),
        (StreamingLLM(sinks=3, window=7), streaming),
        (LMInfinite(sinks=3, window=7), lambda_shaped),
        (SelfExtend(window=7, group=3), grouped),
        (ReRoPE(window=7), capped),
    ],
    ids=lambda x: x.name if isinstance(x, LengthMethod) else "",
)
def test_distances_follow_the_rule(
    layer: LayerAttention, method: LengthMethod, distance: Callable[[int, int], float | None]
):
    torch.testing.assert_close(method.attend(layer).double(), dense(layer, distance), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_interpolation(layer: LayerAttention):
    expected = dense(layer, lambda i, j: (i - j) / 2.5)
    torch.testing.assert_close(PositionInterpolation(factor=2.5).attend(layer).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_ntk_aware(layer: LayerAttention):
    p = layer.rotation.planes
    speeds = layer.rotation.inv_freq * torch.tensor([2.5 ** (-f / max(1, p - 1)) for f in range(p)])
    expected = dense(layer, lambda i, j: i - j, inv_freq=lambda _: speeds)
    torch.testing.assert_close(NTKAware(factor=2.5).attend(layer).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_dynamic_ntk(layer: LayerAttention, step: int):
    p = layer.rotation.planes

    def speeds(i: int) -> torch.Tensor:
        length = 10 + step * math.ceil(max(0, i + 1 - 10) / step)
        return layer.rotation.inv_freq * torch.tensor([(length / 10) ** (-f / max(1, p - 1)) for f in range(p)])

    expected = dense(layer, lambda i, j: i - j, inv_freq=speeds)
    torch.testing.assert_close(DynamicNTK(trained=10, step=step).attend(layer).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_yarn(layer: LayerAttention):
    method = YaRN(factor=4.0, trained=64, fast=8, slow=1)
    new = method.rescaled(layer.rotation, 4.0)
    expected = dense(layer, lambda i, j: i - j, inv_freq=lambda _: new.inv_freq, factor=0.1 * math.log(4.0) + 1)
    torch.testing.assert_close(method.attend(layer).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [1.0, 3.0])
def test_infllm(layer: LayerAttention, scaling: float):
    if layer.declared_window:
        pytest.skip("the layer's own window hides what would be retrieved")
    layer = replace(layer, rotation=replace(layer.rotation, scaling=scaling))
    chosen = infllm_blocks(layer, s=2, window=6, block=3, top=2, reps=2)
    assert any(len(keys) == 6 for keys in chosen)

    def distance(i: int, j: int) -> int | None:
        return i - j if i - j < 6 else 6 if j < 2 or j in chosen[i] else None

    method = InfLLM(sinks=2, window=6, block=3, top=2, representatives=2)
    torch.testing.assert_close(method.attend(layer).double(), dense(layer, distance), atol=2e-5, rtol=0)


def test_soft_cap_stays():
    layer = run(shared("gemma2"), tokens(N))[-1]
    assert layer.softcap is not None
    got = LMInfinite(sinks=3, window=7).attend(layer)
    torch.testing.assert_close(got.double(), dense(layer, lambda_shaped), atol=2e-5, rtol=0)


def test_sink_column_stays():
    layer = run(shared("gpt_oss", attn_implementation="eager"), tokens(N))[-1]
    assert layer.sinks is not None
    got = StreamingLLM(sinks=3, window=7).attend(layer)
    torch.testing.assert_close(got.double(), dense(layer, streaming), atol=2e-5, rtol=0)


def test_streaming_by_hand():
    """Cache of 2 + 3: query 9 stands at place 4, so first keys are 4 and 3 away, and keys 7, 8, 9 are 2, 1, 0 away."""
    places = {0: 4, 1: 3, 7: 2, 8: 1, 9: 0}
    layer = run(shared("llama"), tokens(10))[0]
    expected = dense(layer, lambda i, j: places.get(j) if i == 9 else i - j)[:, 9]
    got = StreamingLLM(sinks=2, window=3).attend(layer)[:, 9].double()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_lm_infinite_by_hand():
    """First 2 and last 3: query 9 sees keys 0 and 1 both 3 away, and keys 7, 8, 9 at 2, 1, 0."""
    places = {0: 3, 1: 3, 7: 2, 8: 1, 9: 0}
    layer = run(shared("llama"), tokens(10))[0]
    expected = dense(layer, lambda i, j: places.get(j) if i == 9 else i - j)[:, 9]
    got = LMInfinite(sinks=2, window=3).attend(layer)[:, 9].double()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
