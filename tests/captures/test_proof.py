"""Identity: the proof passes for faithful models in every precision and fails closed, with numbers, for liars."""

import dataclasses
import re
from types import FunctionType

import pytest
import torch
from transformers import AttentionInterface, BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from conformance.hard import harden
from helpers.capture import Kept, assert_near, run, shared, tiny, tokens
from helpers.tolerance import rounding
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.blocks import key_mixing
from wherewhat.captures.proof import capture, prove
from wherewhat.captures.rotation import identify_rotation
from wherewhat.captures.session import rounded_weights
from wherewhat.errors import CaptureError

NUMBER = re.compile(r"(\d\.?\d*(e[-+]?\d+)?|nan|inf)")


def refused(model, match, **options):
    """The one line with which a model is refused; its configuration must be as it was."""
    before = model.config._attn_implementation
    with pytest.raises(CaptureError, match=match) as caught:
        prove(model, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert model.config._attn_implementation == before
    return line


@pytest.fixture
def implementation():
    """Registers attention functions for the time of a test."""
    names = []

    def register(name, function):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
        names.append(name)
        return name

    yield register
    for name in names:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def test_an_honest_implementation_of_ones_own_passes(implementation):
    model = tiny("llama")
    model.set_attn_implementation(implementation("honest", sdpa_attention_forward))
    assert prove(model).implementation == "honest"


def test_implementations_that_do_something_else(implementation, subtests):
    def scaled(module, query, key, value, mask, scaling=None, **rest):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=2 * scaling, **rest)

    def altered(module, query, key, value, mask, **rest):
        output, weights = sdpa_attention_forward(module, query, key, value, mask, **rest)
        return output * 1.001, weights

    def unmasked(module, query, key, value, mask, **rest):
        rest.pop("is_causal", None)
        return sdpa_attention_forward(module, query, key, value, torch.ones(1, 1, 23, 23).bool(), **rest)

    for liar in (scaled, altered, unmasked):
        with subtests.test(liar=liar.__name__):
            model = tiny("llama")
            model.set_attn_implementation(implementation(liar.__name__, liar))
            assert NUMBER.search(refused(model, "attention output"))


def test_scaling_attribute_that_only_eager_believes(monkeypatch):
    original = modeling_llama.eager_attention_forward

    def liar(module, query, key, value, mask, scaling, **rest):
        return original(module, query, key, value, mask, scaling=scaling * 1.01, **rest)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", liar)
    assert NUMBER.search(refused(tiny("llama"), "attention weights"))


def test_temperature_in_the_softmax(monkeypatch):
    def liar(self, query, key, value, attention_mask=None):
        scores = query.float() @ key.float().transpose(-1, -2) / self.scale_attn + attention_mask
        weights = torch.softmax(scores, -1) ** 1.1
        return (weights / weights.sum(-1, keepdim=True)) @ value, weights

    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", liar)
    refused(tiny("gptj"), "no softmax attention|differ")


def test_rotations_that_are_none(monkeypatch, subtests):
    original = modeling_llama.apply_rotary_pos_emb

    def stretched(q, k, cos, sin):
        return original(q, k, cos, sin * 1.05)

    def keys_unlike_queries(q, k, cos, sin):
        return original(q, k, cos, sin)[0], original(q, k, cos.flip(1), sin.flip(1))[1]

    def in_place(q, k, cos, sin):
        rotated = original(q, k, cos, sin)
        return q.copy_(rotated[0]), k.copy_(rotated[1])

    for liar, reason in ((stretched, "rotation"), (keys_unlike_queries, "rotation"), (in_place, "in place")):
        with subtests.test(liar=liar.__name__):
            monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", liar)
            assert NUMBER.search(refused(tiny("llama"), reason)) or liar is in_place


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("gptj", torch.float32)])
def test_rotation_under_an_unknown_name(monkeypatch, kind, dtype):
    module, name = (modeling_llama, "LlamaAttention") if kind == "llama" else (modeling_gptj, "GPTJAttention")
    forward = getattr(module, name).forward
    renamed = ["turn" if used == "apply_rotary_pos_emb" else used for used in forward.__code__.co_names]
    code = forward.__code__.replace(co_names=tuple(renamed))
    names = {**vars(module), "turn": module.apply_rotary_pos_emb}
    monkeypatch.setattr(getattr(module, name), "forward", FunctionType(code, names, "forward", forward.__defaults__))
    assert NUMBER.search(refused(tiny(kind, dtype=dtype), "not seen"))


def test_weights_that_are_no_numbers():
    for kind, bad in (("llama", torch.nan), ("llama", torch.inf), ("gptj", torch.inf), ("bloom", torch.nan)):
        model = tiny(kind)
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if ".2." in n and p.ndim == 2)[0, 0] = bad
        assert "nan" in refused(model, "NaN|nan|inf").lower()


def test_training_mode():
    model = tiny("llama")
    model.train()
    refused(model, "eval")


def test_dropout_left_on_in_one_layer():
    model = tiny("gpt2")
    model.transformer.h[1].attn.attn_dropout.p = 0.5
    model.config.attn_pdrop = 0.5
    model.transformer.h[1].attn.train()
    refused(model, "differ|change")


def test_no_softmax_attention():
    for kind in ("mamba", "rwkv"):
        refused(tiny(kind), "no softmax attention")


def test_encoders():
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    refused(BertModel(config).eval(), "logits")
    masked = prove(BertForMaskedLM(config).eval())
    assert all("not causal" in layer.features for layer in masked.layers)


def test_what_is_no_language_model():
    with pytest.raises(CaptureError, match="not a model of transformers"):
        prove(torch.nn.Linear(2, 2).eval())


def test_a_prompt_too_short_to_prove_anything():
    for length in (0, 1, 7):
        refused(tiny("gptj"), "proves nothing", length=length)


@pytest.mark.parametrize("kind", ["gptj", "llama"])
def test_as_many_tokens_as_heads(kind, monkeypatch):
    """Then heads and tokens cannot be told apart by their number."""
    monkeypatch.setattr("wherewhat.captures.proof.SHORTEST_PROOF", 2)
    model = tiny(kind)
    alone, usual = prove(model, length=4), prove(model)
    for a, b in zip(alone.layers, usual.layers, strict=True):
        assert a.layout.rotation.pairing == b.layout.rotation.pairing
        # GPT-J's are found from its tensors; a wrong law or base is off by more than 1e-2.
        torch.testing.assert_close(a.layout.rotation.inv_freq, b.layout.rotation.inv_freq, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "gptj", "gpt_oss", "bloom"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "mpt", "deepseek_v3", "nanochat")),
    ],
)
def test_every_precision_passes(kind):
    tolerances = {torch.float64: 1e-6, torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
    if kind in ("gpt_oss", "deepseek_v3"):
        del tolerances[torch.float64]  # torch has no float64 product of experts
    for dtype, tolerance in tolerances.items():
        proof = prove(tiny(kind, dtype=dtype))
        assert proof.ok
        assert (proof.tolerance, proof.output_change) == (tolerance, 0)
        for layer in proof.layers if dtype == torch.float32 else ():
            # Products of 16 terms, then softmax and a sum over up to 23 keys.
            assert max(layer.rotation_error, layer.weights_error, layer.output_error) < rounding(64)
            assert layer.drift < 1e-4


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_rounding_bounds_every_weight_and_is_reached(size):
    """Brute force: logits off by at most δ, at random and in the worst way, against the bound on their weights."""
    attention = run(shared("llama"), tokens(12))[0]
    attention = dataclasses.replace(attention, scale=attention.scale * size)
    weights, bound = rounded_weights(attention, slice(None), torch.bfloat16)
    scores = attention.attn_scores().double().masked_fill(~attention.visible(), -torch.inf)
    largest = scores.abs().masked_fill(scores.isinf(), 0).amax(-1, keepdim=True)
    off = 1.5 * torch.finfo(torch.bfloat16).eps * largest
    torch.testing.assert_close(weights.double(), scores.softmax(-1), rtol=1e-3, atol=1e-6)
    signs = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)).sign()
    for turned in (signs, -signs):
        assert bool(((scores + off * turned).softmax(-1) - weights <= bound + 1e-6).all())
    for key in range(attention.m):
        for sign in (1, -1):
            worst = torch.full_like(scores, -sign)
            worst[..., key] = sign
            change = ((scores + off * worst).softmax(-1)[..., key] - weights[..., key]).abs()
            assert bool((change <= bound[..., key] + 1e-6).all())
    first = torch.zeros_like(scores[..., 0])  # the larger of rise and fall is what the bound says
    for sign in (1, -1):
        worst = torch.full_like(scores, -sign)
        worst[..., 0] = sign
        first = torch.maximum(first, ((scores + off * worst).softmax(-1)[..., 0] - weights[..., 0]).abs())
    torch.testing.assert_close(first, bound[..., 0].double(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("bloom", torch.float32, marks=pytest.mark.slow),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpt_oss", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_formula_is_refused_on_hard_weights_too(kind, dtype, monkeypatch):
    model = tiny(kind)
    harden(model, prove(model))
    prove(model.to(dtype))
    rightly = LayerAttention.attn_scores
    monkeypatch.setattr(LayerAttention, "attn_scores", lambda self, *rows: 1.1 * rightly(self, *rows))
    with pytest.raises(CaptureError, match=r"attention (weights|output) differ"):
        prove(model)


def test_unknown_dtype_is_said():
    model = tiny("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
    refused(model, "float8")


def test_frequencies_of_gptj_hold_far_beyond_the_proof():
    """No buffer holds GPT-J's frequencies; found on 23 tokens, they must be exact on thousands."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rotation = prove(tiny("gptj", dtype=dtype)).layers[0].layout.rotation
        exact = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
        assert float((rotation.inv_freq.double() - exact).abs().max()) * 4096 < 1e-3


def test_rotary_function_replaced_after_the_proof(monkeypatch):
    model = tiny("llama")
    prove(model)
    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s: original(q, k, c.roll(1, 1), s.roll(1, 1))
    )
    with torch.no_grad(), pytest.raises(CaptureError, match=r"relative error \d"), capture(model, lambda a: None):
        model(input_ids=tokens(), use_cache=False)


def test_rotary_function_replaced_inside_the_capture(monkeypatch):
    """The observer is gone with it: not seeing a rotation must not count as seeing the right one."""
    model = tiny("llama")
    original = modeling_llama.apply_rotary_pos_emb
    with torch.no_grad(), capture(model, lambda a: None):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", original)
            with pytest.raises(CaptureError, match="0 times"):
                model(input_ids=tokens(), use_cache=False)
        model(input_ids=tokens(), use_cache=False)
    assert modeling_llama.apply_rotary_pos_emb is original


def test_rotary_buffer_changed_after_the_proof():
    model = tiny("llama")
    prove(model)
    model.model.rotary_emb.inv_freq.mul_(1.01)
    with torch.no_grad(), pytest.raises(CaptureError, match="rotates differently"), capture(model, lambda a: None):
        model(input_ids=tokens(60), use_cache=False)


def test_rotation_of_one_layer_changed_after_the_proof(monkeypatch):
    """Layers that share their angles are compared once, but a layer with angles of its own is not one of them."""
    model = tiny("llama")
    prove(model)
    attention = model.model.layers[2].self_attn
    original = attention.forward

    def late(hidden_states, position_embeddings, **rest):
        cos, sin = position_embeddings
        return original(hidden_states, position_embeddings=(cos.roll(1, 1), sin.roll(1, 1)), **rest)

    monkeypatch.setattr(attention, "forward", late)
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match=r"layers.2.*rotation differ by \d"),
        capture(model, lambda a: None),
    ):
        model(input_ids=tokens(), use_cache=False)


def test_angles_changed_in_place_between_layers():
    model = tiny("llama")
    prove(model)

    def turn(_module, _args, kwargs):
        kwargs["position_embeddings"][1].neg_()

    handle = model.model.layers[3].register_forward_pre_hook(turn, with_kwargs=True)
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match=r"layers.3.*error \d"),
        capture(model, lambda a: None),
    ):
        model(input_ids=tokens(), use_cache=False)
    handle.remove()


def unrotated_right(model, ids):
    found = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: found.append(out))
        for layer in model.model.layers
    ]
    kept = Kept([])
    try:
        with torch.no_grad(), capture(model, kept):
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for a, q in zip(kept.layers, found, strict=True):
        # Turned there and back by angles of up to 59 radians, which models and Rotation round alike or by 59 ε.
        assert_near(a.q, q.unflatten(-1, (a.heads, -1)).transpose(1, 2), within=rounding(80))


@pytest.mark.parametrize("kind", ["llama:dynamic", "llama:longrope"])
def test_frequencies_that_depend_on_the_length(kind):
    model = tiny(kind)
    prove(model, length=12)  # trained positions: 16
    with pytest.raises(CaptureError, match="prove it at this length"):
        unrotated_right(model, tokens(60))
    model = tiny(kind)
    prove(model, length=60)
    unrotated_right(model, tokens(60))


def short_gpt2(positions):
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=positions)
    return GPT2LMHeadModel(config).eval()


def test_a_model_with_fewer_positions_than_the_prompt():
    model = short_gpt2(16)
    proof = prove(model)
    assert proof.ok
    assert key_mixing(model, proof)[0] < 1e-4
    refused(model, "has 16 positions, but its proof takes 17: give a shorter prompt", input_ids=tokens(17) % 64)
    assert prove(short_gpt2(8)).ok
    refused(short_gpt2(7), "has 7 positions, but its proof takes 8: it cannot be captured")


def test_capture_proves_by_itself():
    assert len(run(tiny("llama"), tokens())) == 4
    model = tiny("llama")
    model.train()
    with pytest.raises(CaptureError, match="eval"), capture(model, lambda a: None):
        pass


def test_identify_on_the_models_own_tensors_agrees_with_the_live_buffer():
    model = tiny("llama:llama3")
    for a in run(model, tokens()):
        assert torch.equal(a.rotation.inv_freq, model.model.rotary_emb.inv_freq)
        found = identify_rotation(a.q, a.rot_q, torch.arange(23))
        # A slope over 23 positions: angles are off by some ε, frequencies by less.
        torch.testing.assert_close(found.rotation.inv_freq, a.rotation.inv_freq, atol=rounding(64), rtol=0)


def test_a_model_with_several_ends_of_a_text_passes():
    """As Llama 3.1: the config holds a list of token ids."""
    model = tiny("llama")
    model.config.eos_token_id = [1, 2, 3]
    assert prove(model).layout.layers
