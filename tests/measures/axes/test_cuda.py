"""Brute force: the GPU kernels against the same sums in float64. Runs where there is a GPU and Triton."""

from __future__ import annotations

import pytest
import torch

from wherewhat.errors import MeasureError
from wherewhat.measures import graphs
from wherewhat.measures.axes.fit import fit_axes, fit_margins
from wherewhat.measures.axes.margins import _centred_margins, bilinear_margins
from wherewhat.measures.axes.solver import Band, Margins

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(groups, n, d, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(h, n, d, device="cuda", generator=generator) for h in (groups, 1))
    return (q + 2 * q[:, :1]).to(dtype), (k + 2 * k[:, :1]).to(dtype)


def assert_sums_close(found, exact):
    """Sums through Fourier transforms in float32 are within log2(n) roundings, 2e-6, of the largest; ten times that."""
    for ours, theirs in zip(found, exact, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_float64(dtype, subtests):
    from wherewhat.measures.axes.margins_cuda import triangle_margins

    for groups, n, d in ((4, 1000, 128), (3, 4096, 64), (1, 130, 16), (2, 20_000, 32)):
        with subtests.test(n=n, d=d):
            q, k = draw(groups, n, d, dtype)
            assert_sums_close(triangle_margins(q, k), _centred_margins(q.double()[None], k.double(), n))


def test_rounds_of_key_heads_equal_float64(monkeypatch):
    from wherewhat.measures.axes import margins_cuda

    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(*shape, 5000, 32, device="cuda", generator=generator) for shape in ((5, 2), (5,)))
    monkeypatch.setattr(margins_cuda, "_SPECTRA", 2 * 3 * 16 * 2 * 5120 * 8)  # two of the five key heads at a time
    exact = _centred_margins(q.double(), k.double(), 5000)
    assert_sums_close(margins_cuda.triangle_margins(q.flatten(0, 1), k), exact)


def test_layers_are_read_where_they_are():
    """Models make queries and keys token by token; other strides are copied."""
    from wherewhat.measures.axes.margins_cuda import triangle_margins

    q, k = draw(4, 1000, 64, torch.bfloat16)
    expected = triangle_margins(q, k)
    for order in ((1, 0, 2), (2, 0, 1)):
        back = [order.index(axis) for axis in range(3)]
        by_token, keys = (x.permute(order).contiguous().permute(back) for x in (q, k))
        for ours, theirs in zip(triangle_margins(by_token, keys), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_scores_and_curves_equal_those_of_the_operators(subtests):
    """Of random logits, of constant ones, and of a query term alone."""
    for n in (4, 130, 5000):
        generator = torch.Generator().manual_seed(n)
        q, k = (torch.randn(3, n, 8, generator=generator, dtype=torch.float64) for _ in range(2))
        q[1] = 0
        margins, by_query, by_key = bilinear_margins(q, k, n, dtype=torch.float64)
        offset = margins.band.pack(torch.randn(3, n, generator=generator).double(), by_query, by_key)
        offset[1:], offset[2, n : 2 * n] = 0, torch.arange(n)
        margins.sums[2], margins.squares[2] = 0, 0
        expected = vars(fit_margins(margins, offset, method="linear"))
        band = Band(n, n, torch.device("cuda"))
        margins = Margins(band, margins.sums.cuda(), margins.squares.cuda())
        for name, ours in vars(fit_margins(margins, offset.cuda(), method="linear")).items():
            with subtests.test(n=n, name=name):
                if name == "method":
                    assert ours == expected[name]
                    continue
                options = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True, "check_device": False}
                torch.testing.assert_close(ours, expected[name], **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fit_equals_float64(dtype):
    q, k = draw(4, 40_000, 128, dtype)
    ours, exact = fit_axes(q, k, scale=0.1), fit_axes(q.double(), k.double(), scale=0.1)
    for subset, r in exact.r_subset.items():
        torch.testing.assert_close(ours.r_subset[subset], r, rtol=0, atol=1e-5)  # its sums are within 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_recorded_fit_equals_the_first(dtype, subtests):
    """From the second call on kernels are replayed; results of earlier calls stay, in any mode."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for n in (48, 1200, 5000):
        graphs._entries.clear()
        generator = torch.Generator("cuda").manual_seed(n)
        given = [
            [torch.randn(h, n, 32, device="cuda", generator=generator).to(dtype) for h in (4, 2)] for _ in range(4)
        ]
        found = []
        for number, (q, k) in enumerate(given):
            with torch.inference_mode(number % 2 == 0):
                found.append(fit_axes(q, k, scale=0.2))
        assert [entry.graph is not None for entry in graphs._entries.values()] == [True]
        for (q, k), fit in zip(given, found, strict=True):
            exact = fit_axes(q.double().cpu(), k.double().cpu(), scale=0.2)
            for name in ("r", "r_behaviour", "adjusted_r2", "a", "b", "c"):
                ours, theirs = getattr(fit, name).cpu(), getattr(exact, name)
                with subtests.test(n=n, name=name):
                    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_a_recorded_fit_refuses_what_is_not_finite():
    q, k = torch.randn(4, 600, 32, device="cuda"), torch.randn(2, 600, 32, device="cuda")
    for _ in range(3):
        fit_axes(q, k)
    q[0, 5, 0] = torch.nan
    with pytest.raises(MeasureError, match="not finite"):
        fit_axes(q, k)
