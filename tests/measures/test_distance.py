"""Brute force, identity, parity and end-to-end tests of controlled distance.

Brute force: every number against a dense table made by rotating q to distance d and k to 0 with the model's own
rotation, and against sums over complex planes. Identity: planted additive and multiplicative heads. Parity: the real
logits of captured models, SciPy's rank correlation.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import rankdata, spearmanr

from helpers.capture import run, shared, tokens
from helpers.tolerance import rounding
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.distance import DistanceConfig
from wherewhat.measures.distance.controlled import (
    controlled_distance,
    distance_grid,
    layer_scores,
    scale_queries,
    scramble_phases,
    spaced_queries,
    turn,
)
from wherewhat.measures.distance.distance_measurement import DistanceMeasurement
from wherewhat.measures.measurement import Text, measure_text
from wherewhat.measures.tensors import centred_ranks, cosine

MODELS = ["llama", "gptj", "gpt_neox:partial", "llama:yarn", "deepseek_v3", "qwen3", "gemma2"]
DISTANCES = [0, 1, 2, 4, 8, 16, 22, 46]
QUERIES = [11, 17, 22]


@functools.cache
def captured(name: str) -> list[LayerAttention]:
    return run(shared(name), tokens(23))


def rotated(name: str) -> LayerAttention:
    return next(layer for layer in captured(name) if layer.rotation is not None)


def random_qk(heads=4, kv_heads=2, n=30, d=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, n, d, generator=generator, dtype=torch.float64)
    return q, torch.randn(kv_heads, n, d, generator=generator, dtype=torch.float64)


def rope(planes=6, *, pairing="half", offset=0, scaling=1.0, base=100.0):
    # Powers of two times whole numbers up to 2²⁴ are exact in float32, as the model's product of angles is.
    inv_freq = (base ** (-torch.arange(planes) / planes) * 2**12).round() / 2**12
    return Rotation(pairing, offset, inv_freq, scaling)


ROTATIONS = [
    rope(8),
    rope(8, pairing="interleaved"),
    rope(5, offset=6, scaling=1.3),
    rope(3, pairing="interleaved", offset=2, scaling=0.8),
]


def dense(q, k, rotation, i, keys, distances, scale):
    """``L[h, k, d]``, rotating the query to d and the keys to 0."""
    groups = q.shape[0] // k.shape[0]
    at_zero = rotation.rotate(k[:, keys].double(), torch.zeros(len(keys))).repeat_interleave(groups, 0)
    turned = torch.stack([rotation.rotate(q[:, i : i + 1].double(), torch.tensor([float(d)])) for d in distances], -1)
    return scale * (at_zero @ turned[:, 0])


def dense_numbers(table, real_table):
    """Everything by its definition; ``real_table`` ``(heads, m, m)`` holds the table at every real distance."""
    grand = table.mean((1, 2), keepdim=True)
    f, g = table.mean(1, keepdim=True), table.mean(2, keepdim=True)
    total = (table - grand).square().sum((1, 2))
    interaction = (table - f - g + grand).square().sum((1, 2))
    logits = real_table.diagonal(dim1=1, dim2=2)
    component = logits - real_table.mean(1)
    profiles = (table - f).mT  # (heads, distances, m)

    def centre(x):
        return (x - x.mean(-1, keepdim=True))[:, None]

    def spearman(x, y):
        return torch.tensor([[spearmanr(p, r[0]).statistic for p in ps] for ps, r in zip(x.tolist(), y, strict=True)])

    real, raw = centre(component), centre(logits)
    cos = (profiles * real).sum(-1) / profiles.norm(dim=-1) / real.norm(dim=-1)
    return {
        "additive_share": 1 - interaction / total,
        "distance_share": (f - grand).square().sum((1, 2)) * table.shape[1] / total,
        "key_share": (g - grand).square().sum((1, 2)) * table.shape[2] / total,
        "key_constancy": 1 - interaction / (table - f).square().sum((1, 2)),
        "curve": f[:, 0],
        "drift": (profiles - real).norm(dim=-1) / real.norm(dim=-1),
        "shape_drift": 1 - cos.square(),
        "logit_drift": (profiles - raw).norm(dim=-1) / raw.norm(dim=-1),
        "rank_correlation": spearman(profiles, real),
        "logit_rank_correlation": spearman(profiles, raw),
        "rank_correlation_reference": spearman(profiles, profiles[:, :1]),  # the first distance is 0
    }


def check_against_dense(
    q, k, rotation, *, scale, queries, distances, positions, visible=None, rtol=1e-9, atol=1e-10, ranks=0.0
):
    """``ranks`` is what two near-equal logits that change places may change in a correlation of ranks."""
    found = controlled_distance(
        q, k, rotation, scale=scale, queries=queries, distances=distances, positions=positions, visible=visible
    )
    rows = []
    for row, i in enumerate(queries):
        keys = torch.arange(i + 1) if visible is None else visible[row].nonzero()[:, 0]
        real = (positions[i] - positions[keys]).tolist()
        rows.append(
            dense_numbers(dense(q, k, rotation, i, keys, distances, scale), dense(q, k, rotation, i, keys, real, scale))
        )
    for name in rows[0]:
        each = torch.stack([row[name] for row in rows])
        about = max(atol, ranks) if "rank" in name else atol
        torch.testing.assert_close(getattr(found, name), each.mean(0).double(), rtol=rtol, atol=about, msg=name)
    shares = torch.stack([row["additive_share"] for row in rows])
    torch.testing.assert_close(found.additive_share_spread, shares.std(0), rtol=rtol, atol=max(atol, 1e-9))
    return found


def test_equals_dense_tables(subtests):
    q, k = random_qk()
    options = {"scale": 0.3, "queries": [15, 20, 29], "distances": DISTANCES, "positions": torch.arange(30)}
    for rotation in ROTATIONS:
        with subtests.test(rotation=rotation):
            check_against_dense(q, k, rotation, **options)
    # With gaps and a window.
    positions = torch.arange(30) * 3 + 100
    index = torch.arange(30)
    visible = torch.stack([(index <= i) & (index > i - 7) for i in (15, 29)])
    check_against_dense(
        q, k, rope(8), scale=1.0, queries=[15, 29], distances=[0, 3, 9], positions=positions, visible=visible
    )


@pytest.mark.parametrize("name", MODELS)
def test_captured_models_equal_dense_tables_and_their_own_logits(name):
    """The model's rotation takes its angles in float32."""
    layer = replace(rotated(name), softcap=None, mask=Mask(causal=True))
    q, k, options = layer.q[0], layer.k[0], {"scale": layer.scale}
    ranks = 12 / 12**2 / len(QUERIES)  # one pair changes a correlation over m keys by at most 12 / m²
    found = check_against_dense(
        q,
        k,
        layer.rotation,
        queries=QUERIES,
        distances=DISTANCES,
        positions=layer.positions,
        rtol=1e-4,
        atol=1e-5,
        ranks=ranks,
        **options,
    )
    torch.testing.assert_close(found.distance_share + found.key_share, found.additive_share, rtol=1e-10, atol=1e-10)
    for values in (found.additive_share, found.key_constancy, found.shape_drift):
        assert float(values.min()) >= -1e-10
        assert float(values.max()) <= 1 + 1e-10
    scores = layer.attn_scores()[0].double()
    # If all keys are copies of one, the mean logit at that key's real distance is the model's.
    for i, j in ((22, 0), (17, 9), (12, 12)):
        copies = k[:, [j] * 23]
        found = controlled_distance(q, copies, layer.rotation, queries=[i], distances=[i - j, i - j + 1], **options)
        torch.testing.assert_close(found.curve[:, 0], scores[:, i, j], rtol=1e-4, atol=1e-4)
    found = controlled_distance(q, k, layer.rotation, queries=[22], distances=[0, 5], **options)
    profile = dense(q, k, layer.rotation, 22, torch.arange(23), [5], layer.scale)[..., 0]
    expected = [spearmanr(profile[head], scores[head, 22]).statistic for head in range(layer.heads)]
    assert found.logit_rank_correlation[:, 1].tolist() == pytest.approx(expected, abs=12 / 23**2)


def one_query(query, keys, real, rotation, grid, kept, reference):
    """Values of one query ``(kv_heads, groups, 1, d)`` and the keys ``(kv_heads, m, d)`` that it sees."""
    mean_key = keys.mean(-2, keepdim=True)
    centred = keys - mean_key

    def profile(turned, keys):
        kv_heads, groups, rows, d = turned.shape
        return (turned.reshape(kv_heads, groups * rows, d) @ keys.mT).view(kv_heads, groups, rows, -1)

    def relative(difference, target):
        return difference.norm(dim=-1) / target.norm(dim=-1)

    turned = turn(query, grid, rotation)
    curve = (turned * mean_key[:, None]).sum(-1)
    inner, gram = turned[:, :, kept], (centred.mT @ centred)[:, None]
    mean = inner.mean(-2, keepdim=True)
    interaction = (((inner - mean) @ gram) * (inner - mean)).sum((-1, -2))
    by_key = inner.shape[-2] * ((mean @ gram) * mean).sum((-1, -2))
    by_distance = keys.shape[1] * (curve[:, :, kept] - curve[:, :, kept].mean(-1, keepdim=True)).square().sum(-1)
    total = interaction + by_key + by_distance
    component = profile(query, turn(centred, -real, rotation))
    logits = component + profile(query, turn(mean_key, -real, rotation))
    component, logits = (x - x.mean(-1, keepdim=True) for x in (component, logits))
    pinned = profile(turn(query, grid.new_tensor([reference]), rotation), centred)
    profiles = profile(turned, centred)
    ranks, *others = (obvious_ranks(x) for x in (profiles, component, logits, pinned))
    return {
        "additive_share": (by_key + by_distance) / total,
        "distance_share": by_distance / total,
        "key_share": by_key / total,
        "key_constancy": by_key / (by_key + interaction),
        "curve": curve,
        "drift": relative(profiles - component, component),
        "shape_drift": 1 - cosine(profiles, component).square(),
        "rank_correlation": cosine(ranks, others[0]),
        "logit_drift": relative(profiles - logits, logits),
        "logit_rank_correlation": cosine(ranks, others[1]),
        "rank_correlation_reference": cosine(ranks, others[2]),
    }


def obvious_ranks(x, visible=None):
    """SciPy's ranks of the visible entries around their mean, and 0 for the others."""
    visible = torch.ones_like(x, dtype=torch.bool) if visible is None else visible
    ranks = torch.zeros(x.flatten(0, -2).shape, dtype=torch.float64)
    for row, values, shown in zip(ranks, x.flatten(0, -2), visible.flatten(0, -2), strict=True):
        row[shown] = torch.from_numpy(rankdata(values[shown])) - (int(shown.sum()) + 1) / 2
    return ranks.view(x.shape)


@pytest.mark.parametrize("reference", [0, 4, 7])
def test_all_queries_at_once_equal_one_at_a_time(reference):
    q, k = random_qk(heads=6, kv_heads=3, n=70, d=18)
    queries, grid = [20, 43, 44, 69], torch.tensor([0.0, 1, 4, 32, 69, 140], dtype=torch.float64)
    positions, index = torch.arange(70) * 2 + 5, torch.arange(70)
    visible = torch.stack([(index <= i) & (index > i - 30) & (index % 7 > 0) for i in queries])
    rotation, kept = rope(5, offset=6, scaling=1.3), grid <= 60
    found = controlled_distance(
        q,
        k,
        rotation,
        distances=grid,
        queries=queries,
        scale=0.3,
        positions=positions,
        visible=visible,
        within=60,
        reference=reference,
    )
    scaled = scale_queries(q, rotation, 0.3)
    rows = [
        one_query(
            scaled[:, i].view(3, 2, 1, 18), k[:, seen], positions[i] - positions[seen], rotation, grid, kept, reference
        )
        for i, seen in zip(queries, visible, strict=True)
    ]
    for name in rows[0]:
        each = torch.stack([row[name].flatten(0, 1) for row in rows])
        torch.testing.assert_close(getattr(found, name), each.mean(0), rtol=1e-10, atol=1e-12, msg=name)
    shares = torch.stack([row["additive_share"].flatten() for row in rows])
    torch.testing.assert_close(found.additive_share_spread, shares.std(0), rtol=1e-9, atol=1e-12)


def test_table_is_the_sum_over_complex_planes():
    q, k = random_qk(heads=2, kv_heads=2)
    rotation = rope(5, offset=6, scaling=1.3)
    left, right = rotation.pairs.unbind(-1)
    z = torch.complex(q[..., left], q[..., right])[:, 20, None] * torch.complex(k[..., left], k[..., right]).conj()
    d = torch.tensor([0.0, 1, 5, 11], dtype=torch.float64)
    waves = torch.exp(1j * rotation.inv_freq.double()[:, None] * d)
    plain = (q[:, 20, None, :6] * k[..., :6]).sum(-1, keepdim=True)
    table = 0.3 * (1.3**2 * (z @ waves).real + plain)[:, :21]
    expected = dense(q, k, rotation, 20, torch.arange(21), d.tolist(), 0.3)
    torch.testing.assert_close(table, expected, rtol=1e-10, atol=1e-10)
    found = controlled_distance(q, k, rotation, scale=0.3, queries=[20], distances=d)
    torch.testing.assert_close(found.curve, table.mean(1), rtol=1e-10, atol=1e-10)


def test_blocks_change_nothing():
    q, k = random_qk(heads=16, kv_heads=16, n=200)
    options = {"queries": [150, 199], "distances": range(0, 200, 3)}
    whole = controlled_distance(q, k, rope(8), block_mib=4096, **options)
    parts = controlled_distance(q, k, rope(8), block_mib=1, **options)
    for name in ("rank_correlation", "drift", "rank_correlation_reference"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-10, atol=1e-12)


def test_keys_that_differ_outside_the_planes_only_are_additive():
    q, k = random_qk(heads=2, kv_heads=1)
    rotation = rope(5, offset=6)
    k[..., 6:] = k[:, :1, 6:]  # every key the same in the planes, whatever in the rest
    found = controlled_distance(q, k, rotation, queries=[20, 29], distances=DISTANCES)
    ones = torch.ones(2, len(DISTANCES), dtype=torch.float64)
    torch.testing.assert_close(found.additive_share, ones[:, 0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found.key_constancy, ones[:, 0], rtol=0, atol=1e-10)
    assert float(found.drift.max()) < 1e-10
    assert float(found.shape_drift.max()) < 1e-10
    assert float(found.rank_correlation.min()) > 1 - 1e-9
    assert float(found.rank_correlation_reference.min()) > 1 - 1e-9
    assert float(found.logit_rank_correlation.max()) < 0.99  # the distance curve is in the real logits
    assert bool((found.distance_share > 0.01).all())
    assert bool((found.key_share > 0.01).all())


def test_keys_with_one_fast_plane_and_no_mean_are_multiplicative():
    """L = |q| |k| cos(θd + φ_k): with phases all round and distances over whole turns nothing is additive."""
    n = 64
    phases = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    k = torch.stack([phases.cos(), phases.sin()], -1)[None]
    rotation = Rotation("half", 0, torch.tensor([2 * math.pi / 8]), 1.0)
    found = controlled_distance(torch.ones_like(k), k, rotation, queries=[n - 1], distances=range(16))
    assert float(found.additive_share) < 1e-9
    assert float(found.key_constancy) < 1e-9
    # Over keys the real logits are a wave of 7 periods, a profile one of 1: they have nothing in common.
    assert float(found.shape_drift.min()) == pytest.approx(1)
    assert float(found.drift.min()) == pytest.approx(math.sqrt(2))


def test_a_small_multiplicative_part_takes_its_share():
    """A key term of variance 1 and an interaction of variance s²/2 over whole turns: share 1 / (1 + s²/2)."""
    n, strength = 64, 0.4
    phases = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    term = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    k = torch.stack([strength * phases.cos(), strength * phases.sin(), term], -1)[None]
    q = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).expand(1, n, 3)
    rotation = Rotation("half", 0, torch.tensor([2 * math.pi / 8]), 1.0)
    found = controlled_distance(q, k, rotation, queries=[n - 1], distances=range(16))
    assert float(found.additive_share) == pytest.approx(1 / (1 + strength**2 / 2), abs=1e-6)


def test_numbers_do_not_depend_on_scale_or_a_constant():
    q, k = random_qk(d=18)
    options = {"queries": [15, 29], "distances": DISTANCES}
    before = controlled_distance(q, k, rope(8), **options)
    q[..., 16:] = 1.0
    k[..., 16:] = 5.0
    constant = controlled_distance(q, k, rope(8), scale=7.0, **options)
    q[..., 16:] = 0.0
    without = controlled_distance(q, k, rope(8), **options)
    for name in ("additive_share", "key_share", "drift", "shape_drift", "rank_correlation", "logit_drift"):
        torch.testing.assert_close(getattr(constant, name), getattr(without, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(constant.curve, 7 * (without.curve + 10), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(before.additive_share, without.additive_share)


def test_within_bounds_the_shares_but_not_the_curves():
    q, k = random_qk()
    inner = controlled_distance(q, k, rope(8), queries=[29], distances=[0, 1, 4])
    outer = controlled_distance(q, k, rope(8), queries=[29], distances=[0, 1, 4, 60], within=10)
    torch.testing.assert_close(inner.additive_share, outer.additive_share, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(inner.drift, outer.drift[:, :3], rtol=1e-9, atol=1e-10)
    assert outer.within.tolist() == [True, True, True, False]


def test_constant_logits_have_no_shares():
    q, k = random_qk()
    q[1] = 0
    found = controlled_distance(q, k, rope(8), queries=[20, 29], distances=DISTANCES)
    undefined = [False, True, False, False]
    for values in (found.additive_share, found.key_constancy, found.rank_correlation[:, 2], found.drift[:, 2]):
        assert values.isnan().tolist() == undefined


def test_ranks_with_ties_equal_scipy():
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 6, (40, 2, 25), generator=generator).double()
    x[20:] = torch.randn(20, 2, 25, generator=generator, dtype=torch.float64)
    x[0, 0] = 3.0  # all tied: undefined
    found = cosine(centred_ranks(x)[:, 0], centred_ranks(x)[:, 1])
    expected = torch.tensor([spearmanr(a, b).statistic if a.std() > 0 else torch.nan for a, b in x])
    torch.testing.assert_close(found, expected.double(), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("length", [1, 2, 25, 5000])
def test_ranks_of_visible_entries_equal_scipy(length):
    """Of different numbers, of ties, and of numbers that differ in their last bits; also in rows that are long."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(7, length, generator=generator, dtype=torch.float64)
    close = 1 + torch.randint(3, (7, length), generator=generator) * 2.0**-52
    for values in (x, x.round(), close, torch.cat([x[:3], -close[3:]])):
        visible = torch.rand(7, length, generator=generator) < 0.7
        visible[:2] = torch.tensor([[True], [False]])
        assert torch.equal(centred_ranks(values), obvious_ranks(values))
        assert torch.equal(centred_ranks(values, visible), obvious_ranks(values, visible))


def test_scrambling_keeps_magnitudes_and_what_does_not_rotate():
    _, k = random_qk()
    close = {"rtol": 1e-10, "atol": 1e-10}
    for rotation in ROTATIONS:
        out = scramble_phases(k, rotation, seed=4)
        left, right = rotation.pairs.unbind(-1)
        sizes, expected = (torch.hypot(x[..., left], x[..., right]) for x in (out, k))
        torch.testing.assert_close(sizes, expected, **close)
        still = [x for x in range(16) if x not in rotation.pairs.flatten().tolist()]
        torch.testing.assert_close(out[..., still], k[..., still], **close)
        assert torch.equal(out, scramble_phases(k, rotation, seed=4))
        assert not torch.equal(out, scramble_phases(k, rotation, seed=5))
        deviations = scramble_phases(k + 9, rotation, keep_mean=True, seed=4) - (k + 9).mean(1, keepdim=True)
        centred = k - k.mean(1, keepdim=True)
        torch.testing.assert_close(deviations, scramble_phases(centred, rotation, seed=4), **close)
        assert torch.equal(scramble_phases(torch.stack([2 * k, k]), rotation, seed=4)[1], out)


def test_scrambled_slow_planes_stay_additive_and_fast_ones_do_not():
    q, k = random_qk(n=400)
    options = {"queries": [399], "distances": [0, 1, 2, 4, 8, 16, 32]}
    slow, fast = (Rotation("half", 0, torch.full((8,), f), 1.0) for f in (1e-4, 1.9))
    assert float(controlled_distance(q, scramble_phases(k, slow), slow, **options).additive_share.min()) > 0.999
    assert float(controlled_distance(q, scramble_phases(k, fast), fast, **options).additive_share.max()) < 0.5


def test_grids_and_queries():
    assert distance_grid(11) == [0, 1, 2, 4, 8, 11]
    assert distance_grid(8) == [0, 1, 2, 4, 8]
    assert distance_grid(511, beyond=(2, 4))[-4:] == [256, 511, 1024, 2048]
    assert distance_grid(8, per_octave=2) == [0, 1, 2, 3, 4, 6, 8]
    assert spaced_queries(512, 16)[0] == 256
    assert spaced_queries(512, 16)[-1] == 511
    assert len(spaced_queries(512, 16)) == 16
    assert spaced_queries(8, 100) == [4, 5, 6, 7]


class Replay:
    """A subject that shows layers captured before."""

    def __init__(self, layers):
        self.layers = layers

    def run(self, ids, reducer, *, logits=False):
        for layer in self.layers:
            reducer(layer)


def measured(layers, ids, config):
    return measure_text(DistanceMeasurement(), Replay(layers), Text(ids), config)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "smollm3", "mistral"])
def test_measurement_of_captured_models(name):
    layers = captured(name)
    config = DistanceConfig(queries=4, beyond=(2,))
    found = measured(layers, tokens(23), config)
    assert [s.layer for s in found.layers] == [a.layer for a in layers if a.rotation is not None]
    for scores, attention in zip(found.layers, [a for a in layers if a.rotation is not None], strict=True):
        for metric in DistanceMeasurement.metrics:
            assert scores.heads[metric.name].shape == (attention.heads,)
            assert scores.heads[metric.control].shape == (attention.heads,)
            assert bool(scores.heads[metric.name].isfinite().all())
        count = scores.curves["distances"].values.numel()
        for curve in scores.curves.values():
            assert tuple(curve.values.shape) == ((attention.heads, count) if len(curve.axes) == 2 else (count,))
        assert scores.curves["distances"].values.tolist() == [0, 1, 2, 4, 8, 16, 22, 46]
    again = measured(layers, tokens(23), config)
    assert all(
        torch.equal(a.heads[n], b.heads[n]) for a, b in zip(found.layers, again.layers, strict=True) for n in a.heads
    )


def test_window_bounds_what_counts():
    """A layer that sees 8 keys is judged on distances below 8."""
    (scores,) = layer_scores(rotated("mistral"), DistanceConfig(queries=4))
    inside = scores.curves["within"].values
    assert scores.curves["distances"].values[inside].tolist() == [0, 1, 2, 4]
    expected = scores.curves["drift"].values[:, inside].mean(-1)
    torch.testing.assert_close(scores.heads["drift"].float(), expected.float(), rtol=rounding(32), atol=0)


def test_positions_are_the_models():
    """Positions moved by a constant change nothing; positions spread out are other distances."""
    layer = rotated("llama")
    (same,) = layer_scores(layer, DistanceConfig(queries=4))
    rotation = layer.rotation

    def moved(positions):
        turned = {
            "rot_q": rotation.rotate(layer.q, positions),
            "rot_k": rotation.rotate(layer.k, positions),
        }
        return layer_scores(replace(layer, positions=positions, **turned), DistanceConfig(queries=4))[0]

    shifted, spread = moved(layer.positions + 50), moved(layer.positions * 4)
    torch.testing.assert_close(shifted.heads["drift"], same.heads["drift"], rtol=1e-3, atol=1e-4)
    assert spread.curves["distances"].values[-1] == 88


def test_what_cannot_be_measured_and_senseless_options_are_refused(subtests):
    with pytest.raises(MeasureError, match="no layer of this model rotates"):
        measured(captured("gpt2"), tokens(23), DistanceConfig())
    with pytest.raises(MeasureError, match="7 tokens"):
        measured(run(shared("llama"), tokens(7)), tokens(7), DistanceConfig())
    for name, value in (
        ("queries", 0),
        ("per_octave", 0),
        ("per_octave", 65),
        ("block_mib", 0),
        ("beyond", (1,)),
        ("seed", -1),
    ):
        with subtests.test(name=name, value=value), pytest.raises(ConfigError, match=name):
            DistanceConfig(**{name: value})


def test_wrong_tensors_are_refused_in_one_line(subtests):
    q, k = random_qk()
    fine = {"q": q, "k": k, "rotation": rope(8), "distances": [0, 1], "queries": [20]}
    for change, words in (
        ({"q": torch.zeros(30, 16)}, "must be"),
        ({"q": torch.zeros(4, 30, 8)}, "agree in dimension"),
        ({"q": torch.zeros(4, 31, 16)}, "a key per query"),
        ({"q": torch.zeros(3, 30, 16)}, "evenly"),
        ({"q": torch.full((4, 30, 16), torch.nan)}, "NaN or Inf"),
        ({"k": torch.full((2, 30, 16), torch.inf)}, "NaN or Inf"),
        ({"rotation": rope(9)}, "do not fit"),
        ({"rotation": Rotation("half", 0, torch.zeros(4), 1.0)}, "no plane"),
        ({"distances": [3]}, "at least 2"),
        ({"distances": [3, 3.0]}, "at least 2"),
        ({"distances": [0, torch.nan]}, "finite"),
        ({"queries": []}, "at least one"),
        ({"queries": [30]}, "from 0 to 29"),
        ({"queries": [1]}, "sees 2 keys"),
        ({"positions": torch.arange(29)}, "one per key"),
        ({"visible": torch.ones(2, 30, dtype=torch.bool)}, "queries, keys"),
        ({"within": 0.5}, "up to 0.5"),
    ):
        with subtests.test(words=words, change=list(change)):
            with pytest.raises(MeasureError, match=words) as caught:
                controlled_distance(**fine | change)
            assert "\n" not in str(caught.value)
