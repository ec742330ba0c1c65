"""Brute force: one distance curve over several documents against a dense least-squares solve of all of them."""

from __future__ import annotations

import pytest
import torch

from measures.axes.dense import region
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes, shared_curve


@pytest.mark.parametrize("window", [None, 7])
def test_equals_the_dense_solve(window):
    n, documents = 18, 3
    generator = torch.Generator().manual_seed(0)
    i, j = region(n, window=window).nonzero(as_tuple=True)
    distance = torch.randn(n, dtype=torch.float64, generator=generator)
    matrices = [
        torch.randn(n, n, dtype=torch.float64, generator=generator)
        + distance[(torch.arange(n)[:, None] - torch.arange(n)).abs()]
        + 3 * t  # documents whose mean logits differ
        for t in range(documents)
    ]
    zero = torch.zeros(1, n, 2, dtype=torch.float64)
    fits = [fit_axes(zero, zero, bias=w[None], window=window) for w in matrices]
    known = (torch.stack([getattr(f, name) for f in fits]) for name in ("a", "sse", "tss", "mean"))
    found = shared_curve(*known, n=n)
    values = torch.cat([w[i, j] for w in matrices])
    design = torch.zeros(len(values), n + documents * 2 * n, dtype=torch.float64)
    for t in range(documents):
        rows = torch.arange(len(i)) + t * len(i)
        design[rows, i - j] = 1
        design[rows, n + 2 * n * t + i] = 1
        design[rows, n + 2 * n * t + n + j] = 1
    fitted = design @ torch.linalg.lstsq(design, values[:, None], driver="gelsd").solution[:, 0]
    for t, error in enumerate((values - fitted).square().view(documents, -1).sum(-1)):
        expected = (1 - error / fits[t].tss[0]).sqrt()
        assert float(found.r[t, 0]) == pytest.approx(float(expected), abs=1e-9)
        assert float(found.r_separate[t, 0]) == pytest.approx(float(fits[t].r[0]), abs=1e-12)
    assert bool((found.r <= found.r_separate + 1e-12).all())
    assert float(found.r_pooled[0]) == pytest.approx(
        float(torch.corrcoef(torch.stack([values, fitted]))[0, 1]), abs=1e-9
    )


def test_documents_with_one_curve_lose_nothing_and_one_document_is_not_enough():
    n = 30
    a = torch.randn(1, 2, n, generator=torch.Generator().manual_seed(0)).expand(4, 2, n)
    found = shared_curve(a, torch.ones(4, 2), torch.full((4, 2), 5.0), torch.zeros(4, 2), n=n)
    torch.testing.assert_close(found.r, found.r_separate, rtol=0, atol=1e-9)
    with pytest.raises(MeasureError, match="two or more"):
        shared_curve(torch.ones(1, 2, 9), torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2), n=9)
