"""The obvious way: the whole matrix of logits and a dense least-squares solve in float64."""

from __future__ import annotations

import torch


def dense_logits(q, k, *, scale=1.0, softcap=None, distance_bias=None, key_bias=None, bias=None):
    """``(heads, n, n)`` float64 logits of ``fit_axes``'s arguments."""
    heads, n, _ = q.shape
    keys = k.double().repeat_interleave(heads // k.shape[0], 0)
    w = scale * q.double() @ keys.mT
    if softcap is not None:
        w = softcap * torch.tanh(w / softcap)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    if distance_bias is not None:
        w = w + distance_bias.double().expand(heads, n)[:, distance.clamp_min(0)]
    if key_bias is not None:
        w = w + key_bias.double().expand(heads, n)[:, None]
    return w if bias is None else w + bias.double()


def region(n, *, window=None, skip=0, min_distance=0, padding=(0, 0)):
    """True for the pairs that ``fit_axes`` looks at, ``(n, n)``."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    inside = (i - j >= min_distance) & (j >= skip + padding[0]) & (i < n - padding[1])
    return inside if window is None else inside & (i - j < window)


def dense_fits(w, pairs, subset):
    """Correlations ``(heads,)`` and fitted values ``(heads, pairs)`` of ``(heads, n, n)``, by one dense solve."""
    n = w.shape[-1]
    i, j = pairs.nonzero(as_tuple=True)
    values = w[:, i, j].double().T
    design = torch.zeros(len(values), 3 * n, dtype=torch.float64)
    row = torch.arange(len(values))
    for axis, column in (("a", i - j), ("b", n + i), ("c", 2 * n + j)):
        if axis in subset:
            design[row, column] = 1
    design = design[:, design.any(0)]  # offsets that no pair has
    fitted = design @ torch.linalg.lstsq(design, values, driver="gelsd").solution
    sse, tss = (values - fitted).square().sum(0), (values - values.mean(0)).square().sum(0)
    return (1 - sse / tss).clamp_min(0).sqrt(), fitted.T


def dense_fit(w, pairs, subset):
    """Correlation and fitted values of one ``(n, n)`` matrix on its pairs."""
    r, fitted = dense_fits(w[None], pairs, subset)
    return float(r), fitted[0]
