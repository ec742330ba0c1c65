"""Brute force, identity and end-to-end: plane statistics against dense definitions, and the bound, never violated."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from helpers.capture import run, shared, tokens
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import band_width, fit_axes
from wherewhat.measures.axes.solver import Band
from wherewhat.measures.measurement import Text, measure_text
from wherewhat.measures.planes import PlanesConfig
from wherewhat.measures.planes.coordinates import Planes
from wherewhat.measures.planes.planes_measurement import PlanesMeasurement
from wherewhat.measures.planes.statistics import layer_scores, plane_stats, residual_bound
from wherewhat.measures.planes.sums import band_sums, band_totals
from wherewhat.measures.tensors import chunk_size, chunked

# Beyond one chunk and not a multiple of it, with a window that cuts chunks.
SHAPES = [(4, 2, 150, 12, None), (3, 3, 131, 12, 70), (2, 1, 33, 12, 3), (2, 2, 4, 12, None)]
ROTATIONS = {
    "half": Rotation("half", 0, 50.0 ** (-torch.arange(6) / 6), 1.0),
    "interleaved": Rotation("interleaved", 0, 50.0 ** (-torch.arange(6) / 6), 1.0),
    "partial at the end, scaled": Rotation("half", 4, torch.tensor([1.0, 0.2, 0.01, 0.0]), 1.3),
    "backwards": Rotation("interleaved", 2, -torch.tensor([3.1, 0.3]), 1.0),
    "none": None,
}


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rotated(rotation, x):
    """Rotate ``(heads, n, d)`` at positions 0, 1, … in float64 throughout."""
    if rotation is None:
        return x
    out = x.clone()
    first, second = rotation.pairs.T
    z = torch.complex(x[..., first], x[..., second])
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rotation.inv_freq.double()
    z = z * torch.polar(torch.full_like(angle, rotation.scaling), angle)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def problem(rotation, shape, *, seed=0, mean=1.0):
    """Queries and keys before rotation, with something in common."""
    heads, kv_heads, n, d, window = shape
    q = random(heads, n, d, seed=seed) + mean * random(heads, 1, d, seed=seed + 1)
    k = random(kv_heads, n, d, seed=seed + 2) + mean * random(kv_heads, 1, d, seed=seed + 3)
    return q, k, window


def dense(q, k, window):
    """Logits ``(heads, n, n)`` and where they are looked at, ``(n, n)``."""
    n = q.shape[1]
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    return q @ k.mT, (distance >= 0) & (distance < (window or n))


def groups_of(rotation, d):
    """Dimensions of each plane, the unrotated ones last."""
    groups = [] if rotation is None else rotation.pairs.tolist()
    turned = {x for group in groups for x in group}
    rest = [x for x in range(d) if x not in turned]
    return [*groups, rest] if rest else groups


def test_chunks_are_the_tokens_in_order_and_then_zeros():
    for n, size in ((7, 3), (6, 3), (3, 3)):
        x = random(2, 4, n, 5, seed=n, dtype=torch.float32)
        chunks = chunked(x, size)
        assert chunks.is_contiguous()
        assert chunks.dtype == torch.float64
        for place in range(len(chunks) * size):
            expected = x[:, :, place].double() if place < n else torch.zeros(2, 4, 5, dtype=torch.float64)
            assert torch.equal(chunks[place // size, :, :, place % size], expected)


def test_band_sums_equal_dense_sums():
    for shape in SHAPES:
        q, k, window = problem(None, shape)
        for head, key in ((q[:2], k[0]), (q[:1], k[-1])):
            band = Band(shape[2], window or shape[2], key.device)
            chunks = [chunked(x, chunk_size(shape[2], shape[3])) for x in (head, key)]
            sums = band_sums(*chunks, band)
            logits, seen = dense(head, key[None], window)
            parts = head[:, :, None] * key * seen[..., None]  # (heads, n, n, d)
            for got, expected in (
                (sums.rows, (logits * seen).sum(-1)),
                (sums.columns, (logits * seen).sum(-2)),
                (band_totals(*chunks, band), parts.sum((1, 2))),
                (sums.products, (parts * logits[..., None]).sum((1, 2))),
                (sums.squares, (logits * seen).square().sum((1, 2))),
                (band_sums(*chunks, band, by_dimension=False).squares, (logits * seen).square().sum((1, 2))),
            ):
                torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_statistics_equal_dense_definitions(rotation, subtests):
    for shape, dtype in itertools.product(SHAPES, (torch.float64, torch.float32)):
        with subtests.test(shape=shape, dtype=dtype):
            check_statistics(rotation, shape, dtype)


def check_statistics(rotation, shape, dtype):
    q, k, window = problem(rotation, shape)
    d = shape[3]
    turned_q, turned_k = rotated(rotation, q).to(dtype), rotated(rotation, k).to(dtype)
    stats = plane_stats(turned_q, turned_k, Planes.of(rotation, d), window=window)
    close = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    turned_q, turned_k = turned_q.double(), turned_k.double()
    k = k.repeat_interleave(shape[0] // shape[1], 0)
    logits, seen = dense(turned_q, turned_k, window)
    centred = logits[:, seen] - logits[:, seen].mean(1, keepdim=True)
    for f, group in enumerate(groups_of(rotation, d)):
        part = dense(turned_q[..., group], turned_k[..., group], window)[0][:, seen]
        share = ((part - part.mean(1, keepdim=True)) * centred).sum(1) / centred.square().sum(1)
        torch.testing.assert_close(stats.share[:, f], share, **close)
        for name, x in (("q", q[..., group]), ("k", k[..., group])):
            size = x.norm(dim=-1)
            unit = (x / size[..., None]).mean(1)
            torch.testing.assert_close(getattr(stats, f"{name}_size")[:, f], size.mean(1), **close)
            torch.testing.assert_close(getattr(stats, f"{name}_concentration")[:, f], unit.norm(dim=-1), **close)
            alignment = x.mean(1).norm(dim=-1) / size.mean(1)
            torch.testing.assert_close(getattr(stats, f"{name}_alignment")[:, f], alignment, **close)
            if rotation is not None and f < rotation.planes:
                off = getattr(stats, f"{name}_direction")[:, f] - torch.atan2(unit[:, 1], unit[:, 0])
                torch.testing.assert_close(torch.cos(off), torch.ones_like(off), rtol=0, atol=1e-6)
    torch.testing.assert_close(stats.share.sum(-1), torch.ones(shape[0], dtype=torch.float64), rtol=1e-9, atol=0)


def test_slow_planes_are_those_that_turn_less_than_once():
    periods = torch.tensor([2.0, 99.0, 101.0, 1e6])
    rotation = Rotation("half", 0, 2 * math.pi / periods, 1.0)
    q, k = random(1, 100, 10, seed=1), random(1, 100, 10, seed=2)
    stats = plane_stats(q, k, Planes.of(rotation, 10))
    assert stats.slow.tolist() == [False, False, True, True, True]
    torch.testing.assert_close(stats.period[:4], periods.double(), rtol=1e-6, atol=0)
    assert math.isinf(float(stats.period[4]))
    torch.testing.assert_close(stats.slow_dominance, stats.share[:, 2:].sum(-1), rtol=0, atol=1e-12)
    assert plane_stats(q, k, Planes.of(rotation, 10), window=50).slow.tolist() == [False, True, True, True, True]


def dense_bound(q, k, rotation, window):
    """Bound and causes by the definitions of ``docs/residual-bound.md``, with n × n matrices; q, k before rotation."""
    heads = q.shape[0]
    k = k.repeat_interleave(heads // k.shape[0], 0)
    logits, seen = dense(rotated(rotation, q), rotated(rotation, k), window)
    weight_q, weight_k = seen.sum(1).double(), seen.sum(0).double()
    mean_q = (q * weight_q[:, None]).sum(1, keepdim=True) / weight_q.sum() + 0 * q
    mean_k = (k * weight_k[:, None]).sum(1, keepdim=True) / weight_k.sum() + 0 * k

    def term(x, y):
        return dense(rotated(rotation, x), rotated(rotation, y), window)[0] * seen

    def less_rows(w):
        return (w - w.sum(-1, keepdim=True) / weight_q[:, None]) * seen

    def less_columns(w):
        return (w - w.sum(-2, keepdim=True) / weight_k) * seen

    causes = [
        less_rows(term(q - mean_q, mean_k)),
        less_columns(term(mean_q, k - mean_k)),
        less_columns(less_rows(term(q - mean_q, k - mean_k))),
    ]
    left = sum(causes)
    for d in range(window or q.shape[1]):
        diagonal = left.diagonal(-d, 1, 2)
        diagonal -= diagonal.mean(-1, keepdim=True)
    values = logits[:, seen]
    tss = (values - values.mean(1, keepdim=True)).square().sum(1)
    return [x.square().sum((1, 2)) / tss for x in (left, *causes)]


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_bound_and_causes_equal_dense_definitions(rotation):
    for shape in SHAPES:
        q, k, window = problem(rotation, shape)
        found = residual_bound(rotated(rotation, q), rotated(rotation, k), Planes.of(rotation, shape[3]), window=window)
        expected = dense_bound(q, k, rotation, window)
        for name, value in zip(("bound", "turning_q", "turning_k", "content"), expected, strict=True):
            most = 1 if name == "bound" else math.inf
            torch.testing.assert_close(getattr(found, name), value.clamp_max(most), rtol=1e-8, atol=1e-11)


def assert_holds(rot_q, rot_k, planes, window=None):
    """The bound is above the exact residual share and below what its causes allow, up to rounding."""
    fit = fit_axes(rot_q.double(), rot_k.double(), window=window)
    found = residual_bound(rot_q, rot_k, planes, window=window)
    logits, seen = dense(rot_q.double(), rot_k.double(), window)
    rounding = 1e-9 * (1 + logits[:, seen].square().sum(1) / fit.tss)
    defined = fit.r.isfinite()
    assert torch.equal(defined, found.bound.isfinite())
    assert bool(((1 - fit.r.square() <= found.bound + rounding) | ~defined).all())
    assert bool(((found.bound <= found.from_causes + rounding) | ~defined).all())
    return found


def planted(n, d, rotation):
    """Inputs made to strain the bound, before rotation, by kind."""
    q, k = random(2, n, d, seed=5), random(1, n, d, seed=6)
    ramp = torch.linspace(0, 1, n, dtype=torch.float64)[:, None]
    one = torch.zeros(n, 1, dtype=torch.float64)
    one[n // 2] = 1
    return {
        "noise": (q, k),
        "all tokens alike": (q[:, :1] + 1e-3 * q, k[:, :1] + 1e-3 * k),
        "one outlier": (q + 1e3 * one, k + 1e3 * one),
        "first token huge": (q, torch.cat([1e4 * k[:, :1], k[:, 1:]], 1)),
        "growing": (q * (5 * ramp).exp(), k * (-5 * ramp).exp()),
        "drifting mean": (q + 20 * ramp, k - 20 * ramp),
        "huge mean": (q + 1e3, k + 1e3),
        "only queries vary": (q, k[:, :1].expand_as(k)),
        "only keys vary": (q[:, :1].expand_as(q), k),
        "keys are queries": (q, q[:1]),
        "undone rotation": (_undo(rotation, q), _undo(rotation, k)),
        "few tokens differ": (q * (ramp > 0.9), k * (ramp < 0.1)),
    }


def _undo(rotation, x):
    """What, once rotated, is ``x``: content that turns against the positions."""
    back = None if rotation is None else Rotation(rotation.pairing, rotation.offset, -rotation.inv_freq, 1.0)
    return rotated(back, x)


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_bound_holds_for_planted_inputs(rotation, subtests):
    planes = Planes.of(rotation, 12)
    for kind, given in planted(67, 12, rotation).items():
        q, k = (rotated(rotation, x) for x in given)
        for window, dtype in itertools.product((None, 9), (torch.float64, torch.float32)):
            with subtests.test(kind=kind, window=window, dtype=dtype):
                assert_holds(q.to(dtype), k.to(dtype), planes, window)


def test_bound_holds_for_many_random_inputs():
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        n, planes, rest = (int(torch.randint(*span, (1,), generator=generator)) for span in ((4, 60), (1, 5), (0, 4)))
        rotation = Rotation("half", 0, torch.rand(planes, generator=generator) * 3.2, 1.0)
        shape = (2, 1, n, 2 * planes + rest, None)
        q, k, _ = problem(rotation, shape, seed=10 * seed, mean=float(4 * torch.rand(1, generator=generator)))
        assert_holds(rotated(rotation, q), rotated(rotation, k), Planes.of(rotation, shape[3]))


def test_bound_from_plane_statistics_alone():
    """The corollary: turning is at most Σ |mean| · spread · min(1, |θ|·width/√12) over planes."""
    rotation = Rotation("half", 0, torch.tensor([1.0, 0.1, 0.01, 0.001]), 1.0)
    q, k, _ = problem(rotation, (2, 1, 90, 8, None))
    found = residual_bound(rotated(rotation, q), rotated(rotation, k), Planes.of(rotation, 8))
    logits, seen = dense(rotated(rotation, q), rotated(rotation, k), None)
    values = logits[:, seen]
    spread = (values - values.mean(1, keepdim=True)).square().mean(1)
    turn = (rotation.inv_freq.double() * 90 / math.sqrt(12)).clamp_max(1)
    moments = {}
    for name, x, weight in (("q", q, seen.sum(1)), ("k", k.expand(2, -1, -1), seen.sum(0))):
        z = torch.complex(x[..., :4], x[..., 4:])
        share = (weight.double() / weight.sum())[:, None]
        mean = (z * share).sum(1, keepdim=True)
        moments[name] = mean[:, 0].abs(), ((z - mean).abs().square() * share).sum(1).sqrt()
    most_q = (moments["k"][0] * moments["q"][1] * turn).sum(-1).square() / spread
    most_k = (moments["q"][0] * moments["k"][1] * turn).sum(-1).square() / spread
    assert bool((found.turning_q <= most_q).all())
    assert bool((found.turning_k <= most_k).all())


def test_one_sided_content_is_additive_exactly_when_nothing_turns():
    still = Rotation("half", 0, torch.zeros(6), 1.0)
    for kind in ("only queries vary", "only keys vary"):
        for rotation in (still, None):
            found = residual_bound(*planted(50, 12, still)[kind], Planes.of(rotation, 12))
            assert float(torch.stack([found.bound, found.from_causes]).abs().max()) < 1e-12
        slow, slower = (
            residual_bound(*(rotated(r, x) for x in planted(50, 12, r)[kind]), Planes.of(r, 12)).from_causes
            for r in (Rotation("half", 0, torch.full((6,), theta), 1.0) for theta in (1e-4, 1e-5))
        )
        # Slow planes leave a residual that falls with the square of their speed.
        torch.testing.assert_close(slow / slower, torch.full((2,), 100.0).double(), rtol=5e-2, atol=0)


def test_alike_tokens_leave_only_a_distance_curve():
    rotation = ROTATIONS["half"]
    q, k = (random(h, 1, 12, seed=h).expand(-1, 80, -1).contiguous() for h in (2, 1))
    found = residual_bound(rotated(rotation, q), rotated(rotation, k), Planes.of(rotation, 12))
    assert float(found.bound.max()) < 1e-10
    stats = plane_stats(rotated(rotation, q), rotated(rotation, k), Planes.of(rotation, 12))
    for values in (stats.q_concentration, stats.k_alignment):
        torch.testing.assert_close(values, torch.ones(2, 6, dtype=torch.float64), rtol=0, atol=1e-9)


MODELS = [
    "llama",
    "gptj",
    "cohere2",
    "gpt_neox:partial",
    "gemma3_text",
    "deepseek_v3",
    "llama:yarn",
    "qwen3",
    "phi",
    "smollm3",
    "gpt2",
]


def test_bound_holds_on_every_head_of_models(subtests):
    for model_type in MODELS:
        with subtests.test(model=model_type):
            check_model(model_type)


def check_model(model_type):
    layers = run(shared(model_type), tokens(48))
    assert layers
    for attention in layers:
        (scores,) = layer_scores(attention, PlanesConfig())
        bound, actual = scores.heads["residual_bound"], scores.heads["residual_share"]
        assert bound.shape == (attention.heads,)
        width = band_width(attention)
        fit = fit_axes(attention.rot_q[0].double(), attention.rot_k[0].double(), window=width)
        torch.testing.assert_close(actual, 1 - fit.r.square(), rtol=1e-8, atol=1e-10)
        assert bool((actual <= bound + 1e-9).all())
        assert bool((bound <= 1).all())
        if attention.rotation is None:
            assert "slow_dominance" not in scores.heads
            assert not scores.curves
            assert float(scores.heads["turning_q"].max()) < 1e-9
            continue
        planes = Planes.of(attention.rotation, attention.rot_q.shape[-1])
        share = scores.curves["plane_share"]
        assert share.axes == ("head", "plane")
        assert share.values.shape == (attention.heads, planes.count)
        torch.testing.assert_close(share.values.sum(-1), torch.ones(attention.heads), rtol=0, atol=1e-5)
        # Magnitudes and phases are those before rotation, as capture gives them.
        z = planes.to_complex(planes.arrange(attention.q[0]))
        size = scores.curves["plane_q_size"].values
        torch.testing.assert_close(size, planes.size(z).mean(1).float(), rtol=1e-3, atol=1e-5)


class _Subject:
    def __init__(self, layers):
        self.layers = layers

    def run(self, ids, reducer, *, logits=False):
        for attention in self.layers:
            reducer(attention)


def test_measurement_mixes_layers_with_and_without_rotation():
    layers = run(shared("smollm3"), tokens(24))
    assert {layer.rotation is None for layer in layers} == {True, False}
    found = measure_text(PlanesMeasurement(), _Subject(layers), Text(tokens(24)), PlanesConfig(curves=False))
    assert len(found.layers) == len(layers)
    assert not any(layer.curves for layer in found.layers)
    named = {m.name for m in PlanesMeasurement.metrics}
    stored = {name for layer in found.layers for name in [*layer.heads, *layer.whole]}
    assert named | {m.control for m in PlanesMeasurement.metrics if m.control} <= stored


def test_what_cannot_be_measured_is_refused_in_one_line():
    with pytest.raises(MeasureError, match="no planes") as error:
        measure_text(PlanesMeasurement(), _Subject(run(shared("gpt2"), tokens(24))), Text(tokens(24)), PlanesConfig())
    assert "\n" not in str(error.value)
    attention = run(shared("llama"), tokens(24))[0]
    with pytest.raises(MeasureError, match="not consecutive"):
        layer_scores(replace(attention, positions=2 * attention.positions), PlanesConfig())
    with pytest.raises(MeasureError, match="24 keys for 20 queries"):
        layer_scores(replace(attention, rot_q=attention.rot_q[:, :, 4:]), PlanesConfig())
    with pytest.raises(MeasureError, match="dimension 11 of heads with 8"):
        Planes.of(ROTATIONS["half"], 8)


def test_constant_logits_have_no_shares_and_no_bound():
    planes = Planes.of(None, 4)
    q, k = torch.ones(1, 9, 4), torch.ones(1, 9, 4)
    assert bool(plane_stats(q, k, planes).share.isnan().all())
    assert bool(residual_bound(q, k, planes).bound.isnan().all())


def test_bad_input_is_refused(subtests):
    for q, k, window, message in (
        (torch.ones(2, 3, 4), torch.ones(1, 3, 4), None, "3 tokens"),
        (torch.ones(2, 9, 4), torch.ones(1, 8, 4), None, "same n and d"),
        (torch.ones(9, 4), torch.ones(9, 4), None, "heads, n, d"),
        (torch.ones(3, 9, 4), torch.ones(2, 9, 4), None, "3 query heads"),
        (torch.ones(2, 9, 4), torch.full((1, 9, 4), torch.nan), None, "k holds NaN"),
        (torch.ones(2, 9, 4), torch.ones(1, 9, 4), 2, "window=2"),
    ):
        for function in (plane_stats, residual_bound):
            with subtests.test(message=message), pytest.raises(MeasureError, match=message):
                function(q, k, Planes.of(None, 4), window=window)
