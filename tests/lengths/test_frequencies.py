"""Parity: rescaled frequencies are those of transformers' own rope types."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from wherewhat.captures.rotation import Rotation
from wherewhat.lengths.frequencies import NTKAware, PositionInterpolation, YaRN, ntk_rotation


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


def test_rope_types():
    """Both sides compute ``1 / theta ** x`` in float32, whose exponent is rounded: an error of ``ε log(theta)``."""
    for theta, trained, factor in product((10_000.0, 100_000.0, 500_000.0), (256, 2048, 8192), (1.5, 4.0, 16.0)):
        close = {"rtol": 2e-5, "atol": 0, "msg": lambda message, x=(theta, trained, factor): f"{x}: {message}"}
        linear, _ = theirs("linear", trained=trained, theta=theta, factor=factor)
        got = PositionInterpolation().rescaled(plain(theta), factor)
        torch.testing.assert_close(got.inv_freq, linear, **close)

        yarn, scaling = theirs(
            "yarn", trained=trained, theta=theta, factor=factor, original_max_position_embeddings=trained
        )
        got = YaRN(trained=trained).rescaled(plain(theta), factor)
        torch.testing.assert_close(got.inv_freq, yarn, **close)
        assert got.scaling == pytest.approx(scaling)

        # Their dynamic type with factor 1 has the base of NTK-aware scaling by length / trained.
        dynamic, _ = theirs("dynamic", trained=trained, theta=theta, factor=1.0, length=int(trained * factor))
        for got in (NTKAware().rescaled(plain(theta), factor), ntk_rotation(plain(theta), factor)):
            torch.testing.assert_close(got.inv_freq, dynamic, **close)
