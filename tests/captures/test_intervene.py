"""Identity: an editor that returns the layer's own output changes nothing; one that does not changes what it should."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import assert_near, proved, shared, tokens
from wherewhat.captures.proof import intervene
from wherewhat.errors import CaptureError

FAMILIES = ["llama", "gptj", "bloom", "falcon:alibi", "gemma2", "gpt_oss", "deepseek_v3"]
OTHERS = ["falcon:rotary", "mpt", "gpt2"]


def own_output(attention):
    """The layer's output, computed again from what was captured."""
    groups = attention.heads // attention.value.shape[1]
    return (attention.pattern() @ attention.value.repeat_interleave(groups, 1)).transpose(1, 2)


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
def test_own_output_changes_nothing_and_zeros_much(family):
    model, proof = proved(family)
    ids = tokens(23)
    edits = {
        "own": own_output,
        "none": lambda a: None,
        "silent": lambda a: torch.zeros_like(own_output(a)) if a.layer == 1 else None,
    }
    found = {}
    with torch.no_grad():
        plain = model(ids).logits
        for name, edit in edits.items():
            with intervene(model, edit, proof=proof):
                found[name] = model(ids).logits
        assert torch.equal(model(ids).logits, plain)
    assert_near(found["own"], plain)
    assert torch.equal(found["none"], plain)
    assert float((found["silent"] - plain).abs().max()) > 1e-2 * float(plain.abs().max())


def test_zero_output_is_what_the_output_projection_of_zeros_gives():
    model = shared("llama")
    ids = tokens(23)
    projection = model.model.layers[1].self_attn.o_proj
    with torch.no_grad():
        with intervene(model, lambda a: torch.zeros_like(a.output) if a.layer == 1 else None):
            edited = model(ids).logits
        handle = projection.register_forward_pre_hook(lambda _, args: (torch.zeros_like(args[0]),))
        expected = model(ids).logits
        handle.remove()
    assert torch.equal(edited, expected)


def test_wrong_shape_is_refused():
    model = shared("llama")
    with pytest.raises(CaptureError, match="shape"), torch.no_grad(), intervene(model, lambda a: a.rot_q):
        model(tokens(23))


def test_attention_that_is_applied_twice_cannot_be_edited():
    model = shared("diffllama")
    with pytest.raises(CaptureError, match="twice"), torch.no_grad(), intervene(model, own_output):
        model(tokens(23))
