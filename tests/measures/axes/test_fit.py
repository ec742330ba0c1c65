"""Brute force: the linear-time fit against a dense least-squares solve. Identity: what the operators must satisfy."""

from __future__ import annotations

import pytest
import torch

from measures.axes.dense import dense_fit, dense_logits, region
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.solver import SUBSETS, Band, Triangle, conjugate_gradients, first_residual

N = 26
REGIONS = [
    {},
    {"window": 6},
    {"window": 3},
    {"skip": 3},
    {"min_distance": 2},
    {"padding": (3, 4)},
    {"skip": 2, "min_distance": 1, "window": 9, "padding": (1, 1)},
]
LOGITS = [
    {"scale": 0.3},
    {"softcap": 5.0, "scale": 0.2},
    {"distance_bias": -0.5 * torch.arange(N)},
    {"distance_bias": torch.randn(4, N, generator=torch.Generator().manual_seed(5))},
    {"key_bias": torch.randn(N, generator=torch.Generator().manual_seed(6))},
    {"bias": torch.randn(4, N, N, generator=torch.Generator().manual_seed(7))},
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def draw(n=N, heads=4, kv_heads=2, d=8, *, mean=0.0, dtype=torch.float64, seed=0):
    """Random queries and keys; ``mean`` gives all tokens something large in common, as trained models have."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(h, n, d, dtype=torch.float64, generator=generator) for h in (heads, kv_heads))
    q += mean * torch.randn(heads, 1, d, dtype=torch.float64, generator=generator)
    k += mean * torch.randn(kv_heads, 1, d, dtype=torch.float64, generator=generator)
    return q.to(dtype), k.to(dtype)


def assert_equals_dense(q, k, where, how, method="auto"):
    fit = fit_axes(q, k, **where, **how, method=method, block=7)
    n = q.shape[1]
    pairs = region(n, **where)
    i, j = pairs.nonzero(as_tuple=True)
    first_key = where.get("skip", 0) + where.get("padding", (0, 0))[0]
    smallest = where.get("min_distance", 0)
    tolerance = TOLERANCE[q.dtype]
    for head, w in enumerate(dense_logits(q, k, **how)):
        for subset in SUBSETS:
            r, fitted = dense_fit(w, pairs, subset)
            assert float(fit.r_subset[subset][head]) == pytest.approx(r, rel=tolerance, abs=tolerance), subset
        ours = fit.a[head][i - j - smallest] + fit.b[head][i - first_key - smallest] + fit.c[head][j - first_key]
        assert float((ours - fitted).abs().max()) <= tolerance * float(fitted.abs().max())
    assert fit.pairs == len(i)
    return fit


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("method", ["linear", "blocked"])
@pytest.mark.parametrize("where", REGIONS, ids=str)
def test_regions(where, method, mean, dtype):
    assert_equals_dense(*draw(mean=mean, dtype=dtype), where, {}, method)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("where", [{}, {"skip": 2, "min_distance": 1, "window": 9}], ids=str)
@pytest.mark.parametrize("how", LOGITS, ids=lambda how: "-".join(how))
def test_logits(how, where, dtype):
    assert_equals_dense(*draw(dtype=dtype), where, how)


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 5, 7, 64, 65, 129])
@pytest.mark.parametrize("method", ["linear", "blocked"])
def test_lengths(n, method):
    q, k = draw(n, 2, 1, 5)
    fit = fit_axes(q, k, method=method)
    r, _ = dense_fit(dense_logits(q, k)[0], region(n), "abc")
    assert float(fit.r[0]) == pytest.approx(r, abs=1e-9)


@pytest.mark.slow
def test_n_of_256_and_many_heads():
    q, k = draw(256, 6, 3, 16, mean=3.0)
    fit = fit_axes(q, k, method="linear")
    r, fitted = dense_fit(dense_logits(q, k)[5], region(256), "abc")
    assert float(fit.r[5]) == pytest.approx(r, rel=1e-9)
    i, j = region(256).nonzero(as_tuple=True)
    ours = fit.a[5][i - j] + fit.b[5][i] + fit.c[5][j]
    assert float((ours - fitted).abs().max()) <= 1e-9 * float(fitted.abs().max())


def test_linear_equals_blocked_on_long_texts():
    q, k = draw(3000, 2, 1, 16, mean=5.0, dtype=torch.float32)
    linear, blocked = (fit_axes(q, k, method=method) for method in ("linear", "blocked"))
    for subset in SUBSETS:
        torch.testing.assert_close(linear.r_subset[subset], blocked.r_subset[subset], rtol=1e-5, atol=1e-6)


def test_planted_terms_are_recovered_within_the_noise():
    n, noise = 300, 0.5
    generator = torch.Generator().manual_seed(3)
    a, b, c = (torch.randn(n, dtype=torch.float64, generator=generator) for _ in range(3))
    i, j = torch.arange(n)[:, None], torch.arange(n)
    planted = a[(i - j).clamp_min(0)] + b[:, None] + c
    error = noise * torch.randn(n, n, dtype=torch.float64, generator=generator)
    q = k = torch.zeros(1, n, 2, dtype=torch.float64)
    fit = fit_axes(q, k, bias=(planted + error)[None])
    variance = float(planted[region(n)].var())
    expected = (variance / (variance + noise**2)) ** 0.5
    assert float(fit.r) == pytest.approx(expected, abs=4 * noise / n)
    assert float(fit.sse) == pytest.approx(noise**2 * (fit.pairs - fit.rank), rel=5 * (2 / fit.pairs) ** 0.5)
    fitted = fit.a[0][(i - j).clamp_min(0)] + fit.b[0][:, None] + fit.c[0]
    # The fit's own error has variance noise²·rank/pairs on average.
    deviation = (fitted - planted)[region(n)].square().mean().sqrt()
    assert float(deviation) == pytest.approx(noise * (fit.rank / fit.pairs) ** 0.5, rel=0.2)


def test_gauge_and_alibi_slope():
    n, slope = 50, 0.25
    q = k = torch.zeros(1, n, 2, dtype=torch.float64)
    for bias in ({"distance_bias": -slope * torch.arange(n)}, {"key_bias": slope * torch.arange(n).double()}):
        fit = fit_axes(q, k, **bias)
        assert float(fit.r) == pytest.approx(1)
        torch.testing.assert_close(fit.a[0].diff(), torch.full((n - 1,), -slope, dtype=torch.float64))
        index = torch.arange(n) - (n - 1) / 2
        for values in (fit.b.mean(), fit.c.mean(), (fit.c[0] * index).sum()):
            assert abs(float(values)) < 1e-9


def test_noise_reaches_the_noise_floor():
    fit = fit_axes(*draw(200, 64, 64, 64, dtype=torch.float32))
    assert float(fit.r.mean()) == pytest.approx(fit.noise_floor, rel=0.03)
    assert float(fit.adjusted_r2.mean()) == pytest.approx(0, abs=0.005)
    assert fit.noise_floor == pytest.approx((6 / 200) ** 0.5, rel=0.02)


def test_shares_are_consistent():
    fit = fit_axes(*draw(60, mean=2.0))
    for axis, rest in (("a", "bc"), ("b", "ac"), ("c", "ab")):
        torch.testing.assert_close(fit.own[axis], fit.r_subset[axis].square())
        torch.testing.assert_close(fit.unique[axis], fit.r.square() - fit.r_subset[rest].square())
    assert bool((fit.r_behaviour <= fit.r + 1e-12).all())


def test_constant_logits_have_no_r():
    q = torch.zeros(2, 20, 4)
    q[1] = torch.randn(20, 4)
    k = torch.randn(1, 20, 4)
    fit = fit_axes(q, k, key_bias=torch.full((20,), 3.0))
    assert bool(fit.r[0].isnan())
    assert not bool(fit.r[1].isnan())


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 3, 4), (2, 3, 4)), {}, "at least 4"),
        (((2, 9, 4), (2, 8, 4)), {}, "must agree"),
        (((3, 9, 4), (2, 9, 4)), {}, "cannot share"),
        (((9, 4), (9, 4)), {}, r"\(heads, n, d\)"),
        (((2, 9, 4), (2, 9, 4)), {"window": 2}, "at least 3"),
        (((2, 9, 4), (2, 9, 4)), {"skip": 6}, "at least 4 must be left"),
        (((2, 9, 4), (2, 9, 4)), {"skip": -1}, "must not be negative"),
        (((2, 9, 4), (2, 9, 4)), {"softcap": 1.0, "method": "linear"}, "needs bilinear logits"),
    ],
)
def test_wrong_input_is_named(shapes, options, message):
    with pytest.raises(MeasureError, match=message):
        fit_axes(*(torch.randn(shape) for shape in shapes), **options)


@pytest.mark.parametrize("method", ["linear", "blocked"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(bad, method):
    q, k = draw(40)
    q[1, 7, 3] = bad
    with pytest.raises(MeasureError, match="not finite"):
        fit_axes(q, k, method=method)


@pytest.mark.parametrize("method", ["linear", "blocked"])
def test_of_a_query_term_alone_no_behaviour_is_left(method):
    q, k = draw(mean=3.0)
    fit = fit_axes(q, k[:, :1].expand_as(k), method=method)
    torch.testing.assert_close(fit.r, torch.ones_like(fit.r))
    assert bool(fit.r_behaviour.isnan().all())


@pytest.mark.parametrize("method", ["linear", "blocked"])
def test_queries_of_a_model_that_tracks_gradients(method):
    q, k = draw()
    with torch.inference_mode():  # what it keeps for the next call must serve outside too
        expected = fit_axes(q, k, method=method).r.clone()
    assert torch.equal(fit_axes(q.requires_grad_(), k.requires_grad_(), method=method).r, expected)


def test_half_precision_input_does_not_overflow():
    q, k = (200 * x for x in draw(40, dtype=torch.float32))
    full, half = fit_axes(q, k), fit_axes(q.half(), k.half())
    torch.testing.assert_close(half.r, full.r, rtol=1e-3, atol=1e-3)


class TestTriangle:
    """The operators of the closed form, as matrices."""

    n = 12

    def operators(self):
        triangle = Triangle(self.n, torch.device("cpu"))
        identity = torch.eye(self.n, dtype=torch.float64)
        return triangle, identity, triangle.expect(identity).T

    def test_expectation_is_a_conditional_mean(self):
        _, _, p = self.operators()
        for s in range(self.n):
            expected = torch.zeros(self.n, dtype=torch.float64)
            expected[: self.n - s] = 1 / (self.n - s)
            torch.testing.assert_close(p[s], expected)

    def test_eigenvalues(self):
        _, _, p = self.operators()
        found = torch.linalg.eigvals(p).real.sort().values
        expected = torch.tensor([(-1) ** m / (m + 1) for m in range(self.n)], dtype=torch.float64).sort().values
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)

    def test_inverses(self):
        triangle, identity, p = self.operators()
        h = triangle._centre(torch.randn(5, self.n, dtype=torch.float64))
        torch.testing.assert_close(triangle._plus_inverse(h) @ (identity - p @ p).T, h)
        linear = triangle._centre(torch.arange(self.n, dtype=torch.float64))
        g = h - triangle.mean(h * linear) / triangle.mean(linear * linear) * linear
        both = g + 4 * triangle._inverse_3(g)
        solution = both - 2 * triangle.expect(both)
        torch.testing.assert_close(solution @ (identity + 2 * p).T, g)


@pytest.mark.slow
def test_narrow_windows_in_long_texts():
    q, k = draw(400, heads=1, kv_heads=1)
    assert_equals_dense(q, k, {"window": 4}, {})


@pytest.mark.parametrize("width", [3, 5, 11, 12])
def test_normal_matrix_equals_the_dense_one(width):
    n = 12
    band = Band(n, width, torch.device("cpu"))
    i, j = region(n, window=width).nonzero(as_tuple=True)
    design = torch.zeros(len(i), sum(band.sizes), dtype=torch.float64)
    row = torch.arange(len(i))
    for column in (i - j, width + i, width + n + j):
        design[row, column] = 1
    normal = band.normal(torch.eye(sum(band.sizes), dtype=torch.float64))
    torch.testing.assert_close(normal, design.T @ design)
    torch.testing.assert_close(normal.diagonal(), band.counts)
    assert torch.linalg.matrix_rank(normal) == band.rank
    assert band.pairs == len(i)


@pytest.mark.slow
@pytest.mark.parametrize("subset", SUBSETS)
def test_conjugate_gradients_agree_with_the_closed_form(subset):
    n = 90
    band = Band(n, n, torch.device("cpu"))
    q, k = draw(n)
    pairs = region(n)
    w = dense_logits(q, k) * pairs
    sums = band.pack(torch.stack([w.diagonal(-d, 1, 2).sum(-1) for d in range(n)], -1), w.sum(-1), w.sum(-2))
    terms = conjugate_gradients(band, *first_residual(band, sums, subset))
    for head in range(4):
        _, fitted = dense_fit(w[head], pairs, subset)
        a, b, c = (x[head] for x in band.unpack(terms))
        i, j = pairs.nonzero(as_tuple=True)
        torch.testing.assert_close(a[i - j] + b[i] + c[j], fitted, rtol=1e-8, atol=1e-8)
