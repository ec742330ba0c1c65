"""Parity: chunks through the key-value cache show the layers of one pass, and refuse models that cannot do it."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.capture import WITHIN, Kept, assert_near, proved, run, shared, tokens
from helpers.tolerance import assert_as_accurate
from wherewhat.captures.attention import Mask
from wherewhat.captures.chunks import ChunkedMask, ChunkMask, bounds, prove_chunks, run_in_chunks
from wherewhat.captures.proof import capture
from wherewhat.errors import CaptureError, ConfigError
from wherewhat.measures.measurement import Text, find_measurement, measure_text
from wherewhat.runs.subject import ModelSubject

N = 41
# Rotary, learned positions, ALiBi by key and by query, soft-cap, sinks, windows that drop keys, attention in blocks,
# latent keys, a recurrence beside attention.
KINDS = [
    *("llama", "gptj", "gpt2", "bloom", "mpt", "falcon:alibi", "gemma2", "gpt_oss", "gemma3_text:window"),
    *("llama4_text", "deepseek_v3", "qwen3_5_text"),
]
OTHERS = ["opt", "falcon:new_decoder", "mistral", "qwen3", "cohere2"]
BY_RULE = {"llama", "bloom", "gemma2", "gpt_oss", "gemma3_text:window", "mistral"}


def chunked(kind, ids, chunk, **options):
    kept = Kept([])
    model, proof = proved(kind)
    logits = run_in_chunks(model, ids, kept, proof=proof, chunk=chunk, **options)
    return kept.layers, logits


def assert_same(ours, expected):
    assert [layer.layer for layer in ours] == [layer.layer for layer in expected]
    for a, b in zip(ours, expected, strict=True):
        for name in ("rot_q", "rot_k", "value", "output", "q", "k"):
            assert_near(getattr(a, name), getattr(b, name))
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(*torch.broadcast_tensors(a.visible(), b.visible()))
        assert_near(a.pattern(), b.pattern())
        assert (a.scale, a.softcap, a.name, a.declared_window) == (b.scale, b.softcap, b.name, b.declared_window)
        # Logits are products of two numbers that each have an error.
        assert_near(*(x.attn_scores().masked_fill(~x.visible(), 0.0) for x in (a, b)), within=2 * WITHIN)


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_layers_are_those_of_one_pass(kind):
    model, ids = shared(kind), tokens(N)
    expected = run(model, ids)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    for chunk in (7, 40):
        layers, logits = chunked(kind, ids, chunk, logits=True)
        assert_same(layers, expected)
        assert_near(logits, plain)
        for mask in (layer.mask for layer in layers if kind in BY_RULE):
            assert type(mask) is Mask
            assert mask.causal
            assert not mask.visible_only
            assert all(term.shape[-2] == 1 for term in mask.added)


def test_a_batch_of_texts_and_offloading():
    for kind in ("llama", "bloom", "gemma3_text:window"):
        model, ids = shared(kind), tokens(N, batch=2)
        assert_same(chunked(kind, ids, 8, offload=True)[0], run(model, ids))


def test_masks_without_a_rule_are_kept_row_by_row():
    n, generator = 12, torch.Generator().manual_seed(0)
    seen = torch.rand(1, 1, n, n, generator=generator) > 0.4
    added = torch.randn(1, 2, n, n, generator=generator)
    first_keys = [0, 0, 3]
    pieces = []
    for (start, stop), first in zip(bounds(n, 4), first_keys, strict=True):
        here = (slice(None), slice(None), slice(start, stop), slice(first, stop))
        pieces.append(ChunkMask(start, stop, first, Mask(added=(added[here],), visible_only=(seen[here],))))
    mask = ChunkedMask(chunks=tuple(pieces))
    dense = torch.zeros(1, 2, n, n, dtype=torch.bool)
    for piece in pieces:
        here = (slice(None), slice(None), slice(piece.start, piece.stop), slice(piece.first_key, piece.stop))
        dense[here] = seen[here]
    chosen = torch.tensor([0, 3, 4, 11])
    for rows in (slice(None), slice(0, 1), slice(3, 9), slice(5, 5), slice(-2, None), slice(1, 11, 3), chosen):
        assert torch.equal(mask.visible(rows, n, n).expand(1, 2, -1, -1), dense[:, :, rows])
        bias = mask.bias(rows, n, n)
        assert torch.equal(bias * mask.visible(rows, n, n), added[:, :, rows] * dense[:, :, rows])


def test_tokens_at_positions_of_ones_choice():
    for kind in ("llama", "gptj", "gpt2"):
        model, proof = proved(kind)
        subject = ModelSubject(SimpleNamespace(model=model), proof)
        in_chunks = ModelSubject(SimpleNamespace(model=model), proof, chunk=8)
        positions = torch.arange(N).flip(0)
        one, two = Kept([]), Kept([])
        subject.run(tokens(N), one, positions=positions)
        in_chunks.run(tokens(N), two, positions=positions)
        assert torch.equal(two.layers[0].positions, positions)
        assert_same(two.layers, one.layers)


@pytest.mark.parametrize("name", ["axes", "attention", "planes", "heads", "distance"])
def test_scores_are_those_of_one_pass(name):
    model, proof = proved("gemma3_text:window", dtype=torch.float64)
    measurement = find_measurement(name)
    config = measurement.config()
    one = ModelSubject(SimpleNamespace(model=model), proof)
    two = ModelSubject(SimpleNamespace(model=model), proof, chunk=16)
    ids = tokens(48)
    expected, found = (measure_text(measurement, subject, Text(ids), config) for subject in (one, two))
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.heads.keys() == b.heads.keys()
        for metric in a.heads:
            torch.testing.assert_close(a.heads[metric], b.heads[metric], atol=1e-6, rtol=1e-6, equal_nan=True)
    assert found.whole == pytest.approx(expected.whole, abs=1e-6, rel=1e-6, nan_ok=True)


def test_hidden_states_in_another_order_are_run_at_once():
    model, proof = proved("llama")
    one = ModelSubject(SimpleNamespace(model=model), proof)
    two = ModelSubject(SimpleNamespace(model=model), proof, chunk=8)
    kept = [Kept([]), Kept([])]
    for subject, into in zip((one, two), kept, strict=True):
        with subject.reordered({1: torch.arange(N).flip(0)}):
            subject.run(tokens(N), into)
        subject.run(tokens(N), into)
    assert_same(kept[1].layers, kept[0].layers)


def test_chunks_cover_the_text_evenly():
    for count, chunk in ((41, 8), (41, 40), (16, 4), (7, 2), (2, 512)):
        found = list(bounds(count, chunk))
        sizes = [stop - start for start, stop in found]
        assert [i for start, stop in found for i in range(start, stop)] == list(range(count))
        assert max(sizes) <= chunk
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text:window", "gpt_oss"])
def test_the_proof_accepts_what_is_the_same(kind):
    model, proof = proved(kind)
    for length in (9, 23, 200):
        assert prove_chunks(model, proof, tokens=length) < WITHIN


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("openai-gpt", "no key-value cache: leave --chunk out"),
        ("jamba", "differs from one pass by"),
        ("bart", "cannot continue from its cache"),
        ("cpmant", "its cache holds other keys"),
        ("llama:longrope", "frequencies depend on the length"),
    ],
)
def test_models_whose_chunks_differ_are_refused(kind, reason):
    model, proof = proved(kind)
    with pytest.raises(CaptureError, match=reason) as error:
        prove_chunks(model, proof, tokens=64)
    assert "\n" not in str(error.value)


def test_a_window_cache_that_lets_go_of_too_many_keys_is_refused(monkeypatch):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    model, proof = proved("gemma3_text:window")
    original = DynamicSlidingWindowLayer.update

    def forgetful(self, key_states, value_states, *args, **kwargs):
        found = original(self, key_states, value_states, *args, **kwargs)
        if self.keys.shape[2] > 1:
            self.keys = torch.zeros_like(self.keys)
        return found

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", forgetful)
    with pytest.raises(CaptureError, match="differs from one pass"):
        prove_chunks(model, proof, tokens=64)


def test_chunks_that_are_too_short_are_refused():
    for chunk in (1, 0, -3):
        with pytest.raises(ConfigError, match=f"--chunk is {chunk}"):
            ModelSubject(SimpleNamespace(model=shared("llama")), chunk=chunk)


def test_nothing_is_left_of_a_layer_once_it_was_handed_over():
    import gc
    import weakref

    model, proof = proved("llama")
    seen = []

    def look(attention):
        gc.collect()
        assert all(ref() is None for ref in seen[:-1])
        seen.append(weakref.ref(attention.rot_q))

    run_in_chunks(model, tokens(N), look, proof=proof, chunk=8)
    assert len(seen) == 4


def test_a_capture_open_around_chunks_still_sees_each_of_them():
    model, proof = proved("llama")
    outer = []
    with capture(model, lambda a: outer.append((a.n, a.m)), proof=proof):
        run_in_chunks(model, tokens(16), lambda a: None, proof=proof, chunk=8)
    assert outer == [(8, 8)] * 4 + [(8, 16)] * 4


@pytest.mark.slow
def test_scores_of_the_embedded_model_in_four_chunks(kept):
    """512 tokens in chunks of 128: every score is as close to that of a pass in float64 as that of a plain pass is."""
    import wherewhat

    loaded = kept.loaded("smollm2")
    ids = loaded.encode(wherewhat.embedded_documents()[0].text, tokens=512)[None]
    axes = find_measurement("axes")
    one = ModelSubject(loaded, kept.proof("smollm2"))
    two = ModelSubject(loaded, one.proof, chunk=128)
    precise = ModelSubject(replace(loaded, model=copy.deepcopy(loaded.model).double()))
    plain, found, exact = (measure_text(axes, subject, Text(ids), axes.config()) for subject in (one, two, precise))
    total = torch.stack([layer.heads["tss"] for layer in exact.layers])
    for metric in exact.layers[0].heads:
        values = [torch.stack([layer.heads[metric] for layer in text.layers]) for text in (found, plain, exact)]
        if metric in ("sse", "tss"):  # what is left of a head's sum of squares is as precise as that sum
            values = [x / total for x in values]
        ours, theirs, true = values
        # Scores are kept in float64, but come from a pass in float32, which is the precision to allow for.
        assert_as_accurate(ours, theirs.float(), true)
