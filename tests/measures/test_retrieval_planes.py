"""Brute force: planes of retrieval heads changed by patching the model's own rotation; attention to copies by loops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama import modeling_llama

from helpers.capture import TinySubject, shared, tokens
from helpers.capture import run as captured
from helpers.models import sharp_llama
from wherewhat.errors import MeasureError
from wherewhat.measures.extend.retrieval import copy_attention, plant
from wherewhat.measures.frequencies import FrequenciesConfig, frequencies_measurement, retrieval
from wherewhat.measures.frequencies.frequencies_measurement import FrequenciesMeasurement
from wherewhat.measures.frequencies.masking import frequency_bands, without_planes
from wherewhat.measures.frequencies.retrieval import other_heads, random_planes, retrieval_heads
from wherewhat.measures.frequencies.text import measure_all_frequencies, measure_frequencies
from wherewhat.measures.measurement import all_metrics
from wherewhat.runs.subject import ModelSubject

DEPTHS, RUN, N, VOCABULARY = (0, 25, 50, 75), 16, 160, 64
CONFIG = FrequenciesConfig(queries=1, masking=False, retrieval=True)


def random_ids(seed, texts=1):
    return torch.randint(VOCABULARY, (texts, N), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom"])
def test_attention_to_copies_by_loops(name):
    planting = plant(tokens(N), DEPTHS, run=RUN)
    for attention in captured(shared(name), planting.planted):
        weights = attention.pattern(slice(0, N))[0].double()
        expected = torch.zeros(attention.heads, len(DEPTHS), RUN - RUN // 4, dtype=torch.float64)
        for index, place in enumerate(planting.places.tolist()):
            start = planting.body + index * RUN
            for token, offset in enumerate(range(RUN // 4, RUN)):  # those that are scored
                assert planting.planted[0, place + offset] == planting.planted[0, start + offset]
                expected[:, index, token] = weights[:, start + offset - 1, place + offset]
        torch.testing.assert_close(copy_attention(planting, attention)[0], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("how", ["mask", "unrotate"])
@pytest.mark.parametrize("name", ["llama", "gptj", "deepseek_v3"])
def test_planes_of_single_heads_are_changed_as_one_head_after_another(name, how):
    attention = captured(shared(name), tokens(19))[0]
    planes, heads = attention.rotation.planes, attention.heads
    keep = torch.rand(1, heads, planes, generator=torch.Generator().manual_seed(0)) > 0.5
    found = without_planes(attention, keep, how=how).pattern(slice(0, 19))
    for head in range(heads):
        alone = without_planes(attention, keep[0, head], heads=torch.arange(heads) == head, how=how)
        torch.testing.assert_close(found[:, head], alone.pattern(slice(0, 19))[:, head], rtol=1e-5, atol=1e-7)
    with pytest.raises(MeasureError, match="one entry for each of"):
        without_planes(attention, keep[:, :-1], how=how)


def test_choice_of_heads_and_planes():
    attention = {3: torch.tensor([0.1, 0.9, 0.2, 0.8]), 5: torch.tensor([0.7, 0.0, 0.0, 0.0])}
    chosen = retrieval_heads(attention, 0.25)
    assert {layer: x.tolist() for layer, x in chosen.items()} == {3: [False, True, False, True], 5: [False] * 4}
    assert sum(int(x.sum()) for x in retrieval_heads(attention, 0.01).values()) == 1
    for seed in range(5):
        others = other_heads(chosen, torch.Generator().manual_seed(seed))
        assert {layer: x.tolist() for layer, x in others.items()} == {3: [True, False, True, False], 5: [False] * 4}
    crowded = {0: torch.tensor([True, True, False]), 1: torch.zeros(3, dtype=torch.bool)}
    others = other_heads(crowded, torch.Generator().manual_seed(0))
    assert others[0].tolist() == [False, False, True]
    assert int(others[1].sum()) == 1
    everything = other_heads({0: torch.ones(2, dtype=torch.bool)}, torch.Generator().manual_seed(0))
    assert not everything[0].any()
    slow = torch.arange(8) >= 6
    drawn = random_planes(slow, 100, torch.Generator().manual_seed(0))
    assert drawn.sum(-1).tolist() == [2] * 100
    assert not (drawn & slow).any()
    assert drawn.any(0).tolist() == [True] * 6 + [False] * 2
    most = torch.arange(8) >= 2
    assert random_planes(most, 10, torch.Generator().manual_seed(0)).sum(-1).tolist() == [6] * 10


def test_lost_shares_are_those_of_a_patched_model(monkeypatch):
    """Parity: queries and keys of a Llama are changed head by head inside its own rotation."""
    model, ids = sharp_llama(VOCABULARY), random_ids(1)
    monkeypatch.setattr(retrieval, "LEAST_GAIN", -math.inf)  # an untrained model has no gains
    found = measure_frequencies(ModelSubject(SimpleNamespace(model=model)), ids, CONFIG)
    planting = plant(ids, DEPTHS, run=RUN)
    layers = captured(model, planting.planted)
    read = {x.layer: copy_attention(planting, x)[0].mean((-1, -2)) for x in layers}
    for layer in found.layers:
        assert layer.heads["copy_attention"].tolist() == pytest.approx(read[layer.layer].tolist(), rel=1e-5)
    chosen = retrieval_heads(read)
    assert sum(int(x.sum()) for x in chosen.values()) == 1
    generator = torch.Generator().manual_seed(0)
    others = other_heads(chosen, generator)
    slow = frequency_bands(layers[0].rotation.inv_freq, 4)[-1]
    drawn = {layer: random_planes(slow, 4, generator) for layer in chosen}
    changes = {
        "": {layer: x[:, None] & slow for layer, x in chosen.items()},
        "_random": {layer: x[:, None] & drawn[layer] for layer, x in chosen.items()},
        "_others": {layer: x[:, None] & slow for layer, x in others.items()},
    }
    everything = {layer: x[:, None] & torch.ones_like(slow) for layer, x in chosen.items()}
    rotate = modeling_llama.apply_rotary_pos_emb
    half = 8

    def logits(tokens, planes, how):
        waiting = [planes[layer] for layer in sorted(planes)]

        def patched(q, k, *args, **options):
            own = waiting.pop(0).repeat(1, 2)[None, :, None]  # both halves of each plane
            turned_q, turned_k = rotate(q, k, *args, **options)
            if how == "mask":
                return turned_q.masked_fill(own, 0), turned_k
            repeated, still = (x.repeat_interleave(2, 1) for x in (turned_k, k))
            return torch.where(own, q, turned_q), torch.where(own, still, repeated)

        def every_head_its_own_key(module, query, key, value, *args, **options):
            if key.shape[1] == query.shape[1]:
                value, module = value.repeat_interleave(2, 1), SimpleNamespace(num_key_value_groups=1, training=False)
            return eager(module, query, key, value, *args, **options)

        eager = modeling_llama.eager_attention_forward
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", patched)
            patch.setattr(modeling_llama, "eager_attention_forward", every_head_its_own_key)
            patch.setattr(model.config, "_attn_implementation", "eager")
            return model(input_ids=tokens, use_cache=False).logits

    def gain(planes, how="mask"):
        control, planted = (logits(x, planes, how)[0].log_softmax(-1) for x in (planting.control, planting.planted))
        counted = [i for i in range(96, N) if (i - 96) % RUN >= RUN // 4]
        return sum(float(planted[i - 1, ids[0, i]] - control[i - 1, ids[0, i]]) for i in counted) / len(counted)

    assert slow.shape == (half,)
    before = gain({layer: torch.zeros(4, half, dtype=torch.bool) for layer in chosen})
    assert found.whole["planted"] == pytest.approx(before, rel=1e-4)
    for ending, planes in changes.items():
        for how, name in (("mask", "masked"), ("unrotate", "unrotated")):
            expected = 1 - gain(planes, how) / before
            assert found.whole[f"planted_lost_{name}{ending}"] == pytest.approx(expected, rel=1e-2, abs=1e-3)
    expected = 1 - gain(everything) / before
    assert found.whole["planted_lost_all_masked"] == pytest.approx(expected, rel=1e-2, abs=1e-3)
    assert abs(expected) > 1e-3


def test_texts_at_once_give_the_same_and_metrics_are_declared(monkeypatch):
    monkeypatch.setattr(retrieval, "LEAST_GAIN", -math.inf)
    model = sharp_llama(VOCABULARY)
    subject = ModelSubject(SimpleNamespace(model=model))
    both = random_ids(2, texts=2)
    together = measure_all_frequencies(subject, both, CONFIG)
    for text, scores in enumerate(together):
        alone = measure_frequencies(subject, both[text : text + 1], CONFIG)
        assert scores.whole == pytest.approx(alone.whole, rel=1e-3, abs=1e-4, nan_ok=True)
        metrics = all_metrics(FrequenciesMeasurement(), CONFIG)
        names = {name for metric in metrics for name in (metric.name, metric.control)}
        stored = set(scores.whole).union(*(set(layer.heads) | set(layer.whole) for layer in scores.layers))
        assert stored <= names
        assert {metric.name for metric in frequencies_measurement._RETRIEVAL} <= stored


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "gpt_oss"])
def test_measured_on_other_families(name):
    found = measure_frequencies(
        TinySubject(name), tokens(N), FrequenciesConfig(queries=1, masking=False, bands=2, retrieval=True)
    )
    assert all("copy_attention" in layer.heads for layer in found.layers)
    assert math.isfinite(found.whole["planted"])


def test_controls_that_change_the_same_or_nothing_are_undefined(monkeypatch):
    monkeypatch.setattr(retrieval, "LEAST_GAIN", -math.inf)
    monkeypatch.setattr(retrieval, "retrieval_heads", lambda read: {x: torch.ones_like(y) > 0 for x, y in read.items()})
    options = {"queries": 1, "masking": False, "retrieval": True}
    found = measure_frequencies(
        ModelSubject(SimpleNamespace(model=sharp_llama(VOCABULARY))), random_ids(3), FrequenciesConfig(**options)
    )
    assert "planted_lost_masked_random" in found.whole
    assert not {"planted_lost_masked_others", "planted_lost_unrotated_others"} & set(found.whole)
    whole = FrequenciesConfig(**options, bands=1)
    found = measure_frequencies(ModelSubject(SimpleNamespace(model=sharp_llama(VOCABULARY))), random_ids(3), whole)
    assert "planted_lost_masked" in found.whole
    assert not {"planted_lost_masked_random", "planted_lost_unrotated_random"} & set(found.whole)
