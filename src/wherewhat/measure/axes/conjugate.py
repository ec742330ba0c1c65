"""Least squares on a band, where there is no closed form, by conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.measure.axes.region import Band


def conjugate_gradients(band: Band, sums: Tensor, subset: str, *, tolerance: float = 1e-12) -> Tensor:
    """Terms of the best additive approximation.

    Preconditioned with the counts, the normal matrix is the identity plus something smooth: the number of iterations
    grows with how many times the band's width goes into n, about seven for each, and hardly with n otherwise.

    Args:
        band: The pairs looked at.
        sums: Sums of the matrices along diagonals, rows and columns, packed, ``(heads, size)`` float64.
        subset: Axes to use.
        tolerance: Relative residual of the normal equations to stop at.

    Returns:
        The terms, packed, ``(heads, size)``.

    Raises:
        ArithmeticError: If it does not converge, which finite sums never showed.
    """
    mask = torch.cat([torch.full((m,), float(x in subset)) for x, m in zip("abc", band.sizes, strict=True)]).to(sums)
    inverse = mask / band.counts
    # Row, column and diagonal sums share a total and a first moment. Where rounding makes them differ, the singular
    # normal equations have no solution, and the iteration would follow the difference to infinity.
    basis = _null_basis(band, subset)
    residual = sums * mask
    residual = residual - (residual @ basis) @ basis.T
    terms = torch.zeros_like(residual)
    direction = residual * inverse
    energy = (residual * direction).sum(-1, keepdim=True)
    goal = energy * tolerance**2
    most = 200 + 20 * (band.n // band.width)
    for _ in range(most):
        active = energy > goal
        if not bool(active.any()):
            return terms
        image = band.normal(direction) * mask
        # What has converged stands still: below rounding, its next step would be noise divided by noise.
        step = torch.where(active, energy / (direction * image).sum(-1, keepdim=True), 0)
        terms.addcmul_(direction, step)
        residual = torch.addcmul(residual, image, step, value=-1)
        z = residual * inverse
        fresh = (residual * z).sum(-1, keepdim=True)
        direction = torch.addcmul(z, direction, torch.where(active, fresh / energy, 0))
        energy = torch.where(active, fresh, energy)
    raise ArithmeticError(f"least squares on {band.n} tokens did not converge in {most} iterations")


def _null_basis(band: Band, subset: str) -> Tensor:
    """Orthonormal packed terms of the subset whose sum is zero everywhere, ``(size, count)``."""
    d, i = (torch.arange(m, dtype=torch.float64, device=band.device) for m in (band.width, band.n))
    a, b = torch.ones_like(d), torch.ones_like(i)
    vectors = []
    if "a" in subset and "b" in subset:
        vectors.append(band.pack(a, -b, 0 * b))
    if "a" in subset and "c" in subset:
        vectors.append(band.pack(a, 0 * b, -b))
    if subset == "bc":
        vectors.append(band.pack(0 * a, b, -b))
    if subset == "abc":
        middle = (band.n - 1) / 2
        vectors.append(band.pack(d, middle - i, i - middle))
    if not vectors:
        return torch.zeros(sum(band.sizes), 0, dtype=torch.float64, device=band.device)
    basis: Tensor = torch.linalg.qr(torch.stack(vectors, -1))[0]
    return basis
