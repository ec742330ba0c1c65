"""Brute force: the kernel that sums triangles against sums of their entries in float64.

Runs where there is Triton: on a GPU, or with ``TRITON_INTERPRET=1`` on a CPU.
"""

from __future__ import annotations

import pytest
import torch

from helpers.kernels import kernel_device

DEVICE = kernel_device()


@pytest.mark.parametrize(("n", "dtype"), [(5, torch.float32), (64, torch.float64), (150, torch.float32)])
def test_sums_of_a_triangle_are_those_of_its_entries(n, dtype):
    from wherewhat.measures.axes.margins_cuda import square_margins

    w = torch.randn(3, n, n, generator=torch.Generator().manual_seed(n), dtype=dtype)
    w[:, 0, 1:] = torch.inf  # above the diagonal
    sums, squares = (x.cpu() for x in square_margins(w.to(DEVICE)))
    inside = w.double().tril()
    by_distance = torch.stack([inside.diagonal(-d, -2, -1).sum(-1) for d in range(n)], -1)
    expected = torch.cat([by_distance, inside.sum(-1), inside.sum(-2)], -1)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(squares, inside.square().sum((-1, -2)), rtol=1e-12, atol=1e-12)


def test_margins_of_one_block_equal_those_of_several(monkeypatch):
    from wherewhat.measures.axes import margins
    from wherewhat.measures.axes.solver import Band

    w = torch.randn(2, 40, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    band = Band(40, 40, w.device)
    several = margins.blocked_margins(lambda i0, i1, j0, j1: w[:, i0:i1, j0:j1].clone(), 2, band, block=16)
    monkeypatch.setattr(margins, "has_triton", lambda device: True)
    one = margins.blocked_margins(lambda i0, i1, j0, j1: w[:, i0:i1, j0:j1], 2, band, block=40)
    torch.testing.assert_close(one.sums, several.sums, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one.squares, several.squares, rtol=1e-3, atol=1e-3)
