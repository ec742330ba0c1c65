"""Brute force, identity and end-to-end: what is measured beyond the trained length, and the words for it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from zlib import crc32

import pytest
import torch

from helpers.capture import TinySubject, run, shared, tokens
from wherewhat.caches.plan import Plan, fingerprint, plannable
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lengths.near_far import NearFar
from wherewhat.lengths.windows import LMInfinite, ReRoPE, SlidingWindow, Untouched
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.extend import ExtendConfig, retrieval
from wherewhat.measures.extend.extend_measurement import ExtendMeasurement
from wherewhat.measures.extend.retrieval import ask, plant, planted_gain, second_copy
from wherewhat.measures.extend.text import (
    Reference,
    ShiftSums,
    attention_probe,
    axes_probe,
    by_multiple,
    measure_lengths,
    rank_correlation,
    read_in_pieces,
    sample_queries,
)
from wherewhat.measures.measurement import all_metrics
from wherewhat.measures.statistics import Interval
from wherewhat.options import build_config, config_values
from wherewhat.rules.length_methods import compare_methods

SMALL = {"depths": (0, 100), "run": 2}
SLOW = pytest.mark.slow
# Losses of about 5 nats from logits in float32, and shares and logits of magnitude 1: errors of some 10 ε.
LOSS = {"abs": 1e-5}


DOUBLE = {"rtol": 0, "atol": 1e-7}


def shift(reference, output):
    sums = ShiftSums(reference)
    sums.add(output)
    return sums.result()


class Trained(TinySubject):
    """A tiny model that says it was trained on 16 tokens."""

    def trained_length(self):
        return 16


@pytest.fixture(scope="module")
def subject():
    return Trained("llama")


def plain_losses(subject, ids):
    with torch.no_grad():
        logits = subject.model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


def test_none_is_the_untouched_model(subject):
    ids = tokens(40)
    found = measure_lengths(subject, ids, ExtendConfig(methods=("none",), **SMALL))
    expected = plain_losses(subject, ids)
    assert found.whole["loss_beyond_none"] == pytest.approx(float(expected[16:].mean()), **LOSS)
    assert found.whole["loss_inside_none"] == pytest.approx(float(expected[8:16].mean()), **LOSS)
    assert found.whole["rise_inside_none"] == pytest.approx(0, **LOSS)
    curve = found.curves["loss_by_position_none"].values
    assert float(curve[0, 1]) == pytest.approx(float(expected[:4].mean()), **LOSS)
    rises = found.curves["rise_by_position_none"].values  # from the second half of the trained length on
    assert torch.equal(rises[:, 0], curve[curve[:, 0] > 8][:, 0])


@pytest.mark.parametrize("family", ["llama", *(pytest.param(x, marks=SLOW) for x in ("gemma3_text", "gpt_oss"))])
def test_every_method_is_measured(family):
    config = ExtendConfig(**SMALL)
    found = measure_lengths(Trained(family), tokens(64), config)
    beyond_the_text = ("rise_to_8x", "rise_to_16x", "rise_to_32x")
    for layer in found.layers:
        names = {*found.whole, *layer.heads}
        for metric in all_metrics(ExtendMeasurement(), config):
            assert metric.name in names or metric.name.startswith(beyond_the_text)
            assert metric.control is None or metric.control in names
    assert -1 <= found.whole["rank_shift_loss"] <= 1


def test_windows_change_nothing_inside(subject):
    config = ExtendConfig(methods=("none", "sliding-window", "lm-infinite"), **SMALL)
    found = measure_lengths(subject, tokens(40), config)
    for name in ("sliding-window", "lm-infinite"):
        assert found.whole[f"loss_inside_{name}"] == pytest.approx(found.whole["loss_inside_none"], **LOSS)
        assert abs(found.whole[f"loss_beyond_{name}"] - found.whole["loss_beyond_none"]) > 1e-3
    head = found.layers[0].heads
    assert float(head["far_mass_sliding-window"].max()) == 0
    assert bool(head["far_logit_sliding-window"].isnan().all())
    assert float(head["far_mass_none"].min()) > 0


def test_pieces_are_read_as_texts_of_their_own(subject):
    for n, trained in ((21, 15), (21, 16), (40, 16), (47, 15)):
        ids = tokens(n)
        found = read_in_pieces(subject, ids, trained)[0][0]
        half = trained // 2
        assert bool(found[:half].isnan().all())
        for place in range(half, n - 1):
            start = (place - half) // (trained - half) * (trained - half)
            assert half <= place - start < trained
            piece = torch.cat([ids[:, :1], ids[:, start + 1 : place + 2]], 1)
            assert float(found[place]) == pytest.approx(float(plain_losses(subject, piece)[-1]), **LOSS), (n, trained)


def test_rise_by_multiples_of_the_trained_length():
    found = by_multiple(torch.arange(40.0), 16)
    assert found == {1.25: 17.5, 1.5: 21.5, 2.0: 27.5, 4.0: 35.5}


def test_planting_by_hand():
    ids = torch.arange(30)[None]
    planting = plant(ids, (0, 50, 100), run=2)
    assert planting.body == 24
    first, middle, last = planting.places.tolist()
    assert (first, last) == (14, 20)
    expected = ids.clone()
    for place, start in ((first, 24), (middle, 26), (last, 28)):
        expected[0, place : place + 2] = ids[0, start : start + 2]
    assert torch.equal(planting.planted, expected)
    assert planting.distances.tolist() == [24 - first, 26 - middle, 28 - last]


def test_least_length_for_planted_runs():
    for depths, run_length in (((0, 25, 50, 75), 16), ((50,), 8), ((0, 3, 100), 7), ((0, 1), 10**6)):
        with pytest.raises(MeasureError, match="too few") as error:
            plant(torch.zeros(1, 10, dtype=torch.long), depths, run=run_length)
        least = int(re.search(r": (\d+) are needed", str(error.value))[1])
        assert retrieval._places(least, depths, run_length) is not None
        assert retrieval._places(least - 1, depths, run_length) is None


def test_found_is_the_gain_over_the_text_without_planting():
    planting = plant(torch.arange(30)[None], (0, 100), run=4)
    control, planted = torch.zeros(2, 1, 30, 32)
    for place in range(26, 30):  # the second run, foretold from the token before
        planted[0, place - 1, place] = 50.0
    found = planted_gain(planting, planted, control)
    assert found.gain.tolist() == pytest.approx([0, torch.tensor(32.0).log().item()], abs=1e-4)
    assert found.exact.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("family", "method"),
    [*product(["llama", "gpt_oss"], [Untouched(), LMInfinite(sinks=6, window=12), ReRoPE(window=9)])],
    ids=lambda x: getattr(x, "name", x),
)
def test_attention_of_every_query_by_loops(family, method):
    """With so few queries all of them are looked at."""
    layer = run(shared(family), tokens(36))[-1]
    found = attention_probe(layer, method, slice(20, 36), limit=16)
    scores = method.scores(layer, slice(20, 36))[0].double()
    sink = layer.sinks
    for head in range(layer.heads):
        entropy, rest, far, margin = [], [], [], []
        for row, i in enumerate(range(20, 36)):
            logits = scores[head, row]
            logits = logits if sink is None else torch.cat([logits, sink[head : head + 1].double()])
            p = logits.softmax(-1)
            entropy.append(float(-(p * p.clamp_min(1e-300).log()).sum()))
            rest.append(float(p[:4].sum()))
            beyond = [j for j in range(4, 36) if i - j >= 16]
            far.append(float(p[beyond].sum()))
            near = max(float(logits[j]) for j in range(36) if i - j < 16)
            margin += [float(logits[j]) - near for j in beyond]
        for name, values in (("entropy", entropy), ("sink_mass", rest), ("far_mass", far)):
            assert float(found[name][head]) == pytest.approx(sum(values) / 16, **LOSS), name
        if max(margin) == -torch.inf:
            assert bool(found["far_logit"][head].isnan())
        else:
            assert float(found["far_logit"][head]) == pytest.approx(max(margin), **LOSS)


def test_queries_are_spread_and_end_with_the_last():
    groups = list(sample_queries(slice(100, 1000)))
    assert len(groups) == 8
    assert all(group.stop - group.start == 16 for group in groups)
    assert groups[-1].stop == 1000
    assert [group.start for group in sample_queries(slice(5, 8))] == [5, 6, 7]


def test_axes_of_a_whole_text_are_those_of_the_layer():
    layer = run(shared("llama"), tokens(40))[-1]
    whole = fit_layer(layer)
    found = axes_probe(layer, Untouched(), slice(0, 40))
    torch.testing.assert_close(found["axes_r"], whole.r.cpu(), atol=1e-4, rtol=0)
    torch.testing.assert_close(found["axes_distance"], whole.unique["a"].cpu(), atol=1e-4, rtol=0)
    windowed = fit_layer(replace(layer, mask=replace(layer.mask, window=9)))
    found = axes_probe(layer, SlidingWindow(window=9), slice(0, 40))
    torch.testing.assert_close(found["axes_r"], windowed.r.cpu(), atol=1e-4, rtol=0)


def test_shift_in_units_of_the_spread():
    """Sums over thousands of float32 outputs, in float64."""
    x = torch.randn(500, 3, 8, generator=torch.Generator().manual_seed(0))
    same = shift(Reference.of(x), x)
    torch.testing.assert_close(same["output_shift"], torch.zeros(3).double(), **DOUBLE)
    torch.testing.assert_close(same["output_covariance"], torch.zeros(3).double(), **DOUBLE)
    torch.testing.assert_close(same["output_outliers"], torch.full((3,), 0.01).double(), atol=1e-3, rtol=0)
    x = torch.randn(4000, 1, 8, generator=torch.Generator().manual_seed(0))
    moved = shift(Reference.of(x), x + 2.0)
    assert float(moved["output_shift"]) == pytest.approx(2.0, rel=0.03)  # √(8 · 4) over √8
    wider = shift(Reference.of(x), 2 * x)
    assert float(wider["output_covariance"]) == pytest.approx(3.0, rel=1e-4)
    assert float(wider["output_outliers"]) > 0.3


def test_shift_part_by_part_is_that_of_all():
    x = torch.randn(300, 2, 8, generator=torch.Generator().manual_seed(0)) + 3
    reference = Reference.of(x[:100])
    sums = ShiftSums(reference)
    for part in x[100:].split(70):
        sums.add(part)
    whole = x[100:].double().transpose(0, 1)
    moved = (whole.mean(1) - reference.mean).norm(dim=-1) / reference.spread
    found = sums.result()
    torch.testing.assert_close(found["output_shift"], moved, **DOUBLE)
    covariance = torch.stack([torch.cov(head.T, correction=0) for head in whole])
    size = reference.covariance.norm(dim=(-1, -2))
    expected = (covariance - reference.covariance).norm(dim=(-1, -2)) / size
    torch.testing.assert_close(found["output_covariance"], expected, **DOUBLE)
    away = (whole - reference.mean[:, None]).norm(dim=-1)
    outliers = (away > reference.far[:, None]).double().mean(-1)
    torch.testing.assert_close(found["output_outliers"], outliers, **DOUBLE)


@pytest.mark.parametrize("n", [21, 47])
def test_control_of_outputs_is_the_same_tokens_in_pieces(subject, n):
    ids = tokens(n)
    found = measure_lengths(subject, ids, ExtendConfig(methods=("none",), **SMALL))
    inside, beyond = {}, {}
    subject.run(ids[:, :16], lambda attention: inside.update({attention.layer: attention.output[0, 8:]}))
    for start in range(8, n - 9, 8):
        piece = torch.cat([ids[:, :1], ids[:, start + 1 : min(n - 1, start + 16)]], 1)
        subject.run(piece, lambda x: beyond.setdefault(x.layer, []).append(x.output[0, 8:]))
    for layer in found.layers:
        expected = shift(Reference.of(inside[layer.layer]), torch.cat(beyond[layer.layer]))
        assert len(torch.cat(beyond[layer.layer])) == n - 1 - 16
        for name, values in expected.items():
            torch.testing.assert_close(layer.heads[f"{name}_pieces"], values, rtol=1e-4, atol=1e-5)


def test_outputs_are_read_beside_what_no_change_gives():
    """The words name a control that the run stores; of one Gaussian it is what the number itself is."""
    words = {metric.name: metric for metric in all_metrics(ExtendMeasurement(), ExtendConfig(methods=("none",)))}
    generator = torch.Generator().manual_seed(0)
    reference = Reference.of(torch.randn(128, 20, 48, generator=generator))
    beyond, control = (shift(reference, torch.randn(512, 20, 48, generator=generator)) for _ in range(2))
    for name, values in beyond.items():
        assert words[f"{name}_none"].control == f"{name}_pieces"
        assert f"{name}_pieces" in words
        assert float(values.mean()) == pytest.approx(float(control[name].mean()), rel=0.15)
    assert float(beyond["output_covariance"].mean()) > 0.5


def encode(text):
    """Digits, words and other characters as ids of a small vocabulary."""
    return [crc32(piece.encode()) % 90 for piece in re.findall(r"\d|[A-Za-z]+|\S|\s", text)]


def test_second_copy_by_hand():
    ids = torch.arange(40)[None]
    inside = second_copy(ids[:, :16], trained=16)
    assert inside.ids[0].tolist() == [*range(9), *range(1, 8)]
    assert (inside.tokens, inside.skipped, inside.distance) == (7, 3, 8)
    copy = second_copy(ids, trained=16, distance=16)  # the first half
    assert copy.ids[0].tolist() == [*range(21), *range(1, 20)]
    assert (copy.tokens, copy.skipped, copy.distance) == (19, 4, 20)
    shorter = second_copy(ids[:, :24], trained=16, distance=16)  # less than that, so that it is far enough away
    assert shorter.ids[0].tolist() == [*range(17), *range(1, 8)]
    assert shorter.distance == 16
    once, losses = torch.arange(39.0), torch.zeros(39)
    for place in range(1, 40):
        losses[place - 1] = once[int(copy.ids[0, place]) - 1] - (3 if place >= 21 + 4 else 0)
    assert copy.difference(losses, once) == pytest.approx(-3)


def test_facts_are_stated_far_from_their_questions():
    ids = tokens(800)
    asked = ask(ids, encode, trained=300)
    assert asked.ids.shape == ids.shape
    assert asked.distance >= 300
    changed = (asked.ids != ids)[0].nonzero()[:, 0]
    body = min(start for start, _ in asked.answers) - len(encode("\nThe pass key is"))
    assert bool((body - changed[changed < body] >= 300).all())
    text = asked.ids[0].tolist()
    for (start, stop), digits in zip(asked.answers, (5, 4, 4, 4, 4), strict=True):
        assert stop - start == digits + 1  # a space before them
        answer = text[start:stop]
        stated = [i for i in range(16, body) if text[i : i + len(answer)] == answer]
        assert len(stated) == 1
        assert text[stated[0] - 1] == text[start - 1] == encode("is")[0]
    without = ask(ids, encode, trained=300, stated=False)
    assert torch.equal(without.ids[:, body:], asked.ids[:, body:])
    assert torch.equal(without.ids[:, :body], ids[:, :body])
    within = ask(ids[:, :300], encode, trained=300)  # the same questions
    assert torch.equal(within.ids[:, body - 800 :], asked.ids[:, body:])
    with pytest.raises(MeasureError, match="100 tokens are too few for 5 statements"):
        ask(ids[:, :100], encode, trained=100)


def test_scores_of_answers():
    asked = ask(tokens(800), encode, trained=300)
    logits = torch.zeros(1, 800, 100)
    expected = {"passkey": -torch.tensor(100.0).log().item(), "keys": -torch.tensor(100.0).log().item()}
    assert asked.scores(logits) == pytest.approx(expected | {"answered": 0})
    for start, stop in asked.answers[:2]:
        for place in range(start, stop):
            logits[0, place - 1, asked.ids[0, place]] = 50.0
    found = asked.scores(logits)
    assert found == pytest.approx({"passkey": 0, "keys": 0.75 * expected["keys"], "answered": 0.4}, abs=1e-6)


def test_retrieval_of_the_untouched_model_is_its_own():
    subject = TinySubject("llama")
    ids, config = tokens(450), ExtendConfig(methods=("none", "near-far"), trained=200, retrieval=True, **SMALL)
    found = measure_lengths(subject, ids, config, encode=encode).whole
    plain = measure_lengths(subject, ids, replace(config, retrieval=False), encode=encode).whole
    assert plain.items() <= found.items()
    assert not any("copy" in name or "key" in name for name in plain)
    copy, asked = second_copy(ids, trained=200, distance=225), ask(ids, encode, trained=200)
    once = torch.cat([plain_losses(subject, ids[:, :200])[:100], read_in_pieces(subject, ids, 200)[0][0, 100:]])
    again = plain_losses(subject, copy.ids)
    assert found["second_copy_none"] == pytest.approx(copy.difference(again, once), **LOSS)
    assert found["second_copy_distance"] == copy.distance
    with torch.no_grad():
        scores = asked.scores(subject.model(input_ids=asked.ids).logits)
    assert {name: found[f"{name}_none"] for name in scores} == pytest.approx(scores, **LOSS)
    names = {metric.name for metric in all_metrics(ExtendMeasurement(), config)}
    assert {name for name in found if "copy" in name or "key" in name or "answer" in name} <= names
    comparison = compare_methods({name: about(value) for name, value in found.items()}, config.methods)
    assert comparison.rows[1].metrics["codes"] == "keys_near-far"
    ids_only = measure_lengths(subject, ids, config).whole
    assert "second_copy_near-far" in ids_only
    assert "passkey_none" not in ids_only
    notes = compare_methods({name: about(value) for name, value in ids_only.items()}, config.methods).notes
    assert any("they need texts and a tokenizer" in note for note in notes)


def test_plan_of_near_far(subject, tmp_path):
    layers = plannable(subject.proof)
    plan = Plan("tiny", fingerprint(subject.model), 8, 2, layers, {0: (0,)}, "head")
    path = str(plan.save(tmp_path / "plan.json"))
    config = ExtendConfig(methods=("near-far",), plan=path, top=3, distance=5, **SMALL)
    assert ExtendConfig(methods=("near-far",), plan=config.plan, top=3, distance=5, **SMALL) == config
    method = config.method("near-far", trained=16, length=40, plan=config.loaded_plan())
    assert isinstance(method, NearFar)
    assert (method.top, method.distance) == (3, 5)
    assert replace(config, methods=("yarn",)).method("yarn", trained=16, length=40).name == "yarn"
    assert method.plan is not None
    assert method.plan.full_heads(0) == plan.full_heads(0)
    found = measure_lengths(subject, tokens(40), config).whole
    for other in ({"plan": None}, {"distance": None}):
        assert found != measure_lengths(subject, tokens(40), replace(config, **other)).whole
    Plan("tiny", "other", 8, 2, layers, {0: (0,)}, "head").save(path)
    with pytest.raises(ConfigError, match="is no longer the file it was"):
        config.loaded_plan()
    with pytest.raises(MeasureError, match="has other weights"):
        measure_lengths(subject, tokens(40), replace(config, plan=path))
    with pytest.raises(ConfigError, match=r"the plan .* cannot be read"):
        ExtendConfig(plan="no such file")


def test_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0])
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)


def about(value):
    return Interval(value, value - 0.01, value + 0.01, 4)


def test_comparison_names_what_the_run_holds(subject):
    config = ExtendConfig(methods=("none", "lm-infinite", "yarn"), **SMALL)
    found = measure_lengths(subject, tokens(64), config)
    numbers = {name: about(value) for name, value in found.whole.items()}
    for layer in found.layers:
        numbers |= {name: about(float(values.nanmean())) for name, values in layer.heads.items()}
    comparison = compare_methods(numbers, config.methods)
    assert [row.name for row in comparison.rows] == ["none", "lm-infinite", "yarn"]
    for row in comparison.rows:
        assert row.verdict
        assert set(row.metrics.values()) <= numbers.keys()
    assert any("rank correlation" in note for note in comparison.notes)


def test_options_that_make_no_sense(subtests):
    wrong = [
        {"methods": ("yarm",)},
        {"methods": ()},
        {"methods": ("none", "none")},
        {"trained": 1},
        {"window": 0},
        {"depths": ()},
        {"depths": (0, 101)},
        {"depths": (5, 5)},
        {"run": 1},
        {"top": 0},
        {"distance": 0},
    ]
    for options in wrong:
        with subtests.test(**options), pytest.raises(ConfigError):
            ExtendConfig(**options)


def test_runs_without_later_options_keep_their_identity():
    assert [*config_values(ExtendConfig())] == ["methods", "trained", "window", "depths", "run"]
    stored = config_values(ExtendConfig(retrieval=True, top=8))
    assert (stored["retrieval"], stored["top"]) == (True, 8)
    assert build_config(ExtendConfig, stored) == ExtendConfig(retrieval=True, top=8)


def test_texts_that_are_too_short(subject):
    with pytest.raises(MeasureError, match="not beyond the 16"):
        measure_lengths(subject, tokens(16), ExtendConfig())
    with pytest.raises(MeasureError, match="window=64 sees all of a text of 40 tokens"):
        measure_lengths(subject, tokens(40), ExtendConfig(methods=("lm-infinite",), window=64, **SMALL))
    with pytest.raises(MeasureError, match="16 tokens are too few for 5 planted sequences of 16"):
        measure_lengths(subject, tokens(40), ExtendConfig())


def test_a_model_without_rotation_is_refused_or_left_alone():
    subject = Trained("gpt2")
    found = measure_lengths(subject, tokens(40), ExtendConfig(methods=("none", "sliding-window"), **SMALL))
    assert abs(found.whole["loss_beyond_sliding-window"] - found.whole["loss_beyond_none"]) > 1e-3
    with pytest.raises(MeasureError, match="no layer of this model rotates"):
        measure_lengths(subject, tokens(40), ExtendConfig(methods=("none", "yarn"), **SMALL))
