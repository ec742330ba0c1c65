"""Brute force: batches of heads against one head at a time. Identity: the parts of the logits sum to the logits."""

from __future__ import annotations

import logging

import pytest
import torch

from helpers.capture import TinySubject, run, shared, tiny, tokens
from wherewhat.captures.proof import prove
from wherewhat.captures.stream import ResidualStream
from wherewhat.errors import CaptureError, ConfigError
from wherewhat.measures import removal
from wherewhat.measures.removal import RemovalConfig, measure_removals, replaced_heads
from wherewhat.measures.tensors import text_losses

# Grouped keys, one key head, a parallel block, norms before and after attention, ALiBi, a sink column, a factor of what
# blocks add, latent attention, mixtures of experts.
FAMILIES = ["llama", "gpt2", "gpt_neox", "gemma3_text", "bloom", "falcon:alibi", "gpt_oss", "granite", "deepseek_v3"]


def alone(model, writer, ids, head, replacement):
    """Loss and centred logits of the next token with one head replaced by a hook of its output projection."""

    def replace(_, args):
        z = args[0].clone()
        parts = z.view(*z.shape[:-1], writer.heads, -1)
        own = parts[..., head, :]
        if replacement == "removal":
            parts[..., head, :] = 0
        else:
            parts[..., head, :] = own.mean(-2, keepdim=True)
        return (z, *args[1:])

    handle = writer.projection.register_forward_pre_hook(replace)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    right = logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] - logits[:, :-1].mean(-1)
    return text_losses(logits, ids).mean(-1), right.double().mean(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_equal_one_head_at_a_time_by_hooks(family):
    subject, ids = TinySubject(family), tokens(19, batch=2)
    scores = measure_removals(subject, ids, RemovalConfig(control=False, direct=False))
    stream = subject.stream()
    with torch.no_grad():
        plain = subject.model(input_ids=ids, use_cache=False).logits
    losses = text_losses(plain, ids).mean(-1)
    right = (plain[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] - plain[:, :-1].mean(-1)).double().mean(-1)
    for layer in (scores[0].layers[0].layer, scores[0].layers[-1].layer):
        count = len(scores[0].layers[layer].heads["removal_loss"])
        for head in (0, count - 1):
            for kind in ("removal", "mean"):
                loss, logit = alone(subject.model, stream._writers[layer], ids, head, kind)
                for text in range(2):
                    of_heads = scores[text].layers[layer].heads
                    assert float(of_heads[f"{kind}_loss"][head]) == pytest.approx(
                        float((loss - losses)[text]), abs=1e-5
                    )
                    if kind == "removal":
                        change = float((logit - right)[text])
                        assert float(of_heads["removal_logit"][head]) == pytest.approx(change, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_whole_passes_give_the_same(family):
    """Brute force: a model that cannot be run from the middle has the same scores from whole passes."""
    subject, ids = TinySubject(family), tokens(17, batch=2)
    middle = measure_removals(subject, ids, RemovalConfig())

    def refuse(_, **__):
        raise CaptureError("no variants")

    subject.variants = refuse
    for scores, others in zip(middle, measure_removals(subject, ids, RemovalConfig()), strict=True):
        assert scores.whole["loss"] == pytest.approx(others.whole["loss"], abs=1e-6)
        for layer, other in zip(scores.layers, others.layers, strict=True):
            assert layer.heads.keys() == other.heads.keys()
            for name, x in layer.heads.items():
                torch.testing.assert_close(x, other.heads[name], atol=1e-5, rtol=0)


def test_texts_together_equal_each_alone_and_layers_can_be_chosen():
    subject, ids = TinySubject("llama"), tokens(17, batch=2)
    together = measure_removals(subject, ids, RemovalConfig())
    for text in range(2):
        (single,) = measure_removals(subject, ids[text : text + 1], RemovalConfig(layers=(2,)))
        assert [layer.layer for layer in single.layers] == [2]
        for name, x in single.layers[0].heads.items():
            torch.testing.assert_close(x, together[text].layers[2].heads[name], atol=1e-5, rtol=0)


def test_replacements():
    """Identity: zero; one mean for all tokens; noise of the norm of each output, the same directions in each text."""
    (attention, *_) = run(shared("llama"), tokens(13, batch=2))
    output = attention.output
    assert not bool(replaced_heads(attention, "removal").any())
    torch.testing.assert_close(replaced_heads(attention, "mean")[:, 5], output.mean(1))
    added = replaced_heads(attention, "noise") - output
    torch.testing.assert_close(added.norm(dim=-1), output.norm(dim=-1))
    directions = added / added.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(directions[0], directions[1], atol=1e-4, rtol=0)
    assert float(directions[0].flatten(0, 1).mean(0).norm()) < 0.3  # other tokens and heads have other directions


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_later_tokens_change_nothing_before_them(family):
    """Identity: from the first layer on, a model without a head is as causal as the model."""
    subject, ids = TinySubject(family), tokens(19)
    other = torch.cat([ids[:, :11], tokens(8, seed=5)], 1)
    stream = subject.stream()
    first, second = (stream.direct_logits(x) for x in (ids, other))
    for layer, x in first.heads.items():
        torch.testing.assert_close(x[:, :10], second.heads[layer][:, :10], atol=1e-6, rtol=1e-4)
    losses = []
    for text in (ids, other):
        (scores,) = measure_removals(subject, text[:, :12], RemovalConfig(mean=False, direct=False, layers=(0,)))
        losses.append(scores.layers[0].heads["removal_loss"])
        logits = [subject.variants(x)._prefixes[0].run(0, 1, _without_first_head)[0, 0, :11] for x in (text, ids)]
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)
    assert bool((losses[0] != losses[1]).any())  # the twelfth token is another


def _without_first_head(attention):
    output = replaced_heads(attention, "noise")
    output[:, :, :1] = replaced_heads(attention, "removal")[:, :, :1]
    return output[:, None]


@pytest.mark.parametrize("family", [*FAMILIES, "gptj", "mpt", "opt", "cohere2", "olmo2", "mixtral", "phi"])
def test_parts_sum_to_the_logits(family):
    """Identity: heads, feed-forward layers, embedding and biases, each from its own module, are all of the logit."""
    subject, ids = TinySubject(family), tokens(29)
    direct = subject.stream().direct_logits(ids)
    with torch.no_grad():
        logits = subject.model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    right = logits.gather(-1, ids[0, 1:, None])[:, 0] - logits.mean(-1)
    total = direct.others + sum(x.sum(0) for x in direct.heads.values())
    torch.testing.assert_close(total, right, atol=1e-5 * float(right.abs().max()), rtol=0)
    assert all(float(x.abs().max()) > 0 for x in direct.heads.values())


def test_direct_logits_equal_the_product_of_weights():
    """Brute force: weights of a Llama by name; the control is the mean over all pairs of a query and a next token."""
    model, ids = tiny("llama"), tokens(23)
    direct = ResidualStream(model, prove(model)).direct_logits(ids)
    attention = run(model, ids)
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        handle = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        model(input_ids=ids)
        handle.remove()
    x, norm = seen[0].double(), model.model.norm
    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    unembedding = model.lm_head.weight.double()
    unembedding = unembedding - unembedding.mean(0)
    for layer, own in enumerate(attention):
        projection = model.model.layers[layer].self_attn.o_proj.weight.double()
        for head in range(own.heads):
            width = own.value.shape[-1]
            written = own.output[0, :, head].double() @ projection[:, head * width : (head + 1) * width].T
            logits = (written * scale * norm.weight.double()) @ unembedding.T
            every = logits.detach()[:-1][:, ids[0, 1:]]
            torch.testing.assert_close(direct.heads[layer][head], every.diagonal(), atol=1e-6, rtol=1e-4)
            assert float(direct.shuffled[layer][head].mean()) == pytest.approx(float(every.mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "capped or changed after it"),
        ("qwen3_next", "no projection in .* reads the outputs of its heads"),
        ("openai-gpt", "no RMSNorm or LayerNorm leads from the last block"),
    ],
)
def test_models_without_direct_logits_are_named(family, reason, caplog):
    subject = TinySubject(family)
    with pytest.raises(CaptureError, match=reason):
        subject.stream()
    removal._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        (scores,) = measure_removals(subject, tokens(11), RemovalConfig(mean=False))
    (record,) = (record for record in caplog.records if record.name == removal.__name__)
    assert record.getMessage().startswith("removal: no direct logits: ")
    for layer in scores.layers:
        assert "direct_logit" not in layer.heads
        assert bool((layer.heads["removal_loss"] != 0).any())


def test_a_sum_that_is_not_the_logits_is_refused():
    model = tiny("llama")
    stream = ResidualStream(model, prove(model))
    model.model.layers[1].register_forward_hook(lambda _, __, output: output * 1.5)
    with pytest.raises(CaptureError, match="differs from the logits by"):
        stream.direct_logits(tokens(11))


def test_wrong_options():
    for layers in ((-1,), (1, 1)):
        with pytest.raises(ConfigError, match="layers"):
            RemovalConfig(layers=layers)
    with pytest.raises(ConfigError, match="layers holds 9: the layers with attention are 0, 1, 2, 3"):
        measure_removals(TinySubject("llama"), tokens(11), RemovalConfig(layers=(9,)))
