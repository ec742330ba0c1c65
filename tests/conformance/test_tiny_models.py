"""Identity and parity tests of the tiny models: what must hold before anything is proved on them."""

from __future__ import annotations

import functools

import pytest
import torch

from conformance.odd_ones import NOT_BUILDABLE, transformers_version
from conformance.tiny_models import NotBuildable, Tiny, build, causal_lm_types, not_causal, variants

pytestmark = pytest.mark.slow

LENGTH = 23
BUILDABLE = [name for name in causal_lm_types() if name not in NOT_BUILDABLE] + variants()

# No softmax attention, or an implementation that does not hand out its weights.
WITHOUT_WEIGHTS = {
    "falcon_mamba": "state space",
    "mamba": "state space",
    "mamba2": "state space",
    "reformer": "attends within chunks",
    "reformer:local": "attends within chunks",
    "rwkv": "linear attention",
    "xlstm": "recurrent",
}
# Where the eager code and the type's own choice, SDPA, compute different things.
EAGER_DIFFERS = {"falcon:alibi": "eager adds the ALiBi bias twice, in the mask and to the logits"}
if transformers_version() < (5, 21):
    EAGER_DIFFERS |= dict.fromkeys(("gemma2", "vaultgemma"), "SDPA drops the soft cap")
if transformers_version() < (5, 18):
    EAGER_DIFFERS |= {"moshi": "eager has no mask"}

# Of each: how many keys the last of 23 tokens sees, layer by layer.
VISIBLE_KEYS = {
    "cohere2": [8, 23, 8, 23],
    "exaone4": [8, 23, 8, 23],
    "gemma2": [8, 23, 8, 23],
    "gemma3_text": [8, 23, 8, 23],
    "gemma3_text:window": [4, 4, 4, 4, 4, 23],
    "gpt_neo": [23, 8, 23, 8],
    "gpt_oss": [8, 23, 8, 23],
    "llama": [23, 23, 23, 23],
    "llama4_text": [7, 7, 7, 23],
    "mistral": [8, 8, 8, 8],
    "mistral:full": [23, 23, 23, 23],
    "modernbert-decoder": [23, 8, 23, 8],
    "olmo3": [8, 23, 8, 23],
    "phi3": [8, 8, 8, 8],
    "qwen2": [23, 23, 23, 23],
    "qwen2:window": [23, 23, 8, 8],
    "qwen3": [23, 23, 8, 8],
    "recurrent_gemma": [8],
    "smollm3": [23, 23, 23, 8],
    "starcoder2": [8, 8, 8, 8],
}


@functools.cache
def built(name: str) -> Tiny:
    return build(name)


@functools.cache
def built_again(name: str) -> Tiny:
    """The model with eager attention, built where memory that nothing initialises is filled with NaN."""
    before = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            tiny = build(name, attn_implementation="eager")
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(before, torch.random.get_rng_state())
    return tiny


@functools.cache
def eager(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and those of the returned tensors that are softmax weights (1, heads, n, keys), run eagerly."""
    tiny = built_again(name)
    with torch.no_grad():
        output = tiny.model(**tiny.inputs(LENGTH), use_cache=False, output_attentions=True)
    tensors = [a for a in (getattr(output, "attentions", None) or ()) if a is not None and a.ndim == 4]
    return output.logits, [a for a in tensors if a.min() >= 0 and a.sum(-1).max() < 1 + 1e-4]


@functools.cache
def own_logits(name: str) -> torch.Tensor:
    """Logits with the type's own choice of attention."""
    return logits(built(name), built(name).inputs(LENGTH)["input_ids"])


def logits(tiny: Tiny, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tiny.model(input_ids=ids, use_cache=False).logits


def test_types_are_all_those_of_transformers():
    types = causal_lm_types()
    assert types == sorted(set(types))
    assert {"llama", "gpt2", "gptj", "bloom", "falcon", "mpt", "deepseek_v3", "gpt_oss"} <= set(types)


@pytest.mark.parametrize("name", sorted(set(NOT_BUILDABLE) & set(causal_lm_types())))
def test_what_cannot_be_built_says_why_in_one_line(name: str):
    with pytest.raises(NotBuildable) as caught:
        build(name)
    assert caught.value.reason
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("name", ["no_such_type", "llama:no_such_variant"])
def test_unknown_names_are_refused(name: str):
    with pytest.raises(KeyError, match="no_such"):
        build(name)


@pytest.mark.parametrize("name", BUILDABLE)
def test_forward_gives_finite_logits(name: str):
    model = built(name).model
    out = own_logits(name)
    assert out.shape == (1, LENGTH, model.config.get_text_config(decoder=True).vocab_size)
    assert out.isfinite().all()
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", BUILDABLE)
def test_weights_depend_on_the_seed_alone(name: str):
    first, again = built(name).model.state_dict(), built_again(name).model.state_dict()
    assert first.keys() == again.keys()
    assert [key for key in first if not torch.equal(first[key], again[key])] == []
    assert [key for key in first if first[key].isnan().any()] == []


def test_another_seed_gives_other_weights():
    first, other = build("llama", seed=0).model, build("llama", seed=1).model
    assert not any(torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", BUILDABLE)
def test_later_tokens_do_not_change_earlier_logits(name: str):
    tiny = built(name)
    ids = tiny.inputs(LENGTH)["input_ids"]
    changed = ids.clone()
    changed[0, -1] = 20 if ids[0, -1] != 20 else 21
    difference = (own_logits(name) - logits(tiny, changed)).abs()
    assert difference[:, -1].max() > 0.1
    if name in not_causal():
        assert difference[:, :-1].max() > 1e-4, f"now causal, no longer: {not_causal()[name]}"
    else:
        assert difference[:, :-1].max() < 1e-4


@pytest.mark.parametrize("name", BUILDABLE)
def test_eager_agrees_with_the_types_own_choice(name: str):
    difference = (eager(name)[0] - own_logits(name)).abs().max()
    if name in EAGER_DIFFERS:
        assert difference > 1e-2, f"now the same, no longer: {EAGER_DIFFERS[name]}"
    else:
        assert difference < 1e-4


@pytest.mark.parametrize("name", BUILDABLE)
def test_attention_is_neither_uniform_nor_one_hot(name: str):
    weights = eager(name)[1]
    assert bool(weights) == (name not in WITHOUT_WEIGHTS)
    for layer in weights:
        rows = layer[0, :, LENGTH // 2 :].flatten(0, 1).double()
        # Over the keys a row sees, log weights are logits up to a constant.
        spread = torch.stack([row[row > 0].log().std() for row in rows if (row > 0).sum() > 2]).mean()
        assert 0.4 < spread < 4.0


@pytest.mark.parametrize("name", sorted(set(VISIBLE_KEYS) & set(BUILDABLE)))
def test_windows_are_crossed(name: str):
    assert [int((layer[0, 0, -1] > 0).sum()) for layer in eager(name)[1]] == VISIBLE_KEYS[name]


def test_inputs_are_plain_tokens_of_the_length_asked_for():
    tiny = built("llama")
    ids = tiny.inputs(40, seed=3)["input_ids"]
    assert ids.shape == (1, 40)
    assert ids.min() > 2
    assert torch.equal(ids, tiny.inputs(40, seed=3)["input_ids"])
    assert not torch.equal(ids, tiny.inputs(40, seed=4)["input_ids"])
