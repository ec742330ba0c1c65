"""Parity: the GPU kernels for eigenvalues against LAPACK.

Runs where there is Triton: on a GPU, or with ``TRITON_INTERPRET=1`` on a CPU.
"""

from __future__ import annotations

import pytest
import torch

from helpers.kernels import kernel_device

DEVICE = kernel_device()


@pytest.mark.parametrize("d", [1, 5, 16, 33])
def test_eigenvalues_are_those_of_lapack(d):
    from wherewhat.measures.eigenvalues_cuda import largest_eigenvalues, symmetric_eigenvalues

    generator = torch.Generator().manual_seed(d)
    x = torch.randn(4, 2 * d, d, dtype=torch.float64, generator=generator)
    x[1] += 100  # one large eigenvalue
    x[2, :, 1:] = x[2, :, :1]  # rank one
    x[3] = torch.eye(2 * d, d)  # all equal
    products = x.mT @ x
    expected = torch.linalg.eigvalsh(products)
    size = expected[:, -1:].abs()
    for found, values in (
        (symmetric_eigenvalues(products.to(DEVICE)), expected),
        (largest_eigenvalues(products.to(DEVICE))[:, None], expected[:, -1:]),
    ):
        assert float(((found.cpu() - values).abs() / size).amax()) < 1e-14 * max(d, 10)
    empty = products[:0].to(DEVICE)
    assert symmetric_eigenvalues(empty).shape == (0, d)
    assert largest_eigenvalues(empty).shape == (0,)
