"""Brute force: the linear-time fit against a dense least-squares solve. Identity: what the operators must satisfy."""

from __future__ import annotations

import pytest
import torch

from measures.axes.dense import dense_fits, dense_logits, region
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.solver import (
    SUBSETS,
    Band,
    Triangle,
    conjugate_gradients,
    first_residual,
    solve_densely,
)

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
METHODS = ("linear", "blocked")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def draw(n=N, heads=4, kv_heads=2, d=8, *, mean=0.0, dtype=torch.float64, seed=0):
    """Random queries and keys; ``mean`` gives all tokens something large in common, as trained models have."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(h, n, d, dtype=torch.float64, generator=generator) for h in (heads, kv_heads))
    q += mean * torch.randn(heads, 1, d, dtype=torch.float64, generator=generator)
    k += mean * torch.randn(kv_heads, 1, d, dtype=torch.float64, generator=generator)
    return q.to(dtype), k.to(dtype)


def assert_equals_dense(q, k, where, how, *, methods=("auto",), subsets=SUBSETS):
    """Correlations of all subsets of axes and all fitted values are those of the dense solve."""
    pairs = region(q.shape[1], **where)
    i, j = pairs.nonzero(as_tuple=True)
    first_key = where.get("skip", 0) + where.get("padding", (0, 0))[0]
    smallest = where.get("min_distance", 0)
    tolerance = TOLERANCE[q.dtype]
    w = dense_logits(q, k, **how)
    expected = {subset: dense_fits(w, pairs, subset) for subset in subsets}
    for method in methods:
        fit = fit_axes(q, k, **where, **how, method=method, block=7)
        assert fit.pairs == len(i)
        for subset, (r, _) in expected.items():
            torch.testing.assert_close(fit.r_subset[subset], r, rtol=tolerance, atol=tolerance, msg=subset)
        ours = fit.a[:, i - j - smallest] + fit.b[:, i - first_key - smallest] + fit.c[:, j - first_key]
        fitted = expected["abc"][1]
        reach = fitted.abs().amax(1, keepdim=True)
        torch.testing.assert_close(ours / reach, fitted / reach, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_regions(dtype, subtests):
    for where in REGIONS:
        for mean in (0.0, 10.0):
            with subtests.test(where=where, mean=mean):
                assert_equals_dense(*draw(mean=mean, dtype=dtype), where, {}, methods=METHODS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits(dtype, subtests):
    for how in LOGITS:
        for where in ({}, {"skip": 2, "min_distance": 1, "window": 9}):
            with subtests.test(how=list(how), where=where):
                assert_equals_dense(*draw(dtype=dtype), where, how)


def test_lengths():
    """From the shortest text to several blocks, and narrow windows in long texts."""
    for n in (4, 5, 7, 64, 65, 129):
        assert_equals_dense(*draw(n, 2, 1, 5, mean=3.0), {}, {}, methods=METHODS, subsets=("abc",))
    assert_equals_dense(*draw(250, 2, 1), {"window": 4}, {}, subsets=("abc",))


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
        assert float(fit.r) == pytest.approx(1, abs=1e-9)
        torch.testing.assert_close(fit.a[0].diff(), torch.full((n - 1,), -slope).double(), rtol=0, atol=1e-9)
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
        torch.testing.assert_close(fit.own[axis], fit.r_subset[axis].square(), rtol=0, atol=1e-12)
        expected = fit.r.square() - fit.r_subset[rest].square()
        torch.testing.assert_close(fit.unique[axis], expected, rtol=0, atol=1e-12)
    assert bool((fit.r_behaviour <= fit.r + 1e-12).all())


def test_constant_logits_have_no_r():
    q, k = draw(20, 2, 1, 4, dtype=torch.float32)
    q[0] = 0
    fit = fit_axes(q, k, key_bias=torch.full((20,), 3.0))
    assert bool(fit.r[0].isnan())
    assert not bool(fit.r[1].isnan())


def test_wrong_input_is_named(subtests):
    fine = ((2, 9, 4), (2, 9, 4))
    for shapes, options, message in (
        (((2, 3, 4), (2, 3, 4)), {}, "at least 4"),
        (((2, 9, 4), (2, 8, 4)), {}, "must agree"),
        (((3, 9, 4), (2, 9, 4)), {}, "cannot share"),
        (((9, 4), (9, 4)), {}, r"\(heads, n, d\)"),
        (fine, {"window": 2}, "at least 3"),
        (fine, {"skip": 6}, "at least 4 must be left"),
        (fine, {"skip": -1}, "must not be negative"),
        (fine, {"softcap": 1.0, "method": "linear"}, "needs bilinear logits"),
    ):
        with subtests.test(message=message), pytest.raises(MeasureError, match=message):
            fit_axes(*(torch.ones(shape) for shape in shapes), **options)
    for method in METHODS:
        for bad in (torch.nan, torch.inf):
            q, k = draw(40)
            q[1, 7, 3] = bad
            with subtests.test(method=method, bad=bad), pytest.raises(MeasureError, match="not finite"):
                fit_axes(q, k, method=method)


def test_of_a_query_term_alone_no_behaviour_is_left():
    q, k = draw(mean=3.0)
    for method in METHODS:
        fit = fit_axes(q, k[:, :1].expand_as(k), method=method)
        torch.testing.assert_close(fit.r, torch.ones_like(fit.r), rtol=0, atol=1e-9)
        assert bool(fit.r_behaviour.isnan().all())


def test_queries_of_a_model_that_tracks_gradients():
    for method in METHODS:
        q, k = draw()
        with torch.inference_mode():  # what it keeps for the next call must serve outside too
            expected = fit_axes(q, k, method=method).r.clone()
        assert torch.equal(fit_axes(q.requires_grad_(), k.requires_grad_(), method=method).r, expected)


def test_half_precision_input_does_not_overflow():
    q, k = (200 * x for x in draw(40, dtype=torch.float32))
    full, half = fit_axes(q, k), fit_axes(q.half(), k.half())
    torch.testing.assert_close(half.r, full.r, rtol=1e-3, atol=1e-3)


def test_operators_of_the_closed_form():
    """Conditional means, their eigenvalues ±1/(m + 1), and inverses, as matrices."""
    n = 12
    triangle = Triangle(n, torch.device("cpu"))
    identity = torch.eye(n, dtype=torch.float64)
    p = triangle.expect(identity).T
    means = torch.stack([(torch.arange(n) < n - s).double() / (n - s) for s in range(n)])
    torch.testing.assert_close(p, means, rtol=0, atol=1e-12)
    found = torch.linalg.eigvals(p).real.sort().values
    expected = torch.tensor([(-1) ** m / (m + 1) for m in range(n)], dtype=torch.float64).sort().values
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    h = triangle._centre(torch.randn(5, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(triangle._plus_inverse(h) @ (identity - p @ p).T, h, rtol=0, atol=1e-9)
    linear = triangle._centre(torch.arange(n, dtype=torch.float64))
    g = h - triangle.mean(h * linear) / triangle.mean(linear * linear) * linear
    both = g + 4 * triangle._inverse_3(g)
    solution = both - 2 * triangle.expect(both)
    torch.testing.assert_close(solution @ (identity + 2 * p).T, g, rtol=0, atol=1e-9)


def test_normal_matrix_equals_the_dense_one():
    n = 12
    for width in (3, 5, 11, 12):
        band = Band(n, width, torch.device("cpu"))
        i, j = region(n, window=width).nonzero(as_tuple=True)
        design = torch.zeros(len(i), sum(band.sizes), dtype=torch.float64)
        row = torch.arange(len(i))
        for column in (i - j, width + i, width + n + j):
            design[row, column] = 1
        normal = band.normal(torch.eye(sum(band.sizes), dtype=torch.float64))
        torch.testing.assert_close(normal, design.T @ design, rtol=0, atol=1e-9)
        torch.testing.assert_close(normal.diagonal(), band.counts, rtol=0, atol=1e-9)
        assert torch.linalg.matrix_rank(normal, atol=1e-6) == band.rank
        assert band.pairs == len(i)


@pytest.mark.parametrize(("n", "width"), [(60, 60), (60, 17), (24, 3)])
def test_inverse_matrices_equal_conjugate_gradients(n, width):
    band = Band(n, width, torch.device("cpu"))
    pairs = region(n).tril().triu(1 - width)
    i, j = pairs.nonzero(as_tuple=True)
    w = dense_logits(*draw(n)) * pairs
    sums = band.pack(torch.stack([w.diagonal(-d, 1, 2).sum(-1) for d in range(width)], -1), w.sum(-1), w.sum(-2))
    started = [first_residual(band, sums, subset) for subset in SUBSETS]
    solutions = solve_densely(band, torch.stack([residual for _, residual in started]))
    for subset, start, terms in zip(SUBSETS, started, solutions, strict=True):
        (a, b, c), (x, y, z) = band.unpack(terms), band.unpack(conjugate_gradients(band, *start))
        other = x[:, i - j] + y[:, i] + z[:, j]
        torch.testing.assert_close(a[:, i - j] + b[:, i] + c[:, j], other, rtol=1e-8, atol=1e-8, msg=subset)


def test_conjugate_gradients_equal_the_dense_solve():
    n = 60
    band = Band(n, n, torch.device("cpu"))
    pairs = region(n)
    i, j = pairs.nonzero(as_tuple=True)
    w = dense_logits(*draw(n)) * pairs
    sums = band.pack(torch.stack([w.diagonal(-d, 1, 2).sum(-1) for d in range(n)], -1), w.sum(-1), w.sum(-2))
    for subset in SUBSETS:
        terms = conjugate_gradients(band, *first_residual(band, sums, subset))
        a, b, c = band.unpack(terms)
        fitted = dense_fits(w, pairs, subset)[1]
        torch.testing.assert_close(a[:, i - j] + b[:, i] + c[:, j], fitted, rtol=1e-8, atol=1e-8, msg=subset)
