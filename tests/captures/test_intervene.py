"""Identity: an editor that returns the layer's own output changes nothing; one that does not changes what it should."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import tiny, tokens
from wherewhat.captures.proof import intervene, prove
from wherewhat.errors import CaptureError

FAMILIES = [
    "llama",
    "gptj",
    "bloom",
    "falcon:alibi",
    "falcon:rotary",
    "mpt",
    "gpt2",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
]


def own_output(attention):
    """The layer's output, computed again from what was captured."""
    groups = attention.heads // attention.value.shape[1]
    return (attention.pattern() @ attention.value.repeat_interleave(groups, 1)).transpose(1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_output_changes_nothing(family):
    model = tiny(family)
    ids = tokens(23)
    proof = prove(model)
    with torch.no_grad():
        plain = model(ids).logits
        with intervene(model, own_output, proof=proof):
            edited = model(ids).logits
        torch.testing.assert_close(edited, plain, rtol=1e-4, atol=2e-5)
        assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_instead_of_one_layer(family):
    model = tiny(family)
    ids = tokens(23)
    with torch.no_grad():
        plain = model(ids).logits
        with intervene(model, lambda a: torch.zeros_like(own_output(a)) if a.layer == 1 else None):
            silenced = model(ids).logits
        with intervene(model, lambda a: None):
            untouched = model(ids).logits
    assert torch.equal(untouched, plain)
    assert float((silenced - plain).abs().max()) > 1e-3


def test_zero_output_is_what_the_output_projection_of_zeros_gives():
    model = tiny("llama")
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
    model = tiny("llama")
    with pytest.raises(CaptureError, match="shape"), torch.no_grad(), intervene(model, lambda a: a.rot_q):
        model(tokens(23))


def test_attention_that_is_applied_twice_cannot_be_edited():
    model = tiny("diffllama")
    with pytest.raises(CaptureError, match="twice"), torch.no_grad(), intervene(model, own_output):
        model(tokens(23))
