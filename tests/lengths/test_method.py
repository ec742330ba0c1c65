"""Identity: inside its window a method is the model, and shifts, blocks, batches and caches change nothing.

The logits of a method give what it attends to, and writing equals scoring.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from helpers.capture import proved, run, shared, tokens
from helpers.methods import BY_NAME, SMALL
from wherewhat.caches.attention import FarKeys
from wherewhat.caches.kept_keys import keys_kept
from wherewhat.caches.visibility import Windowed
from wherewhat.captures.attention import Mask
from wherewhat.captures.proof import intervene
from wherewhat.lengths import METHODS, find_method
from wherewhat.lengths.frequencies import PositionInterpolation, YaRN
from wherewhat.lengths.method import extended, generate
from wherewhat.lengths.windows import LMInfinite

N = 31
# Outputs of a layer and logits of a model are of magnitude 1. Angles of shifted positions are rounded anew, so that
# a rotation by some 70 changes by 70 ε.
OUTPUT = {"atol": 1e-5, "rtol": 0}
SHIFTED = {"atol": 1e-4, "rtol": 0}


@functools.cache
def last_layers(family):
    """Two layers of two texts: of some families one has a window and one has none."""
    more = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    return run(shared(family, **more), tokens(N, batch=2))[-2:]


def logits(model, ids, method, **inputs):
    with torch.no_grad(), extended(model, method):
        return model(input_ids=ids, use_cache=False, **inputs).logits


def without_kernels(patch):
    for module in ("caches.visibility", "lengths.near_far"):
        patch.setattr(f"wherewhat.{module}.kernel_available", lambda *_: False)


def test_methods_differ_beyond_their_window():
    assert {type(m) for m in SMALL} == set(map(find_method, METHODS))
    model, ids = shared("llama"), tokens(N)
    found = [logits(model, ids, method) for method in SMALL]
    for a in range(len(found)):
        for b in range(a):
            assert float((found[a] - found[b]).abs().max()) > 1e-3, (SMALL[a].name, SMALL[b].name)


def test_what_a_method_replaces_is_not_computed(monkeypatch):
    """The same operations in the same order, so that all bits agree."""
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = []
    for family in ("llama", "gpt_neox", "gemma3_text", "gpt_oss", "qwen3"):
        (model, proof), ids = proved(family), tokens(N)
        for method in (LMInfinite(sinks=3, window=9), YaRN(trained=12)):
            with torch.no_grad(), intervene(model, method.attend, proof=proof):
                seen = model(input_ids=ids, use_cache=False).logits
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(
                    torch.nn.functional,
                    "scaled_dot_product_attention",
                    lambda *a, **k: calls.append(1) or attend(*a, **k),
                )
                calls.clear()
                with extended(model, method, proof=proof):
                    assert torch.equal(model(input_ids=ids, use_cache=False).logits, seen), (family, method)
                assert not calls
                model(input_ids=ids)
                assert bool(calls) == (model.config._attn_implementation == "sdpa")


@pytest.mark.parametrize("method", [*map(find_method, METHODS)], ids=lambda m: m.name)
def test_within_the_training_length_nothing_changes(method):
    for family in ("llama", "gptj", "gpt_neox", "gemma3_text"):
        model, ids = shared(family), tokens(N)
        plain = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits(model, ids, method()), plain, **OUTPUT, msg=lambda m, f=family: f"{f}: {m}")


@pytest.mark.parametrize("fast", [True, False])
def test_a_window_over_all_keys_is_the_layer_itself(fast, monkeypatch):
    if not fast:
        without_kernels(monkeypatch)
    for family in ("llama", "gptj", "gpt_neox", "gemma3_text", "gemma2", "bloom"):
        for layer in run(shared(family), tokens(N)):
            got = Windowed(N, FarKeys.capped(4, N)).attend(layer, block_mib=1)
            torch.testing.assert_close(got, layer.output, **OUTPUT, msg=lambda m, f=family: f"{f}: {m}")


def test_a_factor_of_almost_one_is_the_layer_itself():
    for layer in run(shared("gpt_neox"), tokens(N)):
        got = PositionInterpolation(factor=1 + 1e-9).attend(layer)
        torch.testing.assert_close(got, layer.output, **OUTPUT)


@BY_NAME
def test_shifts_and_batches_change_nothing(method):
    at = torch.arange(N)[None]
    for family in ("llama", "gemma3_text"):
        model, ids = shared(family), tokens(N)
        here, there = (logits(model, ids, method, position_ids=p) for p in (at, at + 17))
        torch.testing.assert_close(here, there, **SHIFTED, msg=lambda m, f=family: f"{f}: {m}")
    model, ids = shared("llama"), tokens(N, batch=2)
    apart = torch.cat([logits(model, row[None], method) for row in ids])
    shifted = logits(model, ids, method, position_ids=at + torch.tensor([[5], [40]]))
    torch.testing.assert_close(shifted, apart, **SHIFTED)


@BY_NAME
def test_blocks_and_kernels_agree(method, monkeypatch):
    def of_three(attention, keys, *, block_mib, most=None):
        return (slice(a, min(a + 3, attention.n)) for a in range(0, attention.n, 3))

    for family, n in (("llama", N), ("llama", 36), ("llama", 64), ("gptj", N), ("gemma2", N)):
        layer = run(shared(family), tokens(n, batch=2))[-1]
        assert family != "llama" or layer.mask == Mask(causal=True)  # where kernels can be used
        whole = method.attend(layer)
        if whole is None:
            continue
        with monkeypatch.context() as patch:
            without_kernels(patch)
            blocks = method.attend(layer)
            for module in ("caches.visibility", "lengths.near_far"):
                patch.setattr(f"wherewhat.{module}.query_blocks", of_three)
            parts = method.attend(layer)
        for found in (blocks, parts):
            torch.testing.assert_close(found, whole, **OUTPUT, msg=lambda m, f=family: f"{f}: {m}")


@BY_NAME
def test_logits_give_the_output(method):
    for family in ("llama", "gptj", "gpt_neox", "gemma3_text", "gemma2", "gpt_oss"):
        for layer in last_layers(family):
            output = method.attend(layer)
            want = layer.output if output is None else output
            value = layer.value.repeat_interleave(layer.heads // layer.kv_heads, 1)
            for rows in (slice(0, N), slice(3, 5), slice(13, 29)):
                scores = method.scores(layer, rows)
                assert scores.shape == (2, layer.heads, rows.stop - rows.start, N)
                if layer.sinks is not None:
                    sink = layer.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                    scores = torch.cat([scores, sink.to(scores.dtype)], -1)
                got = (scores.softmax(-1)[..., :N] @ value).transpose(1, 2)
                torch.testing.assert_close(got, want[:, rows], **OUTPUT, msg=lambda m, f=family: f"{f}: {m}")


def test_only_the_window_is_touched(monkeypatch):
    """Logits beyond first keys and window are never made: they would be infinite here."""
    layer = run(shared("llama"), tokens(N))[-1]
    bad = layer.rot_k.clone()
    bad[:, :, 5:20] = torch.nan
    spoilt = dataclasses.replace(layer, rot_k=bad)
    method = LMInfinite(sinks=3, window=6)
    kept = method.attend(layer)[:, 26:]
    without_kernels(monkeypatch)
    got = Windowed(6, FarKeys.capped(3, 6)).attend(spoilt, block_mib=1)[:, 26:]
    torch.testing.assert_close(got, kept, **OUTPUT)


@BY_NAME
def test_writing_equals_scoring(method):
    for family in ("llama", "gemma3_text"):
        (model, proof), ids = proved(family), tokens(20)
        written = generate(model, ids, method, 5, proof=proof)
        assert written.shape == (1, 25)
        scored = logits(model, written, method.fitted(trained=12, length=25))[0, 19:-1]
        # The largest logit up to rounding: two orders of summation may choose differently between equals.
        own = scored.gather(-1, written[0, 20:, None])[:, 0]
        torch.testing.assert_close(own, scored.amax(-1), **OUTPUT, msg=lambda m, f=family: f"{f}: {m}")


@BY_NAME
def test_cached_keys_change_nothing(method):
    model, ids = shared("gpt_neox"), tokens(30)
    method = method.fitted(trained=12, length=30)
    with torch.no_grad(), extended(model, method), keys_kept():
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :22], use_cache=True)
        rest = model(input_ids=ids[:, 22:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, **OUTPUT)
