"""Least squares on the whole causal triangle in closed form.

With l = n-1-i counting queries from the end, distance, key and l are three coordinates with ``d + j + l = n-1``: the
triangle is a discrete simplex, and the three axes play the same part. All that least squares needs is one operator,
``P f(s) = E[f(t) | s]``, the mean of a function of one coordinate given another. Its eigenfunctions are the Hahn
polynomials with weight ``w(t) = n - t``, its eigenvalues ``(-1)^m / (m+1)``. The same polynomials are eigenfunctions
of a second-order difference operator L with eigenvalues m(m+2), so that

    1 / (1 - P²) = 1 + 1/L        1 / (1 - P) = (1 + P)(1 + 1/L)        1 / (1 + 2P) = (1 - 2P)(1 + 4/(L - 3))

and the inverses of L and L - 3 are cumulative sums. The whole fit is a few dozen passes over vectors of length n: no
iteration, no tolerance. ``docs/closed-form.md`` derives it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.gpu import has_triton


class Triangle:
    """Operators on functions of one coordinate of the simplex, ``(..., n)`` float64."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._kernels = n >= 4096 and has_triton(device)
        t = torch.arange(n, dtype=torch.float64, device=device)
        self.weight = n - t
        self.pairs = n * (n + 1) // 2
        self._flow = t * (n - t) * (n + 1 - t)
        self._before = t * (2 * n + 1 - t) / 2  # Σ weight of smaller values
        x = t[:-1]
        self._weight_1 = (x + 1) * (n - 1 - x) * (n - x)
        self._flow_1 = x * (x + 1) * (n - 1 - x) * (n - x) * (n + 1 - x)

    def explained_by_pair(self, x: Tensor, y: Tensor) -> Tensor:
        """Squares that the best terms of two coordinates explain, ``(...)``, from the matrix's means at each value.

        The terms are ``f = (1 + 1/L) h`` with ``h = x - P y``, and ``y - P f``. Together they explain
        ``⟨y, y⟩ + ⟨h, f⟩``, and ``⟨h, h/L⟩`` is a sum over the flow of h: one cumulative sum, no terms.
        """
        h = x - self.expect(y)
        through = self._sum(h, weighted=True)
        excess = through[..., -1:] / self.pairs  # the mean of h, zero but for rounding of x and y
        through = through[..., :-1] - excess * self._before[1:]
        return self.dot(y, y) + self.dot(h, h - excess) + through.square() @ self._flow[1:].reciprocal()

    def triple(self, means: Tensor) -> Tensor:
        """Best terms of all three coordinates, from the matrix's means at each value of them, ``(3, ..., n)``."""
        centred = self._centre(means)
        total = centred.sum(0)
        # (1 + 2P) applied to the sum of the terms gives the sum of the means.
        both = total + 4 * self._inverse_3(total)
        both = both - 2 * self.expect(both)
        part = self._plus_inverse(centred - self.expect(both))
        # Constants were left out of all of this; a third of the mean goes to each axis.
        return self._centre(part + self.expect(part)) + self.mean(means).mean(0) / 3

    def expect(self, f: Tensor) -> Tensor:
        """P: mean of ``f`` of one coordinate given each value of another."""
        if self._kernels:
            from wherewhat.measure.axes.cuda.scan import cumulative_sum

            return cumulative_sum(f, mean=True)
        return f.cumsum(-1).flip(-1) / self.weight

    def _sum(self, f: Tensor, *, weighted: bool = False) -> Tensor:
        """Sum of ``f``, or of ``weight · f``, up to each value."""
        if self._kernels:
            from wherewhat.measure.axes.cuda.scan import cumulative_sum

            return cumulative_sum(f, weighted=weighted)
        return (f * self.weight if weighted else f).cumsum(-1)

    def dot(self, f: Tensor, g: Tensor) -> Tensor:
        """Sum of ``f · g`` over the triangle, ``(...)``."""
        return (f * g) @ self.weight

    def mean(self, f: Tensor) -> Tensor:
        """Mean of ``f`` over the triangle, ``(..., 1)``."""
        return (f * self.weight).sum(-1, keepdim=True) / self.pairs

    def _centre(self, f: Tensor) -> Tensor:
        return f - self.mean(f)

    def _plus_inverse(self, h: Tensor) -> Tensor:
        """``(1 + 1/L) h`` without constants: ``w L y (t) = flow(t) ∇y(t) - flow(t+1) ∇y(t+1)``."""
        h = self._centre(h)
        step = -self._sum(h, weighted=True)[..., :-1] / self._flow[1:]
        return self._centre(h + pad(self._sum(step), (1, 0)))

    def _inverse_3(self, g: Tensor) -> Tensor:
        """``(L - 3)⁻¹ g`` without constants and without the linear part, which L - 3 sends to zero.

        A difference turns L - 3 into the operator of the same kind one degree lower, which cumulative sums invert.
        """
        slope = self._centre_1(g[..., 1:] - g[..., :-1])
        bend = -self._sum(self._weight_1 * slope)[..., :-1] / self._flow_1[1:]
        slope = self._centre_1(pad(self._sum(bend), (1, 0)))
        return self._centre(pad(self._sum(slope), (1, 0)))

    def _centre_1(self, u: Tensor) -> Tensor:
        return u - (u * self._weight_1).sum(-1, keepdim=True) / self._weight_1.sum()
