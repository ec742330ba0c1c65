"""Brute force and identity: entropy, sink mass and effective rank against dense definitions."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.layers import random_causal_layer
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.attention import attention_stats, gaussian_rank
from wherewhat.measures.heads import AttentionConfig
from wherewhat.measures.tensors import effective_rank

# Logits of 8 products of magnitude up to about 10 in float32: weights are within 1e-5.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["no sinks", "sinks"])
def test_equals_dense_definition(window, sinks):
    attention = random_causal_layer(window=window, sinks=sinks)
    stats = attention_stats(attention, AttentionConfig(sink_tokens=2))
    weights = attention.pattern()[0].double()
    outcomes = (
        torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp_min(0)], -1) if sinks is not None else weights
    )
    entropy = torch.special.entr(outcomes).sum(-1)[:, 1:].mean(-1)
    torch.testing.assert_close(stats.entropy, entropy, **CLOSE)
    torch.testing.assert_close(stats.sink_mass, weights[:, 2:, :2].sum(-1).mean(-1), **CLOSE)
    seen = [min(i + 1, window or i + 1) for i in range(37)]
    assert stats.uniform_entropy == pytest.approx(sum(math.log(s + (sinks is not None)) for s in seen[1:]) / 36)


def test_blocks_of_rows_change_nothing():
    attention = random_causal_layer(heads=64, kv_heads=64, n=300)
    whole = attention_stats(attention, AttentionConfig(block_mib=1024))
    blocks = attention_stats(attention, AttentionConfig(block_mib=1))
    torch.testing.assert_close(whole.entropy, blocks.entropy, **CLOSE)
    torch.testing.assert_close(whole.sink_mass, blocks.sink_mass, **CLOSE)


def test_uniform_attention_reaches_its_controls():
    for sinks in (None, torch.zeros(4)):
        stats = attention_stats(random_causal_layer(scale=0.0, sinks=sinks), AttentionConfig())
        assert stats.entropy.tolist() == pytest.approx([stats.uniform_entropy] * 4, rel=1e-5)
        if sinks is None:
            assert stats.sink_mass.tolist() == pytest.approx([stats.uniform_sink_mass] * 4, rel=1e-5)


def test_effective_rank_of_known_spectra():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, 6, dtype=torch.float64, generator=generator))[0]
    assert float(effective_rank(basis)) == pytest.approx(6)
    assert float(
        effective_rank(basis[:, :1] @ torch.randn(1, 6, dtype=torch.float64, generator=generator))
    ) == pytest.approx(1, abs=1e-5)
    assert float(effective_rank(torch.zeros(5, 3))) == 0.0
    values = torch.tensor([3.0, 1.0], dtype=torch.float64)
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert float(effective_rank(basis[:, :2] * values)) == pytest.approx(expected)


def test_gaussian_rank_is_the_most_tokens_can_have_and_grows_with_n():
    assert 1 < gaussian_rank(16, 64) < 16
    assert gaussian_rank(64, 64) < gaussian_rank(4096, 64) <= 64


def test_short_texts_and_senseless_options_are_refused():
    with pytest.raises(MeasureError, match="only 37 tokens"):
        attention_stats(random_causal_layer(), AttentionConfig(sink_tokens=37))
    for options in ({"sink_tokens": 0}, {"block_mib": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            AttentionConfig(**options)
