"""End-to-end on tiny models, and brute force for what is put together over heads and documents."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.capture import TinySubject, tokens
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.heads.measurement import HeadsConfig
from wherewhat.measures.heads.scores import combine_documents, measure_heads
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.tensors import correlation

CONFIG = HeadsConfig(queries=4, blocks=(2,), taus=(1e-2,))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3_text", "gpt_oss"])
def test_every_statistic_stands_beside_the_scores(family):
    subject = TinySubject(family)
    found = measure_heads(subject, tokens(40), CONFIG)
    rotated = family in ("llama", "gemma3_text", "gpt_oss")
    for layer in found.layers:
        assert {"s_pos", "s_sym", "s_pos_low", "label", "induction", "slash_max", "entropy", "r"} <= layer.heads.keys()
        assert ("mean_frequency" in layer.heads) == rotated
        assert bool((layer.heads["exclusion"] >= 1 - 1e-9).all())
        low, value, high = (layer.heads[f"s_pos{end}"] for end in ("_low", "", "_high"))
        assert bool(((low <= value + 1e-9) & (value <= high + 1e-9)).all())
        assert sum(layer.whole[f"heads_{name}"] for name in LABELS) == pytest.approx(1)
        assert layer.curves["s_pos_by_tau"].values.shape == (layer.heads["s_pos"].shape[0], 2)
    assert ("corr_pos_frequency" in found.whole) == rotated
    assert "corr_pos_sym" in found.whole


def test_scores_are_those_of_the_layer():
    subject = TinySubject("llama")
    ids = tokens(40)
    found = measure_heads(subject, ids, CONFIG)
    expected = []
    subject.run(ids, lambda attention: expected.append(layer_swaps(attention, [9, 19, 29, 39]).s_pos.mean(1)))
    for layer, s_pos in zip(found.layers, expected, strict=True):
        # Each may leave out swaps that weigh up to 1e-7.
        torch.testing.assert_close(layer.heads["s_pos"], s_pos, rtol=0, atol=2e-6)


def test_layers_that_mix_keys_are_run_again_and_say_so():
    subject = TinySubject("zaya")
    ids = tokens(9)
    found = measure_heads(subject, ids, HeadsConfig(queries=1, blocks=(), taus=()))
    for layer in found.layers:
        assert layer.whole["rerun"] == 1
        assert bool(layer.heads["s_pos"].isfinite().all())
        assert "s_pos_logits" not in layer.heads
    left_out = measure_heads(subject, ids, HeadsConfig(queries=1, rerun=False))
    assert all("s_pos" not in layer.heads and "entropy" in layer.heads for layer in left_out.layers)


def test_documents_are_combined_by_head():
    subject = TinySubject("llama")
    documents = [measure_heads(subject, tokens(40, seed=seed), CONFIG) for seed in range(3)]
    together = combine_documents(documents, CONFIG)
    for index, layer in enumerate(together.layers):
        expected = torch.stack([document.layers[index].heads["s_pos"] for document in documents]).mean(0)
        torch.testing.assert_close(layer.heads["s_pos_together"], expected, rtol=1e-5, atol=1e-6)
        assert bool((layer.heads["s_pos_low_together"] <= layer.heads["s_pos_high_together"]).all())


def test_correlation_leaves_out_what_is_unknown():
    x, y = torch.rand(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    more = torch.cat([x, torch.tensor([torch.nan, 1.0])]), torch.cat([y, torch.tensor([1.0, torch.nan])])
    assert correlation(*more) == pytest.approx(expected, abs=1e-9)
    assert math.isnan(correlation(x, torch.ones(20)))
    assert math.isnan(correlation(x[:2], y[:2]))


def test_bad_options_and_bad_input(subtests):
    wrong = [{"tau": 0.0}, {"tau": -1.0}, {"block": 0}, {"gamma": 0.5}, {"queries": -1}, {"skip": -1}, {"taus": (0.0,)}]
    for options in wrong:
        with subtests.test(options=options), pytest.raises(ConfigError):
            HeadsConfig(**options)
    for tokens_given, options, words in (
        (12, {"positions": (1,)}, "position 1 of 12"),
        (12, {"positions": (0,)}, "position 0 of 12"),
        (12, {"block": 40}, "block=40"),
        (12, {"queries": 1, "block": 8}, "block=8 is too long"),
        (2, {}, "at least 3"),
    ):
        with subtests.test(options=options), pytest.raises(MeasureError, match=words):
            measure_heads(TinySubject("llama"), tokens(tokens_given), HeadsConfig(**options))
