"""How far two computations of one quantity may differ: bounds from floating-point arithmetic, not from one machine.

A sum of n terms in any order is within ``n · ε`` of the exact one, relative to the sum of the terms' magnitudes
(Higham, *Accuracy and Stability of Numerical Algorithms*, 4.2); ε is 1.2e-7 in float32 and 2.2e-16 in float64. CPUs,
numbers of threads and shapes of products change the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_times = 1.0


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest error of a sum of ``terms`` products in any order, relative to the sum of their magnitudes."""
    return terms * torch.finfo(dtype).eps


def worst(actual: Tensor, exact: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of ``exact``; 0 where both are NaN."""
    actual, exact = (x.detach().cpu().double() for x in torch.broadcast_tensors(actual, exact))
    assert torch.equal(actual.isnan(), exact.isnan())
    difference = torch.where(actual == exact, 0.0, actual - exact).nan_to_num(0.0, posinf=torch.inf)
    return float(difference.abs().max()) / max(float(exact.nan_to_num(0.0).abs().max()), 1e-300)


def assert_as_accurate(actual: Tensor, plain: Tensor, exact: Tensor, *, times: float = 8.0) -> None:
    """Assert that ``actual`` is as close to ``exact`` as the plain path is, within a factor.

    Args:
        actual: What the fast path gives, in its precision.
        plain: What the plain path gives in the same precision.
        exact: What the plain path gives in float64.
        times: The factor. Two orders of summation have errors of one size, not the same errors.
    """
    allowed = _times * times * max(worst(plain, exact), torch.finfo(plain.dtype).eps)
    assert worst(actual, exact) <= allowed, f"{worst(actual, exact):.2e} from float64, {allowed:.2e} allowed"


def tighten(factor: float) -> None:
    """Divide the tolerances of all later comparisons by a factor; exact ones stay exact."""
    from _pytest.approx import ApproxScalar
    from torch.testing._comparison import default_tolerances

    global _times
    _times = 1 / factor
    plain, approx = torch.testing.assert_close, ApproxScalar.tolerance

    def assert_close(actual: object, expected: object, *, rtol: float | None = None, atol: float | None = None, **more):
        if rtol is None and atol is None:
            tensors = [x for x in (actual, expected) if isinstance(x, Tensor)]
            rtol, atol = default_tolerances(*tensors) if tensors else (1e-7, 1e-7)
        return plain(actual, expected, rtol=(rtol or 0.0) / factor, atol=(atol or 0.0) / factor, **more)

    torch.testing.assert_close = assert_close
    ApproxScalar.tolerance = property(lambda self: approx.fget(self) / factor)
