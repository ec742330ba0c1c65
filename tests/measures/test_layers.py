"""Brute force and parity: functions of a captured layer honour its mask, window, bias, soft-cap and sinks."""

from __future__ import annotations

import pytest
import torch

import wherewhat
from helpers.capture import shared, tiny, tokens
from measures.axes.dense import dense_fits
from wherewhat.captures.proof import capture
from wherewhat.errors import WherewhatError
from wherewhat.measures.attention import attention_output
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.swaps.logits import choose_queries

MODELS = ["bloom", "mistral", "gemma2", "falcon:alibi", "gpt_oss", "gpt2"]
FUNCTIONS = ["axes", "swaps", "planes", "frequencies", "attention_statistics"]


@pytest.fixture(scope="module", params=MODELS)
def named(request):
    """A model type in float64, and all its layers on a text."""
    model = tiny(request.param, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the others have no float64
    ids = tokens(41)
    return request.param, wherewhat.attention(model, ids)


def test_axes_are_those_of_the_models_own_logits(named):
    name, layers = named
    seen = set()
    for layer in layers:
        # The logits are the model's own if its values, weighted by their softmax, are its attention output.
        # Models take angles and softmax in float32, whatever their weights are in.
        reach = float(layer.output.abs().max())
        torch.testing.assert_close(attention_output(layer), layer.output.double(), rtol=0, atol=1e-5 * reach)
        fit = wherewhat.axes(layer)
        scores, visible = layer.attn_scores()[0], layer.visible()[0, 0].expand(layer.n, layer.m)
        torch.testing.assert_close(fit.r, dense_fits(scores, visible, "abc")[0], rtol=0, atol=1e-6)
        seen |= {"window"} if not bool(visible.tril().equal(torch.ones_like(visible).tril())) else set()
        seen |= {"bias"} if layer.bias() is not None and bool(layer.bias().any()) else set()
        seen |= {what for what in ("softcap", "sinks") if getattr(layer, what) is not None}
    expected = {
        "bloom": {"bias"},
        "mistral": {"window"},
        "gemma2": {"window", "softcap"},
        "falcon:alibi": {"bias"},
        "gpt_oss": {"window", "sinks"},
        "gpt2": set(),
    }
    assert seen == expected[name]


def test_the_function_on_tensors_ignores_what_the_layer_knows():
    layer = wherewhat.attention(tiny("bloom"), tokens(41))[1]
    ignoring = fit_axes(layer.rot_q[0], layer.rot_k[0], scale=layer.scale).r
    assert float((wherewhat.axes(layer).r - ignoring).abs().max()) > 0.1


def test_layers_outlive_the_pass_and_other_passes():
    model, ids = tiny("gemma2"), tokens(41)
    layers = wherewhat.attention(model, ids)
    before = [layer.pattern().clone() for layer in layers]
    wherewhat.attention(model, tokens(41, seed=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(layer.pattern(), weights) for layer, weights in zip(layers, before, strict=True))


def test_layers_share_copies_of_masks():
    layers = wherewhat.attention(tiny("gemma2"), tokens(41))
    masks = {id(term) for layer in layers for term in (*layer.mask.added, *layer.mask.visible_only)}
    assert len(masks) <= 2 < len(layers)


def test_layers_are_those_of_a_capture():
    model, ids = tiny("llama"), tokens(41)
    seen = []
    with torch.no_grad(), capture(model, lambda layer: seen.append((layer.rot_q.clone(), layer.k.clone()))):
        model(ids)
    for layer, (rot_q, k) in zip(wherewhat.attention(model, ids), seen, strict=True):
        assert torch.equal(layer.rot_q, rot_q)
        assert torch.equal(layer.k, k)


def test_training_mode_is_restored_and_not_measured():
    model = tiny("gpt2")
    expected = wherewhat.attention(model, tokens(41))[1].pattern()
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    assert torch.equal(wherewhat.attention(model, tokens(41))[1].pattern(), expected)
    assert [module.training for module in model.modules()] == modes


def test_queries_are_chosen_in_four_ways():
    layer = wherewhat.attention(tiny("llama"), tokens(41), layers=[1])[0]
    assert layer.layer == 1
    every = wherewhat.swaps(layer, "all")
    assert every.queries == tuple(range(2, 41))
    for queries in ("last", 4, [7, -1]):
        some = wherewhat.swaps(layer, queries)
        expected = every.s_pos[:, [query - 2 for query in some.queries]]
        # Each may leave out swaps that weigh up to 1e-7.
        torch.testing.assert_close(some.s_pos, expected, rtol=0, atol=2e-6)
    assert list(wherewhat.swaps(layer, 4).queries) == choose_queries(41, count=4)


def test_planes_of_a_head_make_up_its_logits():
    layer = wherewhat.attention(tiny("llama"), tokens(41))[0]
    found = wherewhat.frequencies(layer, 3)
    planes = layer.rotation.planes
    assert found.use.shape == found.s_pos.shape == (layer.heads, planes)
    assert found.inv_freq.shape == (planes,)
    assert wherewhat.planes(layer).share.shape == (layer.heads, planes)


def test_what_cannot_be_honoured_is_refused_in_one_line(subtests):
    layers = wherewhat.attention(tiny("llama"), tokens(41))
    for given, words in (
        (layers, "such as layers[0]"),
        (torch.ones(2, 3), "of type Tensor"),
        (wherewhat.attention(tiny("llama"), tokens(41, batch=2))[0], "one text at a time"),
        (_with_cache(), "a cache"),
    ):
        for function in FUNCTIONS:
            with subtests.test(function=function, words=words):
                with pytest.raises(WherewhatError) as raised:
                    getattr(wherewhat, function)(given)
                assert words in str(raised.value)
                assert "\n" not in str(raised.value)


def _with_cache():
    model, kept = tiny("llama"), []
    with torch.no_grad():
        past = model(tokens(20), use_cache=True).past_key_values
        with capture(model, lambda layer: kept.append(layer.copied())):
            model(tokens(10, seed=1), past_key_values=past)
    return kept[0]


def test_padding_is_refused():
    model, ids = tiny("llama"), tokens(41, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(WherewhatError, match="the text is padded"):
        wherewhat.attention(model, {"input_ids": ids, "attention_mask": mask})
    assert len(wherewhat.attention(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})) > 1


NOT_ONE_TEXT = {
    "padded on the left": {"attention_mask": torch.arange(41)[None] >= 5},
    "padded on the right": {"attention_mask": torch.arange(41)[None] < 30},
    "with a hole": {"attention_mask": torch.arange(41)[None] != 20},
    "packed": {"position_ids": torch.arange(41)[None] % 20},
    "packed, with a mask": {"position_ids": torch.arange(41)[None] % 20, "attention_mask": torch.ones(1, 41)},
}


@pytest.mark.parametrize("case", NOT_ONE_TEXT)
@pytest.mark.parametrize("family", ["llama", "gptj", "mistral"])
def test_padded_and_packed_layers_are_refused(case, family):
    kept, model = [], shared(family)
    given = {name: value.long() for name, value in NOT_ONE_TEXT[case].items()}
    with torch.no_grad(), capture(model, lambda layer: kept.append(layer.copied())):
        model(tokens(41), use_cache=False, **given)
    for function in FUNCTIONS:
        with pytest.raises(WherewhatError, match="give one text per row, without padding or packing"):
            getattr(wherewhat, function)(kept[1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_queries_come_back_in_their_order(family):
    """Identity: each column belongs to the query that was asked for, repeated ones too."""
    # In float64: weights of swaps, at the scale of τ = 1e-4, enlarge the rounding of logits.
    layer = wherewhat.attention(shared(family, dtype=torch.float64), tokens(41))[1]
    asked = [30, 10, -1, 10]
    found = wherewhat.swaps(layer, asked)
    assert found.queries == (30, 10, 40, 10)
    for column, query in enumerate(asked):
        alone = wherewhat.swaps(layer, [query])
        for name in ("s_pos", "s_sym", "s_pos_no_sink", "s_sym_no_sink", "exclusion", "effective"):
            # Each may leave out swaps that weigh up to 1e-7.
            ours, theirs = getattr(found, name)[:, column], getattr(alone, name)[:, 0]
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    if layer.rotation is not None:
        assert wherewhat.frequencies(layer, asked).queries == (30, 10, 40, 10)
    with pytest.raises(WherewhatError, match="queries is empty"):
        wherewhat.swaps(layer, [])


WRONG = {
    "ids outside the vocabulary": ([[1, 10**6]], "is not in the vocabulary"),
    "negative ids": ([[-1, 2]], "is not in the vocabulary"),
    "no ids": ([[]], "has shape (1, 0)"),
    "fractions": ([0.5, 1.5], "dtype float32"),
    "three dimensions": (torch.ones(1, 2, 3).long(), "has shape (1, 2, 3)"),
    "a string without tokenizer": ("a text", "the model has no tokenizer"),
    "rows of several lengths": ([[1, 2], [3]], "of one length"),
    "nothing": (None, "of type NoneType"),
}


def test_wrong_texts_are_named(subtests):
    model = tiny("llama")
    for name, (text, words) in WRONG.items():
        with subtests.test(name=name):
            with pytest.raises(WherewhatError) as raised:
                wherewhat.attention(model, text)
            assert words in str(raised.value)
            assert "\n" not in str(raised.value)


def test_layers_that_do_not_exist_are_named():
    with pytest.raises(WherewhatError, match="layers holds 9"):
        wherewhat.attention(tiny("llama"), tokens(41), layers=[0, 9])
    layer = wherewhat.attention(tiny("gpt2"), tokens(41))[0]
    for function in ("planes", "frequencies"):
        with pytest.raises(WherewhatError, match="it has no planes"):
            getattr(wherewhat, function)(layer)
    for queries in ("first", 0, -2, [0], [99]):
        with pytest.raises(WherewhatError):
            wherewhat.swaps(layer, queries)
