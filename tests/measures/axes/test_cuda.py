"""Brute force: the GPU kernels against the same sums in float64. Runs where there is a GPU and Triton."""

from __future__ import annotations

import pytest
import torch

from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.margins import _centred_margins, fft_length

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(groups, n, d, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(h, n, d, device="cuda", generator=generator) for h in (groups, 1))
    return (q + 2 * q[:, :1]).to(dtype), (k + 2 * k[:, :1]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "n", "d"), [(4, 1000, 128), (3, 4096, 64), (1, 130, 16), (2, 20_000, 32)])
def test_kernels_equal_float64(groups, n, d, dtype):
    from wherewhat.measures.axes.cuda import triangle_margins

    q, k = draw(groups, n, d, dtype)
    found = triangle_margins(q[None], k, fft_length(2 * n - 1))
    exact = _centred_margins(q.double()[None], k.double(), n)
    for ours, theirs in zip(found, exact, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_fit_equals_float64(dtype):
    q, k = draw(4, 40_000, 128, dtype)
    ours, exact = fit_axes(q, k, scale=0.1), fit_axes(q.double(), k.double(), scale=0.1)
    for subset, r in exact.r_subset.items():
        torch.testing.assert_close(ours.r_subset[subset], r, rtol=0, atol=1e-6)
