"""Parity: what is read off models that compute attention in their own code, against their published formulas."""

import math

import pytest
import torch
from transformers.models.gptj import modeling_gptj

from helpers.capture import assert_near, run, shared, tiny, tokens
from helpers.tolerance import rounding
from wherewhat.captures.proof import capture, prove
from wherewhat.errors import CaptureError

HEADS = 4
FAMILIES = ["gptj", "gpt_neo", "bloom", "falcon:alibi", "falcon:rotary", "mpt"]
OTHERS = ["codegen", "falcon:multi_head", "falcon:new_decoder", "xglm", "gpt_neox_japanese", "roformer", "openai-gpt"]


def centred(x, visible):
    """Rows with their first entry taken off, which is what softmax cannot see; hidden keys at zero."""
    return torch.where(visible, x - x[..., :1], 0.0)


def slopes(heads, biggest=8.0):
    return torch.tensor([2.0 ** (-biggest * (h + 1) / heads) for h in range(heads)])


@pytest.mark.parametrize("kind", ["bloom", "falcon:alibi", "mpt"])
def test_bias_is_alibi_up_to_row_constants(kind):
    """Press et al., arXiv 2108.12409: slope times distance; families differ by a constant per row."""
    n = 50
    expected = slopes(HEADS).view(1, HEADS, 1, 1) * torch.arange(n)
    for a in run(shared(kind), tokens(n)):
        visible = a.visible()
        assert torch.equal(visible.expand(1, HEADS, n, n), torch.ones(1, HEADS, n, n).bool().tril())
        # Falcon scales scores and bias together, and rounds slopes and biases to bfloat16.
        factor = a.scale if kind == "falcon:alibi" else 1.0
        within = rounding(4, torch.bfloat16 if kind == "falcon:alibi" else torch.float32)
        ours = centred(a.bias().expand(1, HEADS, n, n), visible)
        assert_near(ours, torch.where(visible, factor * expected, 0.0), within=within)
        assert math.isclose(a.scale, a.rot_q.shape[-1] ** -0.5, rel_tol=rounding(8))


def test_without_alibi_there_is_no_bias():
    for kind in ("gptj", "gpt_neo", "falcon:rotary"):
        for a in run(shared(kind), tokens()):
            bias, visible = a.bias(), a.visible().expand(1, HEADS, 23, 23)
            assert bias is None or float(torch.where(visible, bias, 0.0).abs().max()) == 0
            assert torch.equal(visible.any(1)[0].tril(), visible[0, 0])


def test_local_windows_of_gpt_neo():
    window = 8
    layers = run(shared("gpt_neo"), tokens(40))
    distance = torch.arange(40)[:, None] - torch.arange(40)
    for a in layers:
        expected = (distance >= 0) & (distance < (window if a.layer % 2 else 40))
        assert torch.equal(a.visible()[0, 0], expected)
        assert a.scale == 1.0


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_logits_and_weights_are_the_models(kind):
    """Weights by the model's own ``output_attentions``, which only eager attention has.

    Captured in eager mode too: transformers adds Falcon's ALiBi twice there, so the modes disagree.
    """
    ids = tokens(31, batch=2)
    eager = tiny(kind, attn_implementation="eager")
    assert prove(eager).layout.route == "trace"
    layers = run(eager, ids)
    with torch.no_grad():
        theirs = eager(input_ids=ids, use_cache=False, output_attentions=True).attentions
    for a, weights in zip(layers, theirs, strict=True):
        assert_near(a.pattern(), weights)


@pytest.mark.parametrize("kind", ["gptj", "bloom"])
def test_nested_traces_call_each_reducer_once_a_layer(kind):
    model = tiny(kind)
    calls = [[], [], []]

    def reducer(index):
        def look(a):
            calls[index].append(a.layer)
            torch.softmax(a.rot_q.float() @ a.rot_q.float().transpose(-1, -2), -1) @ a.rot_q.float()

        return look

    with torch.no_grad(), capture(model, reducer(0)), capture(model, reducer(1)), capture(model, reducer(2)):
        model(input_ids=tokens(), use_cache=False)
    assert calls == [[0, 1, 2, 3]] * 3


def test_a_trace_inside_an_interface_capture_and_the_reverse():
    models = {"gptj": tiny("gptj"), "llama": tiny("llama")}
    for outer, inner in (("gptj", "llama"), ("llama", "gptj")):
        calls = {outer: [], inner: []}

        def work(name, calls=calls):
            return lambda a: (
                calls[name].append(a.layer),
                a.pattern() @ a.value.repeat_interleave(a.heads // a.kv_heads, 1),
            )

        with torch.no_grad(), capture(models[outer], work(outer)), capture(models[inner], work(inner)):
            for model in models.values():
                model(input_ids=tokens(), use_cache=False)
        assert calls == {outer: [0, 1, 2, 3], inner: [0, 1, 2, 3]}


def test_a_long_alibi_text_of_mpt_keeps_its_early_rows(monkeypatch):
    """Counted back from a last token far away, whole rows of the bias lie below -1e4."""
    model = tiny("mpt")
    original = model.transformer.build_mpt_alibi_tensor

    def far(*args, **kwargs):
        return original(*args, **kwargs) - 20_000.0

    monkeypatch.setattr(model.transformer, "build_mpt_alibi_tensor", far)
    for a in run(model, tokens()):
        # Quotients by the sum of up to 23 exponentials.
        torch.testing.assert_close(a.pattern().sum(-1), torch.ones(1, HEADS, 23), atol=rounding(2 * 23), rtol=0)


def test_logits_that_are_clamped_are_refused(monkeypatch):
    """A clamp may touch nothing in a short prompt and much in a long text, so it is not taken for nothing."""
    for limit in ({"max": 50.0}, {"min": -50.0}):

        def clamped(self, query, key, value, attention_mask=None, limit=limit):
            scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) / self.scale_attn
            weights = torch.softmax(torch.clamp(scores, **limit) + attention_mask, -1)
            return torch.matmul(weights, value), weights

        monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", clamped)
        with pytest.raises(CaptureError, match="no softmax attention"):
            prove(tiny("gptj"))
