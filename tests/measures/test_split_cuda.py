"""Triton kernels of the split against the same sums by PyTorch.

Runs where there is Triton: on a GPU, or with ``TRITON_INTERPRET=1`` on a CPU.
"""

from __future__ import annotations

import pytest
import torch

from helpers.kernels import kernel_device
from wherewhat.measures import tensors
from wherewhat.measures.split import logits

DEVICE = kernel_device()


@pytest.mark.parametrize(("n", "d", "window"), [(5, 6, None), (130, 20, None), (150, 150, 100)])
def test_squares_equal_those_without_kernels(monkeypatch, n, d, window):
    """One chunk, several, and a band; two keys."""
    generator = torch.Generator().manual_seed(0)
    q, *keys = (torch.randn(heads, n, d, generator=generator, dtype=torch.float64).to(DEVICE) for heads in (6, 2, 2))
    found = []
    for kernels in (True, False):
        for module in (logits, tensors):
            monkeypatch.setattr(module, "has_triton", lambda device, kernels=kernels: kernels)
        found.append(torch.stack([logits.squares(q, keys[0], window=window), logits.squares(q, *keys, window=window)]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-9)


def test_a_split_equals_that_without_kernels(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(4, heads, 140, 12, generator=generator).to(DEVICE) for heads in (4, 2))
    found = []
    for kernels in (True, False):
        for module in (logits, tensors):
            monkeypatch.setattr(module, "has_triton", lambda device, kernels=kernels: kernels)
        split = logits.logit_split(q, k)
        terms = [getattr(split, name).value for name in ("pp", "pc", "cp", "cc")]
        found.append(torch.stack([*terms, split.pp_mean, split.pc_mean, split.cp_mean]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 33, 64, 3000])
def test_sums_of_rows_and_triangles(size):
    from wherewhat.measures.sums_cuda import dots, triangle_sums

    x, y = torch.randn(2, 3, 2, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    wide = torch.cat([x, y], -1)[..., size:]  # rows of y, further apart
    torch.testing.assert_close(dots(x, wide), (x * y).sum((-1, -2)), rtol=1e-12, atol=1e-11)
    if size <= 64:
        square = (x[..., None] * y[..., None, :]).contiguous()
        lower = square.tril()
        for found, expected in zip(triangle_sums(square), (lower.square(), lower), strict=True):
            torch.testing.assert_close(found, expected.sum((-1, -2)), rtol=1e-12, atol=1e-11)
