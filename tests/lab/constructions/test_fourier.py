"""Identity: logits of the constructed head are the given function; its r is that of noise, of additive functions 1."""

from __future__ import annotations

import pytest
import torch

from helpers.tolerance import rounding
from wherewhat.errors import ConfigError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.measurement import Text, find_measurement, measure_text
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat_lab.constructions.transformers import (
    additive_function,
    distinct_tokens,
    fourier_transformer,
    index_function,
    random_function,
)
from wherewhat_lab.subject import LabSubject


@pytest.mark.parametrize("side", ["query", "key"])
def test_logits_are_the_function(side):
    for tokens, period in ((16, 16), (17, 17), (20, 9), (64, 64)):
        values = random_function(tokens, period)
        model = fourier_transformer(values, side=side)
        text = distinct_tokens(model, tokens, seed=3)
        found = model.attention(text)[0].attn_scores()[0, 0]
        i, j = torch.tril_indices(tokens, tokens)
        expected = values[text[0, i if side == "query" else j], (i - j) % period]
        # A sum over period / 2 planes, whose float32 angles reach 2π times the position.
        angles = rounding(8 * tokens) * float(values.abs().max())
        torch.testing.assert_close(found[i, j].double(), expected.double(), atol=angles, rtol=0)


@pytest.mark.parametrize("side", ["query", "key"])
def test_r_is_that_of_noise_and_1_for_additive_functions(side):
    """Positive control: RoPE can express what the additive fit cannot explain, and the fit finds what is additive."""
    for function in (random_function, index_function):
        ratios = []
        for seed in range(4):
            model = fourier_transformer(function(128, 128, seed=seed), side=side)
            fit = fit_layer(model.attention(distinct_tokens(model, 128, seed=seed))[0])
            ratios.append(float(fit.r) / fit.noise_floor)
        assert fit.noise_floor < 0.25
        assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.1)
        assert max(ratios) < 1.25
    model = fourier_transformer(additive_function(96, 96), side=side)
    fit = fit_layer(model.attention(distinct_tokens(model, 96))[0])
    assert float(fit.r) == pytest.approx(1, abs=1e-6)


def test_non_additive_is_not_the_opposite_of_positional():
    """With equal keys a head is purely positional, though its logits are far from additive."""
    model = fourier_transformer(4 * random_function(64, 64))
    attention = model.attention(distinct_tokens(model, 64))[0]
    scores = layer_swaps(attention, [40, 63])
    torch.testing.assert_close(scores.s_pos, torch.ones(1, 2).double(), atol=1e-4, rtol=0)
    assert float(scores.s_sym.max()) < 0.9
    assert float(fit_layer(attention).r) < 0.5
    by_key = fourier_transformer(4 * random_function(64, 64), side="key")
    mixed = layer_swaps(by_key.attention(distinct_tokens(by_key, 64))[0], [40, 63])
    assert float(mixed.s_pos.max()) < 0.99


def test_the_measurement_sees_it():
    model = fourier_transformer(random_function(96, 96))
    subject = LabSubject(model, trained_length=96)
    axes = find_measurement("axes")
    found = measure_text(axes, subject, Text(distinct_tokens(model, 96)), axes.config())
    fit = fit_layer(model.attention(distinct_tokens(model, 96))[0])
    assert float(found.layers[0].heads["r"][0]) == pytest.approx(float(fit.r), abs=1e-6)


def test_wrong_functions_are_refused():
    with pytest.raises(ConfigError, match="must be \\(tokens, period\\)"):
        fourier_transformer(torch.zeros(4))
    with pytest.raises(ConfigError, match="4 tokens do not have the width for a period of 8"):
        fourier_transformer(torch.zeros(4, 8))
    with pytest.raises(ConfigError, match="n is 9: the model has 8"):
        distinct_tokens(fourier_transformer(torch.zeros(8, 8)), 9)
