"""Brute force and parity: ``LayerAttention`` in blocks of rows equals the dense whole, and q and k the model's own."""

from dataclasses import replace

import pytest
import torch

from helpers.capture import assert_near, run, shared, tiny, tokens
from helpers.tolerance import rounding
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation

BLOCKS = [slice(0, 5), slice(5, 6), slice(6, 23)]


def attention(*, heads=6, kv_heads=2, n=23, m=23, d=8, batch=2, dtype=torch.float32, **options):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    defaults = {
        "layer": 0,
        "name": "made up",
        "rot_q": normal(batch, heads, n, d),
        "rot_k": normal(batch, kv_heads, m, d),
        "value": normal(batch, kv_heads, m, d),
        "output": normal(batch, n, heads, d),
        "scale": 0.7,
        "mask": Mask(causal=True),
        "rotation": None,
        "positions": torch.arange(m),
    }
    return LayerAttention(**{**defaults, **options})


def by_hand(a: LayerAttention):
    """Logits and weights by loops over batch, head, query and key, in float64."""
    scores = torch.zeros(a.rot_q.shape[0], a.heads, a.n, a.m, dtype=torch.float64)
    weights = torch.zeros_like(scores)
    bias, visible = a.bias(), a.visible().expand(scores.shape)
    bias = torch.zeros(1) if bias is None else bias
    bias = bias.double().expand(scores.shape)
    for b in range(scores.shape[0]):
        for h in range(a.heads):
            kv = h // (a.heads // a.kv_heads)
            for i in range(a.n):
                row = a.scale * (a.rot_k[b, kv].double() @ a.rot_q[b, h, i].double())
                if a.softcap is not None:
                    row = a.softcap * torch.tanh(row / a.softcap)
                scores[b, h, i] = row + bias[b, h, i]
                exp = torch.where(visible[b, h, i], scores[b, h, i].exp(), 0.0)
                total = exp.sum() + (0.0 if a.sinks is None else a.sinks[h].double().exp())
                weights[b, h, i] = exp / total if bool(visible[b, h, i].any()) else 0.0
    return scores, weights


CASES = {
    "multi-head": {"kv_heads": 6},
    "grouped": {},
    "multi-query": {"kv_heads": 1},
    "soft-cap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
    "alibi": {"mask": Mask(causal=True, added=(torch.arange(23.0) * torch.linspace(0.1, 1, 6).view(1, 6, 1, 1),))},
    "window": {"mask": Mask(causal=True, window=4)},
    "padding": {"mask": Mask(causal=True, visible_only=((torch.arange(23) > 3).view(1, 1, 1, 23),))},
    "cache": {"m": 31},
    "all at once": {
        "softcap": 2.0,
        "sinks": torch.linspace(-2, 2, 6),
        "mask": Mask(causal=True, window=9, added=(torch.arange(31.0) * torch.linspace(0.1, 1, 6).view(1, 6, 1, 1),)),
        "m": 31,
    },
    "wide values": {"value": torch.zeros(2, 2, 23, 12)},
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_rows_equal_the_dense_whole(case):
    dtypes = (
        [torch.float32] if case not in ("grouped", "all at once") else [torch.float32, torch.float64, torch.bfloat16]
    )
    for dtype in dtypes:
        a = attention(dtype=dtype, **CASES[case])
        scores, weights = by_hand(a)
        # Sinks and ALiBi are given in float32.
        precision = torch.float64 if dtype == torch.float64 and case != "all at once" else torch.float32
        # A logit is a sum of products, then a soft-cap and a bias; a weight a quotient of sums of their exponentials.
        keys = a.rot_k.double().abs().repeat_interleave(a.heads // a.kv_heads, 1)
        size = a.scale * float((a.rot_q.double().abs() @ keys.mT).max())
        off = rounding(a.rot_q.shape[-1] + 4, precision) * max(size, float(scores.abs().max()))
        assert a.pattern().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for part, whole, within in (
            (a.attn_scores, scores, off),
            (a.pattern, weights, 2 * off + rounding(a.m, precision)),
        ):
            parts = (part(), torch.cat([part(rows) for rows in BLOCKS], 2))
            for ours in parts:
                torch.testing.assert_close(ours.double(), whole, atol=within, rtol=0)
            torch.testing.assert_close(part(slice(2, 20, 3)).double(), whole[:, :, 2:20:3], atol=within, rtol=0)
        blind = ~a.visible().expand(weights.shape).any(-1)
        assert bool(blind.any()) == (case == "padding")
        assert bool((a.pattern()[blind] == 0).all())


def test_rotation_is_undone_at_the_positions_of_queries_and_keys():
    rotation = Rotation("half", 0, torch.tensor([1.0, 0.3, 0.01, 0.0]), 1.2)
    positions = torch.stack([torch.arange(31), torch.arange(31) + 100])
    a = attention(m=31, rotation=rotation, positions=positions)
    for b in range(2):
        # Turned by one angle there and back: two products and a sum each way.
        assert_near(rotation.rotate(a.q[b], positions[b, 8:]), a.rot_q[b], within=rounding(16))
        assert_near(rotation.rotate(a.k[b], positions[b]), a.rot_k[b], within=rounding(16))


def projected(model, names, ids):
    """Outputs of the named submodules in one plain pass."""
    found = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _m, _i, out, name=name: found.__setitem__(name, out))
        for name in names
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [found[name] for name in names]


def same(ours, theirs):
    # Turned there and back by angles of up to 22 radians, which models and Rotation round alike or by 22 ε.
    assert_near(ours, theirs, within=rounding(32))


@pytest.mark.parametrize("kind", ["llama", "llama:yarn", "gptj", "phi:partial", "cohere:default"])
def test_q_and_k_are_what_the_projections_give(kind):
    model, ids = shared(kind), tokens(batch=2)
    layers = run(model, ids)
    assert [a.layer for a in layers] == [0, 1, 2, 3]
    for a in layers:
        q, k = projected(model, [f"{a.name}.q_proj", f"{a.name}.k_proj"], ids)
        same(a.q, q.unflatten(-1, (a.heads, -1)).transpose(1, 2))
        same(a.k, k.unflatten(-1, (a.kv_heads, -1)).transpose(1, 2))
        assert float((a.q - a.rot_q).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_q_and_k_are_what_their_norms_give(kind):
    model, ids = shared(kind), tokens(batch=2)
    for a in run(model, ids):
        q, k = projected(model, [f"{a.name}.q_norm", f"{a.name}.k_norm"], ids)
        if q.ndim == 3:
            q, k = q.unflatten(-1, (a.heads, -1)), k.unflatten(-1, (a.kv_heads, -1))
        same(a.q, q.transpose(1, 2))
        same(a.k, k.transpose(1, 2))


def test_q_and_k_of_fused_and_latent_projections():
    ids = tokens()
    for a in run(neox := shared("gpt_neox:partial"), ids):
        (qkv,) = projected(neox, [f"{a.name}.query_key_value"], ids)
        q, k, _ = qkv.view(1, 23, a.heads, -1).transpose(1, 2).chunk(3, -1)
        same(a.q, q)
        same(a.k, k)
    for a in run(deepseek := shared("deepseek_v3"), ids):
        (q,) = projected(deepseek, [f"{a.name}.q_b_proj"], ids)
        still, turned = q.view(1, 23, a.heads, -1).transpose(1, 2).split([16, 8], -1)
        # DeepSeek-V3 reorders interleaved pairs into halves while it rotates.
        same(a.q, torch.cat([still, turned[..., 0::2], turned[..., 1::2]], -1))


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "granite", "gemma2", "gpt_oss"])
def test_pattern_is_the_models_own_eager_weights(kind):
    ids = tokens(31)
    layers = run(shared(kind), ids)
    eager = tiny(kind, attn_implementation="eager")
    with torch.no_grad():
        theirs = eager(input_ids=ids, use_cache=False, output_attentions=True).attentions
    for a, weights in zip(layers, theirs, strict=True):
        assert_near(a.pattern(), weights)


# Same token everywhere: values are equal at every position, so attention changes nothing whatever its weights,
# and queries and keys before rotation must not depend on the position in any layer.
SAME_TOKEN = ["llama", "llama:yarn", "llama:dynamic", "gptj", "phi", "cohere2", "deepseek_v3", "bloom"]
OTHERS = (
    "llama:longrope qwen3 gemma2 gemma3_text gpt_neox codegen cohere glm4 olmo2 granite stablelm smollm3 deepseek_v2 "
    "nanochat falcon mpt roformer"
)


@pytest.mark.parametrize("kinds", [SAME_TOKEN, pytest.param(OTHERS.split(), marks=pytest.mark.slow)], ids=len)
def test_same_token_everywhere_gives_same_q_and_k_everywhere(kinds, subtests):
    for kind in kinds:
        with subtests.test(kind=kind):
            # Dynamic frequencies depend on the longest text so far, which other tests may have made longer.
            model = tiny(kind) if kind == "llama:dynamic" else shared(kind)
            layers = run(model, torch.full((1, 23), 77))
            assert len(layers) == 4
            for x in (x for a in layers for x in (a.q, a.k)):
                assert_near(x, x[:, :, :1].expand_as(x))


def test_precision_before_rotation():
    """Float32 at least where something is turned back, and the model's own where nothing is."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        plain = attention(dtype=dtype)
        assert plain.q is plain.rot_q
        assert plain.k is plain.rot_k
        turned = replace(plain, rotation=Rotation("half", 0, torch.ones(4), 1.0))
        assert turned.q.dtype == turned.k.dtype == torch.promote_types(dtype, torch.float32)
