"""Parity: rescaled frequencies are those of transformers' own rope types."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from wherewhat.captures.rotation import Rotation
from wherewhat.extend.frequencies import NTKAware, PositionInterpolation, YaRN, ntk_rotation


def theirs(kind: str, *, trained: int, theta: float, length: int | None = None, **more):
    config = LlamaConfig(
        hidden_size=64 * 4,
        num_attention_heads=4,
        max_position_embeddings=trained,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **more},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


def plain(theta: float) -> Rotation:
    return Rotation("half", 0, 1 / theta ** (torch.arange(0, 64, 2).float() / 64), 1.0)


@pytest.mark.parametrize("theta", [10_000.0, 100_000.0, 500_000.0])
@pytest.mark.parametrize("trained", [256, 2048, 8192])
@pytest.mark.parametrize("factor", [1.5, 4.0, 16.0])
def test_rope_types(theta, trained, factor):
    linear, _ = theirs("linear", trained=trained, theta=theta, factor=factor)
    got = PositionInterpolation().rescaled(plain(theta), factor)
    torch.testing.assert_close(got.inv_freq, linear, rtol=2e-6, atol=0)

    yarn, scaling = theirs(
        "yarn", trained=trained, theta=theta, factor=factor, original_max_position_embeddings=trained
    )
    got = YaRN(trained=trained).rescaled(plain(theta), factor)
    torch.testing.assert_close(got.inv_freq, yarn, rtol=1e-5, atol=0)
    assert got.scaling == pytest.approx(scaling)

    # Their dynamic type with factor 1 has the base of NTK-aware scaling by length / trained.
    dynamic, _ = theirs("dynamic", trained=trained, theta=theta, factor=1.0, length=int(trained * factor))
    for got in (NTKAware().rescaled(plain(theta), factor), ntk_rotation(plain(theta), factor)):
        torch.testing.assert_close(got.inv_freq, dynamic, rtol=1e-5, atol=0)
