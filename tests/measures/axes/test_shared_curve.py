"""Brute force: one distance curve over several documents against a dense least-squares solve of all of them."""

from __future__ import annotations

import pytest
import torch

from measures.axes.dense import region
from wherewhat.errors import MeasureError
from wherewhat.measures.axes import fit
from wherewhat.measures.axes.fit import fit_axes, shared_curve
from wherewhat.numerics import computing_on
from wherewhat.scores import Column, Scores


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


def documents_with_curves(count, *, layers):
    """Scores of documents; each layer has a width of its curves, or None for no curves."""
    generator = torch.Generator().manual_seed(1)

    def scored(index, width):
        heads = {name: torch.rand(2, generator=generator, dtype=torch.float64) for name in ("sse", "logit_mean")}
        curves = {}
        if width is not None:
            a = torch.randn(2, width, generator=generator) / 50
            curves = {"a": Column(a, ("head", "distance")), "b": Column(torch.zeros(2, 12), ("head", "query"))}
        return Scores(layer=index, heads=heads | {"tss": heads["sse"] + 3}, curves=curves)

    return [Scores(layers=[scored(*layer) for layer in enumerate(layers)]) for _ in range(count)]


@pytest.mark.parametrize("most", [1, 150, 2**20])
def test_layers_that_are_fitted_at_once_equal_those_fitted_alone(most, monkeypatch):
    monkeypatch.setitem(fit._SHARED, "cpu", most)
    documents = documents_with_curves(3, layers=[12, 12, 12, 5, 5, None, 12])
    found = fit.shared_scores(documents)
    assert [layer.layer for layer in found.layers] == [0, 1, 2, 3, 4, 6]
    for layer in found.layers:
        same = [document.layers[layer.layer] for document in documents]
        known = (torch.stack([x.heads[name] for x in same]) for name in ("sse", "tss", "logit_mean"))
        alone = shared_curve(torch.stack([x.curves["a"].values for x in same]), *known, n=12)
        expected = {"r_shared": alone.r.mean(0), "r_separate": alone.r_separate.mean(0)}
        expected["r_shared_pooled"] = alone.r_pooled
        # Of one layer at a time the operations are the same; products of other shapes may add in another order.
        bound = 0 if most == 1 else 1e-12
        for name, values in expected.items():
            torch.testing.assert_close(layer.heads[name], values, rtol=bound, atol=bound)
        assert torch.equal(layer.curves["shared_a"].values, alone.a.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_fits_the_same_shared_curves():
    documents = documents_with_curves(3, layers=[12, 12, 5])
    with computing_on("cuda"):
        found = fit.shared_scores(documents)
    for layer, expected in zip(found.layers, fit.shared_scores(documents).layers, strict=True):
        torch.testing.assert_close(layer.curves["shared_a"].values, expected.curves["shared_a"].values)
        for name, values in expected.heads.items():
            torch.testing.assert_close(layer.heads[name], values, rtol=1e-9, atol=1e-9)
