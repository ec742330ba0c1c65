"""Brute force: texts and variants that run as rows of one batch give what each gives alone."""

from __future__ import annotations

import copy
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch

from helpers.capture import TinySubject, proved, run, shared, tokens
from wherewhat.errors import ConfigError
from wherewhat.lengths import METHODS, find_method
from wherewhat.measures.batches import chunks, equal_runs, read_at_once, rows_at_once
from wherewhat.measures.extend import ExtendConfig
from wherewhat.measures.extend import text as extend_text
from wherewhat.measures.extend.text import LengthProbes, attention_probe, axes_probe, measure_all_lengths
from wherewhat.measures.frequencies import FrequenciesConfig
from wherewhat.measures.frequencies.masking import FixedDimensions, without_planes
from wherewhat.measures.frequencies.text import measure_all_frequencies
from wherewhat.measures.measurement import Text
from wherewhat.measures.perturb import PerturbConfig
from wherewhat.measures.perturb.losses import measure_all_perturbed
from wherewhat.measures.residual import ResidualConfig, gaussian_noise, measure_all_residuals
from wherewhat.measures.tensors import text_losses, token_losses
from wherewhat.runs.subject import ModelSubject
from wherewhat.scores import Scores


def encode(text):
    """Digits, words and other characters as ids of a small vocabulary."""
    return [crc32(piece.encode()) % 90 for piece in re.findall(r"\d|[A-Za-z]+|\S|\s", text)]


FAMILIES = ["llama", "gemma2", "gpt_oss", "gemma3_text"]  # grouped keys, soft-cap, sinks, windows
FAST = [pytest.param(name, marks=[] if name in ("llama", "gpt_oss") else pytest.mark.slow) for name in FAMILIES]
# Products of other sizes sum in another order: float32 in four layers, of losses, logits and shares of order 1 to 10.
CLOSE = {"rel": 1e-4, "abs": 2e-5}


class Trained(TinySubject):
    """A tiny model that says it was trained on 16 tokens."""

    def trained_length(self):
        return 16


@contextmanager
def passes_of(rows):
    with pytest.MonkeyPatch.context() as patch:
        for module in ("extend.text", "frequencies.text", "perturb.losses", "batches"):
            patch.setattr(f"wherewhat.measures.{module}.rows_at_once", lambda *_, **__: rows)
        yield


@pytest.fixture(params=[5, 64])
def rows(request):
    """Number of rows of a pass: one that divides nothing, and all; with one row each text alone is measured."""
    with passes_of(request.param):
        yield request.param


_ALONE: dict[tuple[object, ...], list[Scores]] = {}


@pytest.fixture
def each_alone(request):
    """Scores of each text alone, one row after another: computed once for all numbers of rows."""

    def measured(measure, texts, *case):
        key = request.node.originalname, *case
        if key not in _ALONE:
            with passes_of(1):
                _ALONE[key] = [measure(texts[i : i + 1])[0] for i in range(len(texts))]
        return copy.deepcopy(_ALONE[key])

    return measured


def assert_same(actual, expected, **tolerance):
    close = tolerance or CLOSE
    assert actual.whole == pytest.approx(expected.whole, nan_ok=True, **close)
    assert [layer.layer for layer in actual.layers] == [layer.layer for layer in expected.layers]
    pairs = [(actual, expected), *zip(actual.layers, expected.layers, strict=True)]
    for mine, other in pairs:
        assert mine.heads.keys() == other.heads.keys()
        assert mine.curves.keys() == other.curves.keys()
        for name, values in other.heads.items():
            assert mine.heads[name].tolist() == pytest.approx(values.tolist(), nan_ok=True, **close), name
        for name, column in other.curves.items():
            given = mine.curves[name].values.flatten().tolist()
            assert given == pytest.approx(column.values.flatten().tolist(), nan_ok=True, **close), name
        assert mine.whole == pytest.approx(other.whole, nan_ok=True, **close)


@pytest.mark.parametrize("family", FAST)
def test_extend_of_texts_together(family, rows, each_alone):
    """Outliers are counts of outputs beyond a quantile, which rounding may move by one."""
    subject, ids = Trained(family), tokens(48, batch=2)
    config = ExtendConfig(depths=(0, 100), run=2)
    measure = partial(measure_all_lengths, subject, config=config)
    for scores, alone in zip(measure(ids), each_alone(measure, ids, family), strict=True):
        for layer, other in zip(scores.layers, alone.layers, strict=True):
            for name in [name for name in layer.heads if name.startswith("output_outliers")]:
                assert layer.heads.pop(name).tolist() == pytest.approx(other.heads.pop(name).tolist(), abs=1 / 8 + 1e-9)
        assert_same(scores, alone)


def test_retrieval_of_texts_together(rows, each_alone):
    subject, ids = TinySubject("llama"), tokens(420, batch=2)
    config = ExtendConfig(methods=("none", "lm-infinite"), trained=200, retrieval=True, depths=(0, 100), run=2)
    measure = partial(measure_all_lengths, subject, config=config, encode=encode)
    for scores, alone in zip(measure(ids), each_alone(measure, ids), strict=True):
        assert {"second_copy_none", "passkey_lm-infinite", "keys_chance"} <= scores.whole.keys()
        assert scores.whole == pytest.approx(alone.whole, **CLOSE)


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("name", METHODS)
def test_logits_of_queries_by_index_are_rows_of_all(family, name):
    layer = run(shared(family), tokens(48, batch=2))[-1]
    options = {"sinks": 2, "block": 4, "top": 2, "representatives": 2} if name == "infllm" else {}
    method = find_method(name)(**options).fitted(trained=16, length=48)
    whole = method.scores(layer, slice(0, 48))
    chosen = (3, 15, 16, 17, 30, 31, 46, 47)
    scores = method.scores(layer, chosen)
    assert torch.equal(scores.isfinite(), whole[:, :, chosen].isfinite())
    torch.testing.assert_close(scores, whole[:, :, chosen], rtol=1e-5, atol=1e-5)


def test_probes_of_texts_with_different_widths():
    """A key that one text hides changes the distances of its fit, and not those of the other text."""
    layer = run(shared("llama"), tokens(40, batch=2))[-1]
    hidden = torch.ones(2, 1, 40, 40, dtype=torch.bool)
    hidden[1] = torch.ones(40, 40, dtype=torch.bool).triu(-8)
    layer = replace(layer, mask=replace(layer.mask, visible_only=(hidden,)))
    method = find_method("none")()
    together = axes_probe(layer, method, slice(0, 40))
    parts = [axes_probe(layer.text(text), method, slice(0, 40)) for text in range(2)]
    for name, values in together.items():
        torch.testing.assert_close(values, torch.cat([part[name] for part in parts]), rtol=0, atol=1e-4)
    assert abs(float(parts[0]["axes_r"][0] - parts[1]["axes_r"][0])) > 1e-3


def test_probes_in_parts_are_the_same(monkeypatch):
    layer = run(shared("gpt_oss"), tokens(40, batch=3))[-1]
    method = find_method("lm-infinite")(window=12)
    whole = attention_probe(layer, method, slice(16, 40), limit=16)
    monkeypatch.setitem(extend_text._ENTRIES, "cpu", 1)
    parts = attention_probe(layer, method, slice(16, 40), limit=16)
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("family", FAST)
def test_frequencies_of_texts_together(family, rows, each_alone):
    subject, ids = Trained(family), tokens(31, batch=2)
    config = FrequenciesConfig(bands=2, queries=1, unrotate=True, heads=("0.1", "0.3", "1.0"))
    for options in (config, replace(config, heads=())):
        measure = partial(measure_all_frequencies, subject, config=options)
        for scores, alone in zip(measure(ids), each_alone(measure, ids, family, options), strict=True):
            assert_same(scores, alone)


def test_massive_dimensions_of_texts_together(rows, each_alone, monkeypatch):
    monkeypatch.setattr("wherewhat.measures.frequencies.text.LEAST_GAIN", -torch.inf)
    subject, ids = Trained("llama"), tokens(160, batch=2)
    monkeypatch.setattr("wherewhat.measures.frequencies.masking.MASSIVE", 1.2)  # so that there are some
    config = FrequenciesConfig(bands=2, queries=1, masking=False, massive=True)
    measure = partial(measure_all_frequencies, subject, config=config, encode=encode, prefix=1)
    for scores, alone in zip(measure(ids), each_alone(measure, ids), strict=True):
        lost = [name for name in scores.whole if "_lost_" in name]  # differences of gains of 0.01 over one of them
        assert {name: scores.whole.pop(name) for name in lost} == pytest.approx(
            {name: alone.whole.pop(name) for name in lost}, rel=0.02, abs=0.02
        )
        assert scores.whole == pytest.approx(alone.whole, **CLOSE)


@pytest.mark.parametrize("how", ["mask", "unrotate"])
def test_planes_of_each_text(how):
    layer = run(shared("llama"), tokens(20, batch=3))[0]
    keep = torch.rand(3, layer.rotation.planes, generator=torch.Generator().manual_seed(0)) < 0.5
    for heads in (None, torch.tensor([True, False, False, True])):
        together = without_planes(layer, keep, heads=heads, how=how)
        for text in range(3):
            alone = without_planes(layer.text(text), keep[text], heads=heads, how=how)
            for name in ("rot_q", "rot_k"):
                assert torch.equal(getattr(together, name)[text], getattr(alone, name)[0])


def test_dimensions_of_each_text():
    layer = run(shared("llama"), tokens(20, batch=2))[0]
    generator = torch.Generator().manual_seed(0)
    fixed = [FixedDimensions.massive(layer.text(text)) for text in range(2)]
    fixed = [replace(x, q=torch.rand(x.q.shape, generator=generator) < 0.3) for x in fixed]
    together = FixedDimensions.stacked(fixed).apply_from(layer, torch.tensor([0, 1]).view(-1, 1, 1, 1))
    for text, own in enumerate(fixed):
        alone = own.apply(layer.text(text), first=text)
        assert torch.equal(together.rot_q[text], alone.rot_q[0])
        assert torch.equal(together.rot_k[text], alone.rot_k[0])


@pytest.mark.parametrize("family", FAST)
def test_residual_of_texts_together(family, rows, each_alone):
    subject, ids = TinySubject(family), tokens(31, batch=2)
    config = ResidualConfig(strengths=(0.0, 0.3, 1.0), heads=family == "llama")
    measure = partial(measure_all_residuals, subject, config=config)
    for scores, alone in zip(measure(ids), each_alone(measure, ids, family), strict=True):
        assert_same(scores, alone)


@pytest.mark.parametrize("family", FAST)
def test_layers_alone_from_the_middle_and_from_the_start(family):
    subject, ids = TinySubject(family), tokens(31, batch=2)
    config = ResidualConfig(strengths=(1.0,), axes=False)
    middle = measure_all_residuals(subject, ids, config)

    def refuse(_):
        raise ConfigError("no variants")

    subject.variants = refuse
    for scores, other in zip(middle, measure_all_residuals(subject, ids, config), strict=True):
        assert_same(scores, other)


def test_noise_is_gaussian_and_without_patterns():
    """0.9 million numbers: standard errors of mean, variance and correlations are about 0.001."""
    layer = run(shared("llama"), tokens(480))[0]
    noise = gaussian_noise(layer, slice(0, 480))
    assert torch.equal(noise[:, 100:200], gaussian_noise(layer, slice(100, 200)))
    assert float(noise.mean()) == pytest.approx(0, abs=0.005)
    assert float(noise.var()) == pytest.approx(1, abs=0.008)
    levels = torch.special.ndtr(noise.double()).flatten().sort().values
    even = (torch.arange(len(levels)) + 0.5) / len(levels)
    assert float((levels - even).abs().max()) < 0.002  # Kolmogorov-Smirnov: 1.36 / √n is 0.0014
    other = gaussian_noise(replace(layer, layer=1), slice(0, 480))
    pairs = {
        "layers": (noise, other),
        "heads": (noise[1:], noise[:-1]),
        "queries": (noise[:, 1:], noise[:, :-1]),
        "keys": (noise[..., 1:], noise[..., :-1]),
        "diagonals": (noise[:, 1:, 1:], noise[:, :-1, :-1]),
    }
    for name, (x, y) in pairs.items():
        assert abs(float((x * y).mean())) < 0.006, name
    assert len(noise.flatten().unique()) > 0.9 * noise.numel()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_perturbations_of_texts_together(family, rows, each_alone):
    model, proof = proved(family)
    subject = ModelSubject(SimpleNamespace(model=model), proof)
    texts = [Text(ids[None], 1) for ids in tokens(23, batch=2)]
    config = PerturbConfig(rates=(0.0, 0.1, 0.5), seeds=2, layers=(0, 1), at=0.5)
    measure = partial(measure_all_perturbed, subject, config=config)
    for scores, alone in zip(measure(texts), each_alone(measure, texts, family), strict=True):
        # Correlations over heads of changes that may be rounding errors only.
        for whole in (scores.whole, alone.whole):
            for name in [name for name in whole if name.startswith(("predicted", "identity"))]:
                whole.pop(name)
        assert_same(scores, alone)


def test_positions_and_orders_of_each_text():
    model, proof = proved("llama")
    subject, ids = ModelSubject(SimpleNamespace(model=model), proof), tokens(20, batch=3)
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(20, generator=generator) for _ in range(3)])
    together = subject.run(ids, lambda _: None, logits=True, positions=positions)
    with subject.reordered({1: positions}):
        reordered = subject.run(ids, lambda _: None, logits=True)
    for text in range(3):
        alone = subject.run(ids[text : text + 1], lambda _: None, logits=True, positions=positions[text])
        torch.testing.assert_close(together[text], alone[0], rtol=0, atol=1e-5)
        with subject.reordered({1: positions[text]}):
            alone = subject.run(ids[text : text + 1], lambda _: None, logits=True)
        torch.testing.assert_close(reordered[text], alone[0], rtol=0, atol=1e-5)


def test_losses_of_texts_are_those_of_each():
    logits, ids = torch.randn(3, 9, 11, generator=torch.Generator().manual_seed(0)), torch.randint(11, (3, 10))
    for given in (ids, ids[:, :9]):
        together = text_losses(logits, given)
        for text in range(3):
            assert torch.equal(together[text], token_losses(logits[text, None], given[text, None]))


def test_rows_of_a_batch():
    assert chunks(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(equal_runs("aabc")) == [("a", slice(0, 2)), ("b", slice(2, 3)), ("c", slice(3, 4))]
    assert read_at_once([]) == []
    parts = read_at_once([torch.ones(2, 3), torch.tensor(4.0), torch.tensor([True, False])])
    assert [part.shape for part in parts] == [(2, 3), (), (2,)]
    assert [part.dtype for part in parts] == [torch.float64] * 3
    assert parts[2].tolist() == [1, 0]
    assert rows_at_once(torch.zeros(1, 128, 7)) == 4
    assert rows_at_once(torch.zeros(1, 1, 7), tokens=4096) == 1


def test_controls_of_each_text_are_kept():
    subject, ids = Trained("llama"), tokens(48, batch=2)
    config = ExtendConfig(methods=("none",), depths=(0, 100), run=2)
    probes = LengthProbes(subject, ids, config, [find_method("none")()])
    assert len(probes.controls) == 2
    assert probes.controls[0].whole["loss_pieces"] != probes.controls[1].whole["loss_pieces"]
