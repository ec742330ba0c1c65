"""End-to-end on tiny models, and brute force for what is put together over heads and documents."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import wherewhat
from helpers.capture import TinySubject, shared, tokens
from helpers.heads import LABELS_OF, ConstructedSubject
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.heads import HeadsConfig
from wherewhat.measures.heads.heads_measurement import HeadsMeasurement
from wherewhat.measures.heads.scores import combine_documents
from wherewhat.measures.measurement import Text, measure_pass, measure_text
from wherewhat.measures.swaps import LABELS, SCORE_LABELS
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.tensors import correlation

CONFIG = HeadsConfig(queries=4, blocks=(2,), taus=(1e-2,))


def measure_heads(subject, ids, config):
    return measure_text(HeadsMeasurement(), subject, Text(ids), config)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3_text", "gpt_oss"])
def test_every_statistic_stands_beside_the_scores(family):
    subject = TinySubject(family)
    found = measure_heads(subject, tokens(40), CONFIG)
    rotated = family in ("llama", "gemma3_text", "gpt_oss")
    for layer in found.layers:
        assert {"s_pos", "s_sym", "s_pos_low", "label", "induction", "slash_max", "entropy", "r"} <= layer.heads.keys()
        assert ("mean_frequency" in layer.heads) == rotated
        assert ("learned_sink_mass" in layer.heads) == (family == "gpt_oss")
        assert bool((layer.heads["exclusion"] >= 1 - 1e-9).all())
        low, value, high = (layer.heads[f"s_pos{end}"] for end in ("_low", "", "_high"))
        assert bool(((low <= value + 1e-9) & (value <= high + 1e-9)).all())
        assert sum(layer.whole[f"heads_{name}"] for name in SCORE_LABELS) == pytest.approx(1)
        without = sum(layer.whole[f"heads_{name}_no_sink"] for name in SCORE_LABELS)
        assert layer.whole["heads_sink"] + without == pytest.approx(1)
        assert layer.curves["s_pos_by_tau"].values.shape == (layer.heads["s_pos"].shape[0], 2)
    assert ("corr_pos_frequency" in found.whole) == rotated
    # Without rotation or bias, attention follows the tokens exactly: all symbolic scores are 1.
    assert ("corr_pos_sym" in found.whole) == (family != "gpt2")


def test_scores_are_those_of_the_layer():
    subject = TinySubject("llama")
    ids = tokens(40)
    found = measure_heads(subject, ids, CONFIG)
    expected = []
    subject.run(ids, lambda attention: expected.append(layer_swaps(attention, [9, 19, 29, 39]).s_pos.mean(1)))
    for layer, s_pos in zip(found.layers, expected, strict=True):
        # Each may leave out swaps that weigh up to 1e-7.
        torch.testing.assert_close(layer.heads["s_pos"], s_pos, rtol=0, atol=2e-6)


def test_constructed_heads_are_counted_in_both_versions():
    """A sink is a class of its own; with all keys, as in the papers, it counts as symbolic."""
    config = HeadsConfig(queries=8, taus=(), blocks=())
    documents = [measure_heads(ConstructedSubject(), torch.arange(seed, seed + 96)[None], config) for seed in range(3)]
    found = [layer for document in documents for layer in document.layers]
    (together,) = combine_documents(documents, config).layers
    for heads, ending in [*((layer.heads, "") for layer in found), (together.heads, "_together")]:
        both = (heads[f"{name}{ending}"].long().tolist() for name in ("label", "label_no_sink"))
        names = [(LABELS[one], LABELS[other]) for one, other in zip(*both, strict=True)]
        assert dict(zip(LABELS_OF, names, strict=True)) == LABELS_OF
    shares = {name: round(len(LABELS_OF) * value) for name, value in found[0].whole.items() if name.startswith("heads")}
    expected = {"positional": 1, "symbolic": 4, "uniform": 1, "mixed": 1}
    assert {name: shares[f"heads_{name}"] for name in SCORE_LABELS} == expected
    expected = {"positional": 2, "symbolic": 1, "uniform": 1, "mixed": 1}
    assert {name: shares[f"heads_{name}_no_sink"] for name in SCORE_LABELS} == expected
    assert shares["heads_sink"] == 2


def test_sink_of_one_document_is_no_sink_of_all():
    """The interval over documents must be above uniform attention."""
    config = HeadsConfig(queries=4, taus=(), blocks=())
    documents = [measure_heads(ConstructedSubject(), torch.arange(seed, seed + 96)[None], config) for seed in range(3)]
    names = list(LABELS_OF)
    for document in documents[1:]:
        document.layers[0].heads["sink_mass"][names.index("sink")] = document.layers[0].whole["sink_mass_uniform"]
    codes = combine_documents(documents, config).layers[0].heads["label_no_sink_together"]
    assert LABELS[int(codes[names.index("sink")])] == "uniform"  # a third of its attention, but of one document
    assert LABELS[int(codes[names.index("sink, else previous")])] == "sink"


def test_queries_without_two_keys_after_the_sink_count_for_all_keys_alone():
    found = measure_heads(TinySubject("llama"), tokens(4), HeadsConfig(positions=(2,), taus=(), blocks=()))
    for layer in found.layers:
        assert bool(layer.heads["s_pos"].isfinite().all())
        assert bool(layer.heads["s_pos_no_sink"].isnan().all())
        assert set(layer.heads["label_no_sink"].tolist()) <= {-1.0, float(LABELS.index("sink"))}


def test_keys_that_are_never_swapped_are_left_out_of_both_versions():
    options = {"queries": 4, "blocks": (), "taus": ()}
    skipped, plain = (
        measure_heads(TinySubject("llama"), tokens(40), HeadsConfig(skip=skip, **options)) for skip in (1, 0)
    )
    for one, other in zip(skipped.layers, plain.layers, strict=True):
        for name in ("s_pos", "s_sym"):
            torch.testing.assert_close(one.heads[name], other.heads[f"{name}_no_sink"])
            torch.testing.assert_close(one.heads[f"{name}_no_sink"], other.heads[f"{name}_no_sink"])


def test_layers_that_mix_keys_are_run_again_and_say_so():
    subject = TinySubject("zaya")
    ids = tokens(9)
    found = measure_heads(subject, ids, HeadsConfig(queries=1, blocks=(), taus=()))
    for layer in found.layers:
        assert layer.whole["rerun"] == 1
        assert bool(layer.heads["s_pos"].isfinite().all())
        assert bool(layer.heads["s_pos_no_sink"].isfinite().all())
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


@pytest.mark.parametrize(("values", "words"), [(math.inf, "keys of layer 0 are not finite"), (1e30, "logits overflow")])
def test_numbers_that_are_not_finite_are_refused(values, words):
    class Overflowing(ConstructedSubject):
        def run(self, ids, reducer, *, logits=False):
            super().run(ids, lambda layer: reducer(replace(layer, rot_q=values * layer.rot_q, rot_k=1e9 * layer.rot_k)))

    with pytest.raises(MeasureError, match=words):
        measure_heads(Overflowing(), tokens(40), CONFIG)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3_text", "gpt_oss", "gemma2"])
def test_texts_in_one_pass_have_the_scores_of_each_alone(family):
    """Brute force: three texts as one batch, and one at a time, in float32 with differences of weights divided by τ."""
    subject, texts = TinySubject(family), [Text(tokens(40, seed=seed)) for seed in range(3)]
    measurement = HeadsMeasurement()
    (together,) = measure_pass(subject, texts, [(measurement, CONFIG)])
    for text, found in zip(texts, together, strict=True):
        alone = measure_text(measurement, subject, text, CONFIG)
        assert found.whole == pytest.approx(alone.whole, abs=1e-3)
        for ours, theirs in zip(found.layers, alone.layers, strict=True):
            assert ours.heads.keys() == theirs.heads.keys()
            for name, values in theirs.heads.items():
                torch.testing.assert_close(ours.heads[name], values, rtol=0, atol=2e-4, equal_nan=True)
            assert ours.whole == pytest.approx(theirs.whole, abs=1e-9)
            for name, column in theirs.curves.items():
                assert ours.curves[name].axes == column.axes
                torch.testing.assert_close(ours.curves[name].values, column.values, rtol=0, atol=2e-4, equal_nan=True)


def test_correlation_leaves_out_what_is_unknown():
    x, y = torch.rand(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    more = torch.cat([x, torch.tensor([torch.nan, 1.0])]), torch.cat([y, torch.tensor([1.0, torch.nan])])
    assert correlation(*more) == pytest.approx(expected, abs=1e-9)
    assert math.isnan(correlation(x, torch.ones(20)))
    assert math.isnan(correlation(x[:2], y[:2]))
    assert math.isnan(correlation(x, 1 + 1e-7 * y))  # scores that a float32 model rounds differently
    assert correlation(x, 1 + 1e-5 * y) == pytest.approx(expected, abs=1e-9)


def test_bad_options_and_bad_input(subtests):
    wrong = [{"tau": 0.0}, {"tau": -1.0}, {"block": 0}, {"gamma": 0.5}, {"queries": -1}, {"skip": -1}, {"taus": (0.0,)}]
    wrong.append({"sink_threshold": 0.0})
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


def test_the_weight_of_a_sink_column_is_a_metric_of_both_measurements():
    for measurement in ("heads", "attention"):
        options = {"queries": 2} if measurement == "heads" else {}
        result = wherewhat.measure(measurement, shared("gpt_oss"), tokens(40), **options)
        values = result.heads()["learned_sink_mass"]
        assert bool(values.between(0, 1).all())
