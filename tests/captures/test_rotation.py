"""Parity and brute force: ``Rotation`` rotates as Hugging Face's functions do, and is found again from data."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4

from wherewhat.captures.rotation import LiveFrequencies, Rotation, identify_rotation

N, D, HEADS = 23, 16, 3
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.05 * i for i in range(D // 2)],
    "long_factor": [1.0 + 0.5 * i for i in range(D // 2)],
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def geometric(planes, base=10000.0):
    return 1.0 / base ** (torch.arange(planes, dtype=torch.float64) / planes)


def llama_rope(parameters, positions):
    config = LlamaConfig(
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        head_dim=D,
        max_position_embeddings=128,
        rope_parameters=parameters,
    )
    rope = modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rope(torch.zeros(1), positions[None])
    return rope, cos, sin


@pytest.mark.parametrize(
    "parameters", [{"rope_type": "default", "rope_theta": 1e4}, YARN, LONG], ids=lambda p: p["rope_type"]
)
@pytest.mark.parametrize("first", [0, 100])
def test_half_split_equals_llama(parameters, first):
    positions = torch.arange(first, first + N)
    rope, cos, sin = llama_rope(parameters, positions)
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    rotation = Rotation("half", 0, rope.inv_freq.float(), rope.attention_scaling)
    for x, theirs in zip((q, k), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.allclose(rotation.rotate(x, positions), theirs, atol=2e-6, rtol=0)
        assert torch.allclose(rotation.unrotate(theirs, positions), x, atol=2e-6, rtol=0)
    if parameters["rope_type"] != "default":
        assert rotation.scaling != 1


def test_interleaved_equals_cohere():
    positions = torch.arange(N)
    inv_freq = geometric(D // 2).float()
    emb = torch.repeat_interleave(positions.float()[:, None] * inv_freq, 2, dim=-1)[None]
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    theirs = modeling_cohere.apply_rotary_pos_emb(q, k, emb.cos(), emb.sin())
    rotation = Rotation("interleaved", 0, inv_freq, 1.0)
    for x, turned in zip((q, k), theirs, strict=True):
        assert torch.allclose(rotation.rotate(x, positions), turned, atol=2e-6, rtol=0)


def test_interleaved_equals_gptj():
    positions = torch.arange(N)
    table = modeling_gptj.create_sinusoidal_positions(64, D)
    sin, cos = table[positions][None].chunk(2, -1)
    x = normal(2, N, HEADS, D)
    theirs = modeling_gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    rotation = Rotation("interleaved", 0, geometric(D // 2).float(), 1.0)
    assert torch.allclose(rotation.rotate(x.transpose(1, 2), positions), theirs, atol=2e-6, rtol=0)


def test_interleaved_in_half_out_equals_deepseek_v3():
    positions = torch.arange(N)
    _, cos, sin = llama_rope({"rope_type": "default", "rope_theta": 1e4}, positions)
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    for x, theirs in zip((q, k), modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q, k, cos, sin), strict=True):
        found = identify_rotation(x, theirs, positions)
        assert (found.source_pairing, found.rotation.pairing) == ("interleaved", "half")
        ours = found.rotation.rotate(found.to_rotated_layout(x), positions)
        assert torch.allclose(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("function", [modeling_deepseek_v2.apply_rotary_emb, modeling_llama4.apply_rotary_emb])
def test_complex_is_interleaved(function):
    positions = torch.arange(N)
    inv_freq = geometric(D // 2).float()
    turns = torch.polar(torch.ones(N, D // 2), positions.float()[:, None] * inv_freq)[None]
    tokens_second = function is modeling_llama4.apply_rotary_emb
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    if tokens_second:
        theirs = [t.transpose(1, 2) for t in function(q.transpose(1, 2), k.transpose(1, 2), turns)]
    else:
        theirs = function(q, k, turns)
    rotation = Rotation("interleaved", 0, inv_freq, 1.0)
    for x, turned in zip((q, k), theirs, strict=True):
        assert torch.allclose(rotation.rotate(x, positions), turned, atol=2e-6, rtol=0)
        found = identify_rotation(x, turned, positions)
        assert found.source_pairing == found.rotation.pairing == "interleaved"
        assert found.error < 1e-6


def test_positions_of_each_sequence_broadcast_over_heads():
    positions = torch.stack([torch.arange(N), torch.arange(N) + 7])
    rotation = Rotation("half", 2, geometric(5), 1.3)
    x = normal(2, HEADS, N, D)
    together = rotation.rotate(x, positions[:, None])
    for row in range(2):
        assert torch.equal(together[row], rotation.rotate(x[row], positions[row]))
    assert torch.equal(together[..., :2], x[..., :2])
    assert torch.equal(together[..., 12:], x[..., 12:])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unrotate_undoes_rotate(pairing, dtype):
    rotation = Rotation(pairing, 3, geometric(5).float(), 1.7)
    x = normal(2, HEADS, N, D, dtype=dtype)
    positions = torch.arange(1000, 1000 + N)
    turned = rotation.rotate(x, positions)
    assert turned.dtype == dtype
    assert torch.allclose(
        rotation.unrotate(turned, positions), x, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14
    )


def by_hand(x, pairing_in, pairing_out, offset, inv_freq, scaling, positions):
    """The obvious slow rotation of ``x``: one plane, one token at a time, in float64."""
    planes = len(inv_freq)
    source = x.double()
    out = source.clone()
    for f, omega in enumerate(inv_freq.tolist()):
        a, b = (f, f + planes) if pairing_in == "half" else (2 * f, 2 * f + 1)
        c, d = (f, f + planes) if pairing_out == "half" else (2 * f, 2 * f + 1)
        for t, position in enumerate(positions.tolist()):
            u, v = source[..., t, offset + a], source[..., t, offset + b]
            cos, sin = scaling * math.cos(position * omega), scaling * math.sin(position * omega)
            out[..., t, offset + c] = u * cos - v * sin
            out[..., t, offset + d] = v * cos + u * sin
    return out.to(x.dtype)


def random_frequencies(kind, planes, seed):
    g = torch.Generator().manual_seed(seed)
    if kind == "geometric":
        return geometric(planes)
    if kind == "random":
        return torch.rand(planes, generator=g, dtype=torch.float64) * 3
    if kind == "slow":
        return geometric(planes, 1e8)
    if kind == "backwards":
        return -geometric(planes)
    still = torch.rand(planes, generator=g, dtype=torch.float64)
    still[planes // 2 :] = 0
    return still


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["geometric", "random", "slow", "still", "backwards"])
@pytest.mark.parametrize(
    ("source", "target", "offset", "width"),
    [
        ("half", "half", 0, D),
        ("interleaved", "interleaved", 0, D),
        ("interleaved", "half", 0, D),
        ("half", "half", 0, 8),
        ("interleaved", "interleaved", 0, 4),
        ("half", "half", 8, 8),
        ("interleaved", "interleaved", 10, 6),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_planted_rotation_is_found(kind, source, target, offset, width, dtype):
    planes = width // 2
    planted = random_frequencies(kind, planes, seed=width)
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D, seed=3, dtype=dtype)
    y = by_hand(x, source, target, offset, planted, 1.25, positions)
    found = identify_rotation(x, y, positions, widths=(width,))
    coarse = dtype == torch.bfloat16
    # The angle is a float32 product, as in models: near 60 radians its rounding shows.
    assert found.error < (2e-2 if coarse else 5e-6)
    rotation = found.rotation
    assert abs(rotation.scaling - 1.25) < (2e-2 if coarse else 1e-5)
    ours = rotation.rotate(found.to_rotated_layout(x), positions)
    assert torch.allclose(ours.double(), y.double(), atol=6e-2 if coarse else 3e-5, rtol=0)
    if kind in ("geometric", "random") and not coarse:
        # A plane that does not turn has no orientation and may be left out of the found width.
        assert (rotation.pairing, found.source_pairing, rotation.offset) == (target, source, offset)
        assert rotation.planes == planes
        assert torch.allclose(rotation.inv_freq.double(), planted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6, 10.0, 12345.0])
def test_frequencies_without_a_live_buffer_hold_at_4096(base):
    planes = 32
    planted = geometric(planes, base)
    positions = torch.arange(N)
    x = normal(1, 4, N, 2 * planes, seed=5)
    y = by_hand(x, "interleaved", "interleaved", 0, planted, 1.0, positions)
    found = identify_rotation(x, y, positions)
    assert float((found.rotation.inv_freq.double() - planted).abs().max()) * 4096 < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", [1e4, 5e5])
def test_frequencies_without_a_live_buffer_hold_at_4096_in_half_precision(dtype, base):
    planes = 32
    planted = geometric(planes, base)
    positions = torch.arange(N)
    x = normal(1, 2, N, 2 * planes, seed=5, dtype=dtype)
    y = by_hand(x, "interleaved", "interleaved", 0, planted, 1.0, positions)
    found = identify_rotation(x, y, positions)
    assert float((found.rotation.inv_freq.double() - planted).abs().max()) * 4096 < 1e-2


@pytest.mark.parametrize("sign", [1, -1])
def test_live_frequencies_win_over_the_estimate_whichever_way_they_turn(sign):
    live = [
        LiveFrequencies(geometric(8, 777.7).float(), 1.0),
        LiveFrequencies(geometric(8).float() * 1.0001, 1.0),
    ]
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D)
    y = by_hand(x, "half", "half", 0, sign * live[1].inv_freq.double(), 1.0, positions)
    found = identify_rotation(x, y, positions, live=live)
    assert torch.equal(found.rotation.inv_freq, sign * live[1].inv_freq)


def test_found_frequencies_do_not_follow_later_changes_of_the_buffer():
    live = LiveFrequencies(geometric(8).float(), 1.0)
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D)
    y = Rotation("half", 0, live.inv_freq, 1.0).rotate(x, positions)
    found = identify_rotation(x, y, positions, live=[live])
    before = found.rotation.inv_freq.clone()
    live.inv_freq.mul_(2)
    assert torch.equal(found.rotation.inv_freq, before)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["noise", "permuted", "squared angle", "per-head scale"])
def test_what_is_no_rotation_leaves_a_large_error(kind, seed):
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D, seed=seed)
    y = Rotation("half", 0, geometric(8).float(), 1.0).rotate(x, positions)
    if kind == "noise":
        y = normal(1, HEADS, N, D, seed=seed + 100)
    elif kind == "permuted":
        y = y[..., torch.randperm(D, generator=torch.Generator().manual_seed(seed))]
    elif kind == "squared angle":
        y = Rotation("half", 0, geometric(8).float(), 1.0).rotate(x, positions**2)
    else:
        y = y * torch.tensor([1.0, 1.1, 1.2]).view(1, 3, 1, 1)
    assert identify_rotation(x, y, positions).error > 1e-2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_data_that_is_not_finite_leaves_an_error_that_no_bound_admits(bad):
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D)
    y = Rotation("half", 0, geometric(8).float(), 1.0).rotate(x, positions)
    y[0, 0, 5] = bad
    assert not identify_rotation(x, y, positions).error <= 1e-2


def test_zeros_are_survived():
    x = torch.zeros(1, HEADS, N, D)
    assert identify_rotation(x, x, torch.arange(N)).error == 0


GLOBAL, LOCAL = geometric(8, 1e6).float(), geometric(8).float()


def planted(inv_freq, *, dtype=torch.float32, dead=(), seed=0):
    """Tensors before and after a rotation by half, with planes that hold nothing."""
    x = normal(1, HEADS, N, D, seed=seed, dtype=dtype)
    for plane in dead:
        x[..., [plane, plane + D // 2]] = 0
    return x, Rotation("half", 0, inv_freq, 1.0).rotate(x, torch.arange(N)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dead", [(3,), (0, 1, 2, 7), tuple(range(1, 7))])
@pytest.mark.parametrize("true", [GLOBAL, LOCAL], ids=["global", "local"])
def test_planes_without_energy_are_taken_from_the_live_frequencies(dtype, dead, true):
    x, y = planted(true, dtype=dtype, dead=dead)
    live = [LiveFrequencies(LOCAL, 1.0), LiveFrequencies(GLOBAL, 1.0)]
    found = identify_rotation(x, y, torch.arange(N), live=live)
    assert torch.equal(found.rotation.inv_freq, true)
    assert found.error < (1e-2 if dtype != torch.float32 else 1e-6)


@pytest.mark.parametrize("dead", [(3,), (0, 5), (1, 2, 3, 4)])
def test_planes_without_energy_follow_the_law_of_the_others(dead):
    x, y = planted(LOCAL, dead=dead)
    found = identify_rotation(x, y, torch.arange(N))
    assert torch.allclose(found.rotation.inv_freq, LOCAL, rtol=1e-5)


def test_an_outlier_decides_no_more_than_another_plane():
    """The first plane turns alike under both: a thousand times larger, it must not hide the others."""
    x = normal(1, HEADS, N, D, dtype=torch.bfloat16)
    x[..., [0, D // 2]] *= 1000
    y = Rotation("half", 0, GLOBAL, 1.0).rotate(x, torch.arange(N)).bfloat16()
    live = [LiveFrequencies(LOCAL, 1.0), LiveFrequencies(GLOBAL, 1.0)]
    found = identify_rotation(x, y, torch.arange(N), live=live)
    assert torch.equal(found.rotation.inv_freq, GLOBAL)
    wrong = identify_rotation(x, Rotation("half", 0, LOCAL * 1.01, 1.0).rotate(x, torch.arange(N)), torch.arange(N))
    assert not torch.equal(wrong.rotation.inv_freq, GLOBAL)


def test_an_outlier_hides_no_wrong_plane():
    x = normal(1, HEADS, N, D)
    x[..., [0, D // 2]] *= 1e5
    right = Rotation("half", 0, LOCAL, 1.0)
    y = right.rotate(x, torch.arange(N))
    y[..., 3] *= 1.01
    assert identify_rotation(x, y, torch.arange(N)).error > 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dimensions_that_do_not_rotate_are_no_slow_planes(dtype):
    """Interleaved pairs on the first half of a head, as GLM has them: a wider rotation by the same law looks alike."""
    inv_freq = geometric(32).float()
    x = normal(1, 2, N, 128, dtype=dtype)
    y = x.clone()
    y[..., :64] = Rotation("interleaved", 0, inv_freq, 1.0).rotate(x[..., :64], torch.arange(N)).to(dtype)
    found = identify_rotation(x, y, torch.arange(N), live=[LiveFrequencies(inv_freq, 1.0)])
    assert torch.equal(found.rotation.inv_freq, inv_freq)
