"""Identity: inside its window a method is the model, shifts and block sizes change nothing, writing equals scoring."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.capture import run, shared, tokens
from helpers.methods import BY_NAME, SMALL
from wherewhat.captures.attention import Mask
from wherewhat.captures.proof import intervene, prove
from wherewhat.extend import METHODS, find_method
from wherewhat.extend.attention import FarKeys
from wherewhat.extend.frequencies import PositionInterpolation, YaRN
from wherewhat.extend.method import extended, generate
from wherewhat.extend.visibility import Windowed
from wherewhat.extend.windows import LMInfinite


def logits(model, ids, method, **inputs):
    with torch.no_grad(), extended(model, method):
        return model(input_ids=ids, use_cache=False, **inputs).logits


def test_every_method_is_listed():
    assert {type(m) for m in SMALL} == set(map(find_method, METHODS))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("method", [LMInfinite(sinks=3, window=9), YaRN(trained=12)], ids=lambda m: m.name)
def test_what_a_method_replaces_is_not_computed(family, method, monkeypatch):
    model, ids = shared(family), tokens(31)
    proof = prove(model)
    with torch.no_grad(), intervene(model, method.attend, proof=proof):
        seen = model(input_ids=ids, use_cache=False).logits
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    with torch.no_grad(), extended(model, method, proof=proof):
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, seen, atol=0, rtol=0)
    assert not calls
    model(input_ids=ids)
    assert bool(calls) == (model.config._attn_implementation == "sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("method", [*map(find_method, METHODS)], ids=lambda m: m.name)
def test_within_the_training_length_nothing_changes(family, method):
    model, ids = shared(family), tokens(31)
    plain = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits(model, ids, method()), plain, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox", "gemma3_text", "gemma2", "bloom"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_window_over_all_keys_is_the_layer_itself(family, fast, monkeypatch):
    if not fast:
        monkeypatch.setattr("wherewhat.extend.visibility.kernel_available", lambda *_: False)
    for layer in run(shared(family), tokens(31)):
        got = Windowed(31, FarKeys.capped(4, 31)).attend(layer, block_mib=1)
        torch.testing.assert_close(got, layer.output, atol=1e-5, rtol=0)


def test_a_factor_of_almost_one_is_the_layer_itself():
    for layer in run(shared("gpt_neox"), tokens(31)):
        got = PositionInterpolation(factor=1 + 1e-9).attend(layer)
        torch.testing.assert_close(got, layer.output, atol=1e-5, rtol=0)


@pytest.mark.slow
@BY_NAME
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_constant_shift_changes_nothing(family, method):
    model, ids = shared(family), tokens(31)
    at = torch.arange(31)[None]
    here, there = (logits(model, ids, method, position_ids=p) for p in (at, at + 17))
    torch.testing.assert_close(here, there, atol=1e-4, rtol=0)


@pytest.mark.slow
@BY_NAME
def test_texts_of_a_batch_may_stand_at_different_positions(method):
    model, ids = shared("llama"), tokens(31, batch=2)
    shifted = torch.arange(31) + torch.tensor([[5], [40]])
    apart = torch.cat([logits(model, row[None], method) for row in ids])
    torch.testing.assert_close(logits(model, ids, method, position_ids=shifted), apart, atol=1e-4, rtol=0)


@pytest.mark.slow
@BY_NAME
@pytest.mark.parametrize("family", ["llama", "gptj", "gemma2"])
def test_blocks_change_nothing(family, method, monkeypatch):
    layer = run(shared(family), tokens(31, batch=2))[-1]
    whole = method.attend(layer)
    monkeypatch.setattr("wherewhat.extend.visibility.kernel_available", lambda *_: False)
    sizes = []

    def of_three(attention, keys, *, block_mib, most=None):
        sizes.append(keys)
        return (slice(a, min(a + 3, attention.n)) for a in range(0, attention.n, 3))

    monkeypatch.setattr("wherewhat.extend.visibility.query_blocks", of_three)
    parts = method.attend(layer)
    if whole is not None:
        torch.testing.assert_close(whole.float(), parts.float(), atol=1e-5, rtol=0)


def test_only_the_window_is_touched(monkeypatch):
    """Logits beyond first keys and window are never made: they would be infinite here."""
    layer = run(shared("llama"), tokens(31))[-1]
    bad = layer.rot_k.clone()
    bad[:, :, 5:20] = torch.nan
    spoilt = dataclasses.replace(layer, rot_k=bad)
    method = LMInfinite(sinks=3, window=6)
    kept = method.attend(layer)[:, 26:]
    monkeypatch.setattr("wherewhat.extend.visibility.kernel_available", lambda *_: False)
    got = Windowed(6, FarKeys.capped(3, 6)).attend(spoilt, block_mib=1)[:, 26:]
    torch.testing.assert_close(got, kept, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n", [31, 36, 64])
@pytest.mark.parametrize(
    "method",
    [m for m in SMALL if m.name in ("sliding-window", "streaming-llm", "lm-infinite", "rerope", "self-extend")],
)
def test_kernels_agree_with_blocks(n, method, monkeypatch):
    layer = run(shared("llama"), tokens(n, batch=2))[0]
    assert layer.mask == Mask(causal=True)
    by_kernel = method.attend(layer)
    monkeypatch.setattr("wherewhat.extend.visibility.kernel_available", lambda *_: False)
    torch.testing.assert_close(by_kernel, method.attend(layer), atol=2e-6, rtol=0)


@pytest.mark.slow
@BY_NAME
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_writing_equals_scoring(family, method):
    model, ids = shared(family), tokens(20)
    proof = prove(model)
    written = generate(model, ids, method, 8, proof=proof)
    assert written.shape == (1, 28)
    scored = logits(model, written, method.fitted(trained=12, length=28)).argmax(-1)
    assert torch.equal(written[0, 20:], scored[0, 19:-1])


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in SMALL if m.cacheable], ids=lambda m: m.name)
def test_cached_keys_change_nothing(method):
    model, ids = shared("gpt_neox"), tokens(30)
    method = method.fitted(trained=12, length=30)
    with torch.no_grad(), extended(model, method):
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :22], use_cache=True)
        rest = model(input_ids=ids[:, 22:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_methods_differ_beyond_their_window():
    model, ids = shared("llama"), tokens(31)
    found = [logits(model, ids, method) for method in SMALL]
    for a in range(len(found)):
        for b in range(a):
            assert float((found[a] - found[b]).abs().max()) > 1e-3, (SMALL[a].name, SMALL[b].name)
