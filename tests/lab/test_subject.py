"""Identity: a laboratory model run as a subject gives its own logits; brute force: scores of all swaps against layers
that are run again; end-to-end: measurements of language models run on every encoding."""

from __future__ import annotations

import functools
import typing

import pytest
import torch

from helpers.tolerance import rounding, worst
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Text
from wherewhat.measures.perturb import PerturbConfig
from wherewhat.measures.perturb.losses import measure_perturb
from wherewhat.measures.residual import ResidualConfig, measure_residual
from wherewhat.measures.swaps.layer import layer_swaps, reference_scores
from wherewhat_lab.config import EncodingName, LabConfig
from wherewhat_lab.model import LabModel
from wherewhat_lab.subject import LabSubject

ENCODINGS = typing.get_args(EncodingName)
N = 24


def make(encoding="rope", *, dtype=torch.float64):
    """A model with larger weights than initial ones, which hide mistakes."""
    model = LabModel(LabConfig(vocabulary=32, layers=2, heads=2, width=16, positions=40, encoding=encoding)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
            if name.endswith("phase"):
                parameter.copy_(-parameter.abs())
    return model


def subject(encoding="rope", **options) -> LabSubject:
    return LabSubject(make(encoding, **options), trained_length=N)


def tokens(batch=1, n=N):
    return torch.randint(32, (batch, n), generator=torch.Generator().manual_seed(2))


def all_logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, all_tokens=True, **options)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_running_and_editing(encoding):
    it, ids, layers = subject(encoding), tokens(3), []
    assert (it.trained_length(), it.key_mixing()) == (N, {0: 0.0, 1: 0.0})
    plain = all_logits(it.model, ids)
    assert torch.equal(it.run(ids, layers.append, logits=True), plain)
    assert [layer.layer for layer in layers] == [0, 1]
    for layer in layers:
        output = (layer.pattern() @ layer.value).transpose(1, 2)
        torch.testing.assert_close(output, layer.output, atol=1e-9, rtol=0)
    assert it.run(ids, lambda _: None) is None
    assert torch.equal(it.edited(ids, lambda _: None), plain)
    assert torch.equal(it.edited(ids, lambda attention: attention.output), plain)
    without = it.edited(ids, lambda attention: torch.zeros_like(attention.output))
    assert float((without - plain).abs().max()) > 1e-3
    # Without attention a model knows nothing but the token itself, and its learned position.
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 32
    again = it.edited(other, lambda attention: torch.zeros_like(attention.output))
    assert torch.equal(again[:, 1:], without[:, 1:])


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "learned"])
def test_a_constant_shift_of_positions_changes_nothing(encoding):
    it, ids = subject(encoding), tokens()
    moved, plain = it.run(ids, lambda _: None, logits=True, positions=torch.arange(N) + 7), all_logits(it.model, ids)
    # Angles are float32 products with positions up to 30, in two layers.
    assert worst(moved, plain) < rounding(8 * 31 * 2)


def test_positions_and_variants_that_there_are_not_are_refused():
    with pytest.raises(ConfigError, match="40 positions"):
        subject("learned").run(tokens(), lambda _: None, positions=torch.arange(N) + 20)
    with pytest.raises(ConfigError, match="measure it without heads=true"):
        measure_residual(subject(), tokens(), ResidualConfig(strengths=(0.0,), heads=True))


def test_reordering_the_first_layer_is_reordering_tokens():
    it, ids = subject("nope"), tokens()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    with it.reordered({0: order}):
        inside = it.run(ids, lambda _: None, logits=True)
    assert torch.equal(inside, all_logits(it.model, ids[:, order]))
    assert torch.equal(it.run(ids, lambda _: None, logits=True), all_logits(it.model, ids))
    with pytest.raises(ConfigError, match="no layer 2"), it.reordered({2: order}):
        pass


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scores_of_all_swaps_are_those_of_layers_run_again(encoding):
    n = 12
    it, ids, layers = subject(encoding), tokens(n=n), []
    it.run(ids, layers.append)
    with it.blocks(ids) as again:
        assert again.layers == [0, 1]
        for layer in layers:
            fast = layer_swaps(layer, [5, n - 1], tau=1e-2)
            before = again.run(layer.layer, again.hidden(layer.layer))
            torch.testing.assert_close(before.rot_k, layer.rot_k, atol=1e-9, rtol=0)
            swapped = functools.partial(again.swapped, layer.layer)
            s_pos, s_sym, *_ = reference_scores(before, swapped, [5, n - 1], tau=1e-2)
            # Angles are float32; the scores divide by changes of at least tau.
            torch.testing.assert_close(fast.s_pos, s_pos, atol=1e-5, rtol=0)
            torch.testing.assert_close(fast.s_sym, s_sym, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_measurements_of_language_models_run(encoding):
    it, ids = subject(encoding), tokens()
    residual = measure_residual(it, ids, ResidualConfig(strengths=(0.0, 1.0)))
    assert residual.whole["loss_strength_1"] == pytest.approx(residual.whole["loss"], abs=1e-6)
    options = PerturbConfig(kinds=("tokens", "position_jitter"), rates=(0.0, 0.5), seeds=1, equivalence=False)
    perturbed = measure_perturb(it, Text(ids), options).whole
    assert perturbed["rise_tokens_at_0"] == pytest.approx(0, abs=1e-6)
    moved = abs(perturbed["rise_position_jitter_at_50"])
    assert moved < 1e-6 if encoding == "nope" else moved > 1e-3
