"""Parity: what a capture shows under every kind of input a forward pass takes."""

import inspect

import pytest
import torch
from transformers import StaticCache

from helpers.capture import Kept, assert_near, run, shared, tiny, tokens
from wherewhat.captures.proof import capture
from wherewhat.errors import CaptureError

# Attention through the interface, in models' own code, with ALiBi in the mask, learned positions, sinks and windows.
ROUTES = ["llama", "gptj", "bloom", "falcon:alibi", "gpt2", "gpt_oss"]


@pytest.mark.parametrize("kind", ROUTES)
def test_a_batch_is_its_sequences_side_by_side(kind):
    model, ids = shared(kind), tokens(batch=3)
    together = run(model, ids)
    for row in range(3):
        for whole, alone in zip(together, run(model, ids[row : row + 1]), strict=True):
            assert_near(whole.pattern()[row : row + 1], alone.pattern())
            assert_near(whole.q[row : row + 1], alone.q)
            assert_near(whole.k[row : row + 1], alone.k)


@pytest.mark.parametrize("kind", ROUTES)
def test_padding_is_seen_by_nobody(kind):
    model = shared(kind)
    ids = tokens(20, batch=2)
    for shown in (slice(6, None), slice(None, 14)):  # padding on the left, on the right
        mask = torch.ones_like(ids)
        mask[1] = 0
        mask[1, shown] = 1
        for a in run(model, ids, attention_mask=mask):
            pattern = a.pattern()
            hidden = pattern[1, :, shown][..., mask[1] == 0]
            assert float(hidden.abs().max()) == 0
            own = a.output.reshape(2, 20, a.heads, -1).transpose(1, 2)
            value = a.value.repeat_interleave(a.heads // a.value.shape[1], 1)
            assert_near((pattern @ value)[0], own[0])
            assert_near((pattern @ value)[1, :, shown], own[1, :, shown])


@pytest.mark.parametrize("kind", ["llama", "gptj", "deepseek_v3"])
def test_a_constant_shift_changes_neither_pattern_nor_q_and_k(kind):
    model, ids = shared(kind), tokens(batch=2)
    shift = torch.arange(23)[None] + 17
    mask = torch.ones_like(ids)
    plain = run(model, ids, attention_mask=mask)
    by_place = Kept([])
    names = list(inspect.signature(model.forward).parameters)
    values = {"input_ids": ids, "attention_mask": mask, "position_ids": shift}
    arguments = [values.get(name) for name in names[: names.index("position_ids") + 1]]
    with torch.no_grad(), capture(model, by_place):
        model(*arguments, use_cache=False)
    keyword, per_sequence = (run(model, ids, attention_mask=mask, position_ids=x) for x in (shift, shift.expand(2, -1)))
    for shifted in (keyword, per_sequence, by_place.layers):
        for a, b in zip(plain, shifted, strict=True):
            assert_near(b.pattern(), a.pattern())
            assert_near(b.q, a.q)
            assert_near(b.k, a.k)
            assert float((a.rot_q - b.rot_q).abs().max()) > 0.1
            assert b.positions.reshape(-1)[:23].tolist() == list(range(17, 40))


@pytest.mark.parametrize("kind", [*ROUTES, "mistral", "deepseek_v3", "gpt_neo"])
def test_a_second_chunk_with_a_cache_shows_the_last_rows(kind):
    model, ids = shared(kind), tokens(24)
    whole = run(model, ids)
    kept = Kept([])
    with torch.no_grad(), capture(model, kept):
        first = model(input_ids=ids[:, :15], use_cache=True)
        model(input_ids=ids[:, 15:], past_key_values=first.past_key_values, use_cache=True)
    assert [a.layer for a in kept.layers] == [0, 1, 2, 3] * 2
    for full, second in zip(whole, kept.layers[4:], strict=True):
        m = second.m  # windowed layers cache no more keys than they need
        assert second.n == 9
        assert second.positions.tolist() == list(range(24 - m, 24))
        assert_near(second.pattern(), full.pattern()[:, :, 15:, 24 - m :])
        assert_near(second.q, full.q[:, :, 15:])
        assert_near(second.k, full.k[:, :, 24 - m :])


@pytest.mark.parametrize("kind", ["llama", "gptj"])
def test_gradients_flow_as_without(kind):
    model, ids = tiny(kind), tokens()

    def gradient():
        model.zero_grad()
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradient()
    seen = []
    with capture(model, lambda a: seen.append(a.pattern().requires_grad)):
        captured = gradient()
    assert seen == [True] * 4
    assert all(torch.equal(x, y) for x, y in zip(plain, captured, strict=True))


@pytest.mark.parametrize("kind", ["llama", "bloom", "mistral"])
def test_generate_is_captured_step_by_step(kind):
    model, ids = shared(kind), tokens(9)
    plain = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    shapes = []
    with capture(model, lambda a: shapes.append((a.layer, a.n, int(a.positions[..., -1].max())))):
        inside = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(plain, inside)
    passes = [(9, 8), (1, 9), (1, 10), (1, 11), (1, 12)]
    assert shapes == [(layer, n, last) for n, last in passes for layer in range(4)]


def test_generate_from_left_padding_is_right_or_refused():
    model, ids = shared("llama"), tokens(9, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    kept = Kept([])
    try:
        with capture(model, kept):
            model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    except CaptureError as error:
        assert "position" in str(error)  # noqa: PT017
    else:
        step = kept.layers[-4]
        assert step.positions[..., -1].tolist() == [10, 6]


def test_embeddings_instead_of_tokens_and_inference_mode():
    for kind in ("llama", "gptj"):
        model, ids = shared(kind), tokens(batch=2)
        kept = Kept([])
        with torch.inference_mode(), capture(model, kept):
            model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False)
        assert all(torch.equal(a.q, b.q) for a, b in zip(run(model, ids), kept.layers, strict=True))


def test_positions_that_jump_are_refused_or_right():
    """Packed sequences: positions start again; the mask the model makes of it is block-diagonal."""
    model, ids = shared("llama"), tokens(20)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    layers = run(model, ids, position_ids=positions)
    for a, alone in zip(layers, run(model, ids[:, 12:]), strict=True):
        assert_near(a.pattern()[:, :, 12:, 12:], alone.pattern())
        assert_near(a.q[:, :, 12:], alone.q)
        assert float(a.pattern()[:, :, 12:, :12].abs().max()) == 0


def test_a_cache_with_empty_places_is_refused():
    """Its keys outnumber the tokens, so which positions they have is unknown."""
    for kind in ("llama", "gpt2"):
        model = shared(kind)
        cache = StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad(), pytest.raises(CaptureError, match="empty slots"), capture(model, lambda a: None):
            model(input_ids=tokens(), past_key_values=cache, use_cache=True)


def continued(model, ids, first, *, inside, **given):
    """Layers of the pass that goes on from a cache of ``first`` tokens, made inside the same capture or before it."""
    kept = Kept([])
    before = {name: value[:, :first] for name, value in given.items()}
    after = given | {"position_ids": given["position_ids"][:, first:]} if "position_ids" in given else given
    with torch.no_grad():
        if not inside:
            cache = model(input_ids=ids[:, :first], use_cache=True, **before).past_key_values
        with capture(model, kept):
            if inside:
                cache = model(input_ids=ids[:, :first], use_cache=True, **before).past_key_values
            kept.layers.clear()
            model(input_ids=ids[:, first:], past_key_values=cache, use_cache=True, **after)
    return kept.layers


@pytest.mark.parametrize("kind", ["llama", "gptj", "gemma2"])
def test_cached_keys_stand_where_their_own_pass_put_them(kind):
    model, ids = shared(kind), tokens(12)
    gaps = torch.tensor([[0, 1, 2, 5, 6, 9, 10, 11, 12, 13, 14, 15]])
    mask = torch.ones_like(ids)
    whole = run(model, ids, position_ids=gaps, attention_mask=mask)
    found = continued(model, ids, 8, inside=True, position_ids=gaps, attention_mask=mask)
    for one, other in zip(whole, found, strict=True):
        assert other.positions.tolist() == gaps[0, -other.m :].tolist()
        assert_near(other.k, one.k[:, :, -other.m :])
    with pytest.raises(CaptureError, match="8 cached keys were made before the capture"):
        continued(model, ids, 8, inside=False, position_ids=gaps, attention_mask=mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_the_cache(side):
    model, ids = shared("llama"), tokens(12)
    mask = torch.ones_like(ids)
    mask[:, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    inside = continued(model, ids, 8, inside=True, position_ids=places, attention_mask=mask)
    assert inside[0].positions.reshape(-1).tolist() == places[0].tolist()
    if side == "left":
        outside = continued(model, ids, 8, inside=False, position_ids=places, attention_mask=mask)
        assert_near(outside[0].k[:, :, 3:], inside[0].k[:, :, 3:])
        return
    with pytest.raises(CaptureError, match="may have any position"):
        continued(model, ids, 8, inside=False, position_ids=places, attention_mask=mask)


def test_cached_keys_of_models_whose_frequencies_change():
    for kind in ("llama:longrope", "llama:dynamic"):
        with pytest.raises(CaptureError, match="maybe with other frequencies"):
            continued(tiny(kind), tokens(12), 8, inside=False)


def test_positions_that_differ_between_rows():
    model, ids = shared("qwen3_5_text"), tokens(12)
    places = torch.arange(12).expand(3, 1, -1).clone()
    run(model, ids, position_ids=places)
    places[1, 0, 5] = 2
    with pytest.raises(CaptureError, match="differ between their rows"):
        run(model, ids, position_ids=places)
