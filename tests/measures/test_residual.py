"""Brute force: replaced logits against the dense formula. Identity: λ = 1 is the model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.capture import TinySubject, tiny, tokens
from wherewhat.errors import ConfigError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.residual import ResidualConfig, measure_residual, mixed_attention
from wherewhat.measures.tensors import next_token_loss

FAMILIES = ["llama", "gptj", "bloom", "falcon:alibi", "mpt", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "cohere2"]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("name", FAMILIES)
def test_full_strength_is_the_model_itself(name):
    subject = TinySubject(name)
    ids = tokens(31)
    found = measure_residual(subject, ids, ResidualConfig(layers=False, axes=False))
    assert found.whole["loss_strength_1"] == pytest.approx(found.whole["loss"], abs=1e-4)
    assert abs(found.whole["loss_strength_0"] - found.whole["loss"]) > 1e-3


def test_blocks_equal_the_dense_formula():
    def check(attention):
        fit = fit_layer(attention)
        w = attention.attn_scores()[0].double()
        i, j = torch.arange(40)[:, None], torch.arange(40)
        terms = {"a": fit.a[:, (i - j).clamp_min(0)], "b": fit.b[:, :, None], "c": fit.c[:, None]}
        additive = sum(terms.values())
        value = attention.value[0].double().repeat_interleave(attention.heads // attention.kv_heads, 0)
        for strength, without in ((0.0, ""), (0.3, ""), (1.0, "a"), (1.0, "c"), (0.5, "ac")):
            changed = additive + strength * (w - additive) - sum(terms[x] for x in without)
            weights = torch.softmax(changed.masked_fill(i < j, -torch.inf), -1)
            for block_mib in (1, 64):
                ours = mixed_attention(attention, fit, strength=strength, without=without, block_mib=block_mib)
                torch.testing.assert_close(ours[0].double(), (weights @ value).transpose(0, 1), **CLOSE)

    TinySubject("llama").run(tokens(40), check)


def test_the_control_is_noise_of_the_size_of_the_residual():
    """Identity: the noise has the root mean square of the residual, also in blocks of another size."""

    def logits(attention, **options):
        seen = {}
        recording = replace(attention)
        object.__setattr__(recording, "weigh", lambda scores, rows: seen.setdefault(rows.start, scores) * 0)
        mixed_attention(recording, fit_layer(attention), strength=0.0, **options)
        return len(seen), torch.cat([seen[start] for start in sorted(seen)], 2)[0].double()

    def check(attention):
        w = attention.attn_scores()[0].double()
        visible = attention.visible()[0].expand_as(w)
        (_, additive), (one, noisy), (two, blocks) = (
            logits(attention, **options) for options in ({}, {"noise": True}, {"noise": True, "block_mib": 1})
        )
        assert (one, two) == (1, 2)
        torch.testing.assert_close(noisy, blocks, **CLOSE)
        residual, noise = ((x - w).masked_fill(~visible, 0) for x in (additive, noisy))
        # 45 150 pairs: the root mean square of noise has a standard deviation of 0.3 %, its mean one of 0.5 %.
        sizes = [x.square().sum((1, 2)).sqrt() for x in (residual, noise)]
        torch.testing.assert_close(*sizes, rtol=0.02, atol=0)
        assert float((noise.sum((1, 2)).abs() / visible[0].sum() ** 0.5 / sizes[0]).max()) < 5 / visible[0].sum() ** 0.5

    TinySubject("llama").run(tokens(300), check)
    found = measure_residual(TinySubject("llama"), tokens(30), ResidualConfig(strengths=(0.0,), layers=False))
    assert {"loss_strength_0", "loss_noise"} <= found.whole.keys()
    without = ResidualConfig(strengths=(0.0,), layers=False, control=False)
    assert "loss_noise" not in measure_residual(TinySubject("llama"), tokens(30), without).whole


def test_chosen_heads_only():
    chosen = torch.tensor([False, True, False, False])

    def check(attention):
        fit = fit_layer(attention)
        some = mixed_attention(attention, fit, strength=0.0, heads=chosen)
        everything, nothing = (mixed_attention(attention, fit, strength=s) for s in (0.0, 1.0))
        torch.testing.assert_close(some[:, :, chosen], everything[:, :, chosen], **CLOSE)
        torch.testing.assert_close(some[:, :, ~chosen], nothing[:, :, ~chosen], **CLOSE)

    TinySubject("llama").run(tokens(40), check)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_query_axis_cancels_and_constants_may_be_in_any_axis(name):
    def check(attention):
        assert (attention.sinks is not None) == (name == "gpt_oss")
        fit = fit_layer(attention)
        without, whole = (mixed_attention(attention, fit, without=axes) for axes in ("b", ""))
        torch.testing.assert_close(without, whole, **CLOSE)
        moved = replace(fit, a=fit.a - 3, b=fit.b + 1, c=fit.c + 2)
        for strength, axes in ((1.0, "a"), (1.0, "c"), (0.5, "ac")):
            one, other = (mixed_attention(attention, x, strength=strength, without=axes) for x in (fit, moved))
            torch.testing.assert_close(one, other, **CLOSE)

    TinySubject(name).run(tokens(40), check)


def test_the_sink_column_keeps_its_weight():
    def check(attention):
        # With values of 1, the output is the weight that is left to the keys.
        attention = replace(attention, value=torch.ones_like(attention.value))
        for without in "ac":
            left = mixed_attention(attention, fit_layer(attention), without=without)[0, :, :, 0]
            torch.testing.assert_close(left.T, attention.pattern()[0].sum(-1), **CLOSE)
            assert float(left.max()) < 1

    TinySubject("gpt_oss").run(tokens(40), check)


def test_every_layer_by_itself():
    subject = TinySubject("llama")
    found = measure_residual(subject, tokens(30), ResidualConfig(strengths=(0.0, 1.0)))
    assert len(found.layers) == subject.model.config.num_hidden_layers
    assert all("additive_cost_of_layer" in layer.whole for layer in found.layers)
    assert {"cost_without_a", "cost_without_c", "additive_cost"} <= found.whole.keys()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_heads_in_batches_equal_one_head_at_a_time(name):
    subject, ids = TinySubject(name), tokens(40)
    found = measure_residual(subject, ids, ResidualConfig(strengths=(0.0,), layers=False, axes=False, heads=True))

    def loss(chosen):
        def edit(attention):
            heads = torch.tensor([(attention.layer, head) in chosen for head in range(attention.heads)])
            return mixed_attention(attention, fit_layer(attention), strength=0.0, heads=heads)

        return next_token_loss(subject.edited(ids, edit), ids)

    costs = {
        (layer.layer, head): cost
        for layer in found.layers
        for head, cost in enumerate(layer.heads["additive_cost_of_head"].tolist())
    }
    assert len(found.layers) == subject.model.config.num_hidden_layers
    for head in [(0, 0), (1, 1), (1, 3), (max(costs)[0], 2)]:
        assert costs[head] == pytest.approx(loss([head]) - found.whole["loss"], abs=1e-5)
    cheapest = sorted(costs, key=costs.get)
    shares, losses = found.curves["loss_by_share"].values.T.tolist()
    assert shares == pytest.approx([0, 0.1, 0.3, 0.5, 1])
    assert losses[0] == pytest.approx(found.whole["loss"])
    assert losses[2] == pytest.approx(loss(cheapest[: round(0.3 * len(cheapest))]), abs=1e-5)
    assert losses[4] == pytest.approx(found.whole["loss_strength_0"], abs=1e-5)


def test_loss_is_the_models_own():
    model = tiny("llama")
    ids = tokens(30)
    with torch.no_grad():
        output = model(ids, labels=ids)
    assert next_token_loss(output.logits, ids) == pytest.approx(
        float(output.loss), rel=1e-5
    )  # means of 29 terms in float32


def test_senseless_options_are_refused():
    for options in ({"strengths": ()}, {"strengths": (0.5, 0.5)}, {"block_mib": 0}):
        with pytest.raises(ConfigError):
            ResidualConfig(**options)
