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

from helpers.capture import assert_near
from helpers.tolerance import rounding
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


# Angles are products of a position and a frequency: both sides round them, by up to position × ε.
NEAR, FAR = rounding(2 * N), rounding(2 * (100 + N))


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


def test_half_split_equals_llama():
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    for parameters in ({"rope_type": "default", "rope_theta": 1e4}, YARN, LONG):
        for first, within in ((0, NEAR), (100, FAR)):
            positions = torch.arange(first, first + N)
            rope, cos, sin = llama_rope(parameters, positions)
            rotation = Rotation("half", 0, rope.inv_freq.float(), rope.attention_scaling)
            for x, theirs in zip((q, k), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
                assert_near(rotation.rotate(x, positions), theirs, within=within)
                assert_near(rotation.unrotate(theirs, positions), x, within=within)
            assert (rotation.scaling == 1) == (parameters["rope_type"] == "default")


def test_interleaved_equals_cohere():
    positions = torch.arange(N)
    inv_freq = geometric(D // 2).float()
    emb = torch.repeat_interleave(positions.float()[:, None] * inv_freq, 2, dim=-1)[None]
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    theirs = modeling_cohere.apply_rotary_pos_emb(q, k, emb.cos(), emb.sin())
    rotation = Rotation("interleaved", 0, inv_freq, 1.0)
    for x, turned in zip((q, k), theirs, strict=True):
        assert_near(rotation.rotate(x, positions), turned, within=NEAR)


def test_interleaved_equals_gptj():
    positions = torch.arange(N)
    table = modeling_gptj.create_sinusoidal_positions(64, D)
    sin, cos = table[positions][None].chunk(2, -1)
    x = normal(2, N, HEADS, D)
    theirs = modeling_gptj.apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    rotation = Rotation("interleaved", 0, geometric(D // 2).float(), 1.0)
    assert_near(rotation.rotate(x.transpose(1, 2), positions), theirs, within=NEAR)


def test_interleaved_in_half_out_equals_deepseek_v3():
    positions = torch.arange(N)
    _, cos, sin = llama_rope({"rope_type": "default", "rope_theta": 1e4}, positions)
    q, k = normal(2, HEADS, N, D), normal(2, 1, N, D, seed=1)
    for x, theirs in zip((q, k), modeling_deepseek_v3.apply_rotary_pos_emb_interleave(q, k, cos, sin), strict=True):
        found = identify_rotation(x, theirs, positions)
        assert (found.source_pairing, found.rotation.pairing) == ("interleaved", "half")
        ours = found.rotation.rotate(found.to_rotated_layout(x), positions)
        assert_near(ours, theirs, within=NEAR)


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
        assert_near(rotation.rotate(x, positions), turned, within=NEAR)
        found = identify_rotation(x, turned, positions)
        assert found.source_pairing == found.rotation.pairing == "interleaved"
        assert found.error < NEAR


def test_positions_of_each_sequence_broadcast_over_heads():
    positions = torch.stack([torch.arange(N), torch.arange(N) + 7])
    rotation = Rotation("half", 2, geometric(5), 1.3)
    x = normal(2, HEADS, N, D)
    together = rotation.rotate(x, positions[:, None])
    for row in range(2):
        assert_near(together[row], rotation.rotate(x[row], positions[row]), within=NEAR)
    assert torch.equal(together[..., :2], x[..., :2])
    assert torch.equal(together[..., 12:], x[..., 12:])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_moving_is_rotating_back_and_again(pairing, dtype):
    """Also where only some dimensions rotate, far into a text, and to other frequencies with another factor."""
    generator = torch.Generator().manual_seed(0)
    inv_freq = 10_000.0 ** (-torch.arange(4) / 4)
    own = Rotation(pairing, offset=2, inv_freq=inv_freq, scaling=1.25)
    other = Rotation(pairing, offset=2, inv_freq=inv_freq / 8, scaling=1.5)
    x = torch.randn(2, 3, 5, 12, generator=generator).to(dtype)
    at = 100_000 + torch.arange(5) + torch.tensor([[0], [7]])[:, None]
    to = torch.tensor([0, 3, 3, 90_000, 200_000])
    for rotation in (None, other):
        expected = (rotation or own).rotate(own.unrotate(x, at), to)
        found = own.moved(x, at, to, rotation)
        assert found.dtype == expected.dtype
        assert_near(found, expected, within=rounding(16, found.dtype))
        assert torch.equal(found[..., 10:].to(dtype), x[..., 10:])


def test_unrotate_undoes_rotate():
    positions = torch.arange(1000, 1000 + N)
    for pairing in ("half", "interleaved"):
        for dtype in (torch.float32, torch.float64):
            rotation = Rotation(pairing, 3, geometric(5).float(), 1.7)
            x = normal(2, HEADS, N, D, dtype=dtype)
            turned = rotation.rotate(x, positions)
            assert turned.dtype == dtype
            # The same angles there and back: two products and a sum each way.
            assert_near(rotation.unrotate(turned, positions), x, within=rounding(16, dtype))


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
def test_planted_rotation_is_found(source, target, offset, width):
    positions = torch.arange(N)
    cases = [(kind, torch.float32) for kind in ("geometric", "random", "slow", "still", "backwards")]
    for kind, dtype in [*cases, ("random", torch.float64), ("geometric", torch.bfloat16), ("still", torch.bfloat16)]:
        planted = random_frequencies(kind, width // 2, seed=width)
        x = normal(1, HEADS, N, D, seed=3, dtype=dtype)
        y = by_hand(x, source, target, offset, planted, 1.25, positions)
        found = identify_rotation(x, y, positions, widths=(width,))
        # Angles of up to 66 radians are float32 products, as in models, and values as precise as their type.
        coarse = dtype == torch.bfloat16
        within = rounding(4, dtype) if coarse else rounding(2 * 66)
        assert found.error < within, (kind, dtype)
        rotation = found.rotation
        assert abs(rotation.scaling - 1.25) < within, (kind, dtype)
        ours = rotation.rotate(found.to_rotated_layout(x), positions)
        assert_near(ours.double(), y.double(), within=within)
        if kind in ("geometric", "random") and not coarse:
            # A plane that does not turn has no orientation and may be left out of the found width.
            assert (rotation.pairing, found.source_pairing, rotation.offset) == (target, source, offset)
            assert rotation.planes == width // 2
            torch.testing.assert_close(rotation.inv_freq.double(), planted, atol=rounding(64), rtol=0)


def test_frequencies_without_a_live_buffer_hold_at_4096():
    """Found on 23 tokens, to a thousandth of a radian at position 4,096; from half precision to a hundredth."""
    positions = torch.arange(N)
    cases = [(base, torch.float32) for base in (10000.0, 500000.0, 1e6, 10.0, 12345.0)]
    cases += [(base, dtype) for base in (1e4, 5e5) for dtype in (torch.bfloat16, torch.float16)]
    for base, dtype in cases:
        planted = geometric(32, base)
        x = normal(1, 4 if dtype == torch.float32 else 2, N, 64, seed=5, dtype=dtype)
        y = by_hand(x, "interleaved", "interleaved", 0, planted, 1.0, positions)
        found = identify_rotation(x, y, positions)
        off = float((found.rotation.inv_freq.double() - planted).abs().max()) * 4096
        assert off < (1e-3 if dtype == torch.float32 else 1e-2), (base, dtype)


def test_live_frequencies_win_over_the_estimate_whichever_way_they_turn():
    live = [
        LiveFrequencies(geometric(8, 777.7).float(), 1.0),
        LiveFrequencies(geometric(8).float() * 1.0001, 1.0),
    ]
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D)
    for sign in (1, -1):
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


def test_what_is_no_rotation_leaves_a_large_error():
    positions = torch.arange(N)
    rotation = Rotation("half", 0, geometric(8).float(), 1.0)
    for seed in range(5):
        x = normal(1, HEADS, N, D, seed=seed)
        y = rotation.rotate(x, positions)
        wrong = {
            "noise": normal(1, HEADS, N, D, seed=seed + 100),
            "permuted": y[..., torch.randperm(D, generator=torch.Generator().manual_seed(seed))],
            "squared angle": rotation.rotate(x, positions**2),
            "per-head scale": y * torch.tensor([1.0, 1.1, 1.2]).view(1, 3, 1, 1),
        }
        for kind, values in wrong.items():
            assert identify_rotation(x, values, positions).error > 1e-2, (kind, seed)


def test_data_that_is_not_finite_leaves_an_error_that_no_bound_admits():
    positions = torch.arange(N)
    x = normal(1, HEADS, N, D)
    for bad in (torch.nan, torch.inf):
        y = Rotation("half", 0, geometric(8).float(), 1.0).rotate(x, positions)
        y[0, 0, 5] = bad
        assert not identify_rotation(x, y, positions).error <= 1e-2
    zeros = torch.zeros(1, HEADS, N, D)
    assert identify_rotation(zeros, zeros, positions).error == 0


GLOBAL, LOCAL = geometric(8, 1e6).float(), geometric(8).float()


def planted(inv_freq, *, dtype=torch.float32, dead=(), seed=0):
    """Tensors before and after a rotation by half, with planes that hold nothing."""
    x = normal(1, HEADS, N, D, seed=seed, dtype=dtype)
    for plane in dead:
        x[..., [plane, plane + D // 2]] = 0
    return x, Rotation("half", 0, inv_freq, 1.0).rotate(x, torch.arange(N)).to(dtype)


def test_planes_without_energy_are_taken_from_the_live_frequencies():
    live = [LiveFrequencies(LOCAL, 1.0), LiveFrequencies(GLOBAL, 1.0)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dead in ((3,), (0, 1, 2, 7), tuple(range(1, 7))):
            for true in (GLOBAL, LOCAL):
                x, y = planted(true, dtype=dtype, dead=dead)
                found = identify_rotation(x, y, torch.arange(N), live=live)
                assert torch.equal(found.rotation.inv_freq, true), (dtype, dead)
                assert found.error < (NEAR if dtype == torch.float32 else rounding(4, dtype)), (dtype, dead)


def test_planes_without_energy_follow_the_law_of_the_others():
    for dead in ((3,), (0, 5), (1, 2, 3, 4)):
        x, y = planted(LOCAL, dead=dead)
        found = identify_rotation(x, y, torch.arange(N))
        # A law of the other frequencies: a wrong one is off by more than 1e-2.
        torch.testing.assert_close(found.rotation.inv_freq, LOCAL, rtol=1e-5, atol=0)


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


def test_dimensions_that_do_not_rotate_are_no_slow_planes():
    """Interleaved pairs on the first half of a head, as GLM has them: a wider rotation by the same law looks alike."""
    inv_freq = geometric(32).float()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = normal(1, 2, N, 128, dtype=dtype)
        y = x.clone()
        y[..., :64] = Rotation("interleaved", 0, inv_freq, 1.0).rotate(x[..., :64], torch.arange(N)).to(dtype)
        found = identify_rotation(x, y, torch.arange(N), live=[LiveFrequencies(inv_freq, 1.0)])
        assert torch.equal(found.rotation.inv_freq, inv_freq), dtype
