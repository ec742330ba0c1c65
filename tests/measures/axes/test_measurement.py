"""Brute force: the decomposition of captured layers of every encoding against their own dense logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.capture import proved, tiny, tokens
from helpers.tolerance import rounding
from measures.axes.dense import dense_fits
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import capture, prove
from wherewhat.errors import MeasureError
from wherewhat.measures.axes import AxesConfig
from wherewhat.measures.axes.axes_measurement import AxesMeasurement
from wherewhat.measures.axes.fit import band_width, bias_options, fit_layer, gaussian_like
from wherewhat.measures.measurement import Text, measure_text

ENCODINGS = {
    "RoPE": "llama",
    "RoPE interleaved": "gptj",
    "RoPE partial": "gpt_neox:partial",
    "RoPE scaled": "llama:yarn",
    "RoPE and NoPE, window": "cohere2",
    "soft-cap": "gemma2",
    "sinks": "gpt_oss",
    "MLA": "deepseek_v3",
    "ALiBi by key": "bloom",
    "ALiBi by distance": "mpt",
    "ALiBi in the mask": "falcon:alibi",
    "learned": "gpt2",
    "relative bias": "inkling_text",
}


class Captured:
    """What the measurement needs of a subject, on a tiny model."""

    def __init__(self, model):
        self.model, self.proof = model, prove(model)

    def run(self, ids, reducer, *, logits=False):
        with torch.no_grad(), capture(self.model, reducer, proof=self.proof):
            return self.model(ids).logits


def layers(name, check) -> None:
    model, proof = proved(name)
    seen = []

    def reducer(attention: LayerAttention) -> None:
        seen.append(attention.layer)
        check(attention)

    with torch.no_grad(), capture(model, reducer, proof=proof):
        model(tokens(41))
    assert seen


@pytest.mark.parametrize("name", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_fit_equals_the_dense_one(name):
    def check(attention):
        fit = fit_layer(attention)
        scores = attention.attn_scores()[0].double()
        visible = attention.visible()[0, 0].expand(attention.n, attention.m)
        for subset in ("abc", "ac", "b"):
            r, _ = dense_fits(scores, visible, subset)
            torch.testing.assert_close(fit.r_subset[subset], r, rtol=0, atol=1e-4, msg=subset)

    layers(name, check)


def test_biases_are_read_in_the_cheapest_form():
    for name, forms in {"bloom": ["key_bias"], "mpt": ["key_bias"], "llama": []}.items():
        seen = []
        layers(name, lambda attention, seen=seen: seen.append(list(bias_options(attention))))
        assert seen == [forms] * len(seen), name


def test_windows_are_read_off_the_mask():
    widths = set()
    layers("gemma3_text", lambda attention: widths.add(band_width(attention)))
    assert widths == {None, 8}


def test_a_mask_that_is_no_band_is_refused():
    refused = []

    def check(attention):
        if bool((~attention.visible(slice(40, 41)))[..., :30].any()):
            with pytest.raises(MeasureError, match="not a causal band"):
                fit_layer(attention)
            refused.append(attention.layer)

    layers("llama4_text", check)
    assert refused


def test_gaussian_control_has_the_norms_of_the_original():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, 8, generator=generator) * torch.rand(2, 30, 1, generator=generator)
    noise = gaussian_like(x, seed=1)
    # Two norms of 8 terms, and a division and a product in between.
    torch.testing.assert_close(noise.norm(dim=-1), x.norm(dim=-1), rtol=rounding(32), atol=0)
    assert torch.equal(noise, gaussian_like(x, seed=1))


@pytest.mark.parametrize("name", ["bloom", "gemma3_text:window", "gemma2"])
def test_gaussian_control_sees_the_mask_and_biases_of_the_layer(name):
    model = tiny(name)
    expected = []

    def keep(attention):
        q, k = (
            gaussian_like(attention.rot_q, seed=attention.layer),
            gaussian_like(attention.rot_k, seed=attention.layer + 10**6),
        )
        noise = dataclasses.replace(attention, rot_q=q, rot_k=k)
        visible = noise.visible()[0, 0].expand(noise.n, noise.m)
        expected.append(dense_fits(noise.attn_scores()[0], visible, "abc")[0].mean())

    layers(name, keep)
    found = measure_text(AxesMeasurement(), Captured(model), Text(tokens(41)), AxesConfig())
    for layer, r in zip(found.layers, expected, strict=True):
        assert layer.whole["r_gaussian"] == pytest.approx(float(r), abs=1e-4)
        assert layer.whole["r_behaviour_gaussian"] <= layer.whole["r_gaussian"] + 1e-6


def test_pooled_r_is_that_of_all_logits_at_once():
    model = tiny("llama")
    ids = tokens(41)
    residual, values = [], []

    def keep(attention):
        fit = fit_layer(attention)
        i, j = torch.ones(41, 41).tril().nonzero(as_tuple=True)
        logits = attention.attn_scores()[0][:, i, j].double()
        residual.append(logits - fit.a[:, i - j] - fit.b[:, i] - fit.c[:, j])
        values.append(logits)

    subject = Captured(model)
    subject.run(ids, keep)
    found = measure_text(AxesMeasurement(), subject, Text(ids), AxesConfig())
    flat = torch.cat(values).flatten()
    expected = (1 - torch.cat(residual).square().sum() / (flat - flat.mean()).square().sum()).sqrt()
    assert found.whole["pooled_r"] == pytest.approx(float(expected), abs=1e-5)
    assert len(found.layers) == model.config.num_hidden_layers
    assert found.layers[0].curves["a"].values.shape == (4, 41)
