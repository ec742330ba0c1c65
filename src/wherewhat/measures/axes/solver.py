"""Least squares for the three axes: in closed form on the causal triangle, by conjugate gradients on a band."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Band:
    """Pairs ``(i, j)`` with ``0 ≤ i - j < width`` and ``0 ≤ j ≤ i < n``.

    Attributes:
        n: Number of queries, and of keys.
        width: Number of distances; n for the whole causal triangle.
        device: Where the sums are computed.
    """

    n: int
    width: int
    device: torch.device

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of distances, queries and keys: the layout of a packed vector."""
        return self.width, self.n, self.n

    @cached_property
    def counts(self) -> Tensor:
        """Number of pairs at each distance, of each query and of each key, packed, ``(size,)`` float64."""
        by_distance = self.n - torch.arange(self.width, device=self.device, dtype=torch.float64)
        by_query = torch.arange(1, self.n + 1, device=self.device, dtype=torch.float64).clamp_max(self.width)
        return self.pack(by_distance, by_query, by_query.flip(0))

    @staticmethod
    def pack(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return values by distance, query and key as one vector ``(..., size)``."""
        return torch.cat([a, b, c], -1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values by distance ``(..., width)``, query ``(..., n)`` and key ``(..., n)``, as views."""
        w, n = self.width, self.n
        return packed[..., :w], packed[..., w : w + n], packed[..., w + n :]

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.width * self.n - self.width * (self.width - 1) // 2

    @property
    def rank(self) -> int:
        """Number of free parameters of a + b + c: two constants and a linear ramp are redundant."""
        return 2 * self.n + self.width - 3

    def normal(self, packed: Tensor) -> Tensor:
        """Return sums of ``a[i-j] + b[i] + c[j]`` along diagonals, rows and columns: the normal matrix times (a, b, c).

        Args:
            packed: Values by distance, query and key, ``(..., size)``.

        Returns:
            The sums, packed likewise, in time O(n).
        """
        w, n = self.width, self.n
        a, b, c = self.unpack(packed)
        sum_a, sum_b, sum_c = a.cumsum(-1), b.cumsum(-1), c.cumsum(-1)
        out = packed * self.counts.to(packed.dtype)
        diagonals, rows, columns = self.unpack(out)
        tail_b = sum_b[..., -1:] - sum_b
        tail_b += b  # Σ_{i ≥ d} b
        diagonals += tail_b[..., :w]
        diagonals += sum_c.flip(-1)[..., :w]
        # A query sees the distances 0 … min(i, w-1); a key is seen at the same ones, counted from the end.
        rows[..., :w] += sum_a
        columns[..., n - w :] += sum_a.flip(-1)
        rows += sum_c
        columns += tail_b
        if w < n:
            rows[..., w:] += sum_a[..., -1:] - sum_c[..., : n - w]
            columns[..., : n - w] += sum_a[..., -1:] - tail_b[..., w:]
        return out


class Triangle:
    """Operators on functions ``(..., n)`` float64 of one coordinate of the simplex (the causal triangle)."""

    def __init__(self, n: int, device: torch.device) -> None:
        t = torch.arange(n, dtype=torch.float64, device=device)
        self.weight = n - t
        self.pairs = n * (n + 1) // 2
        self._flow = t * (n - t) * (n + 1 - t)
        self._before = t * (2 * n + 1 - t) / 2  # Σ weight of smaller values
        x = t[:-1]
        self._weight_1 = (x + 1) * (n - 1 - x) * (n - x)
        self._flow_1 = x * (x + 1) * (n - 1 - x) * (n - x) * (n + 1 - x)

    def solve(self, sums: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of squares and products for all subsets of the axes, and the best terms of all three.

        Args:
            sums: Sums of the matrix along diagonals, rows and columns, packed, ``(heads, 3n)`` float64.
            offset: Known additive terms, packed likewise.

        Returns:
            ``(15, heads)``: the mean of both; products of the three offsets with themselves and the matrix, and of two
            offsets; sums of squares explained by every subset; squares of the offsets; and the terms ``(3, heads, n)``.
        """
        # On the simplex queries are counted from the end, and the three axes are alike: (3, heads, n).
        means, offsets = (torch.unflatten(x, -1, (3, -1)).movedim(1, 0).clone() for x in (sums, offset))
        means[1], offsets[1] = means[1].flip(-1), offsets[1].flip(-1)
        means /= self.weight
        mean = (self.mean(means[0]) + self.mean(offsets).sum(0))[:, 0]
        offsets[1] -= mean[:, None]
        expected = self.expect(offsets)
        # Products of offsets with each other and with the matrix, for the sums of squares of all subsets.
        own = self.dot(offsets, offsets + 2 * means)
        mixed = 2 * self.dot(_chosen(offsets, (0, 0, 1)), _chosen(expected, (1, 2, 2)))
        # Means for a pair of axes: its own, and those of the offset of the axis left out.
        left = expected.flip(0)
        x, y = _chosen(means, (0, 0, 1)) + left, _chosen(means, (1, 2, 2)) + left
        alone = torch.stack([x[0], x[2], y[1]]) + expected.roll(-1, 0)
        terms = self.triple(means)
        whole = self.dot(terms, means).sum(0, keepdim=True)
        explained = torch.cat([self.dot(alone, alone), self.explained_by_pair(x, y), whole])
        reach = self.dot(offsets, offsets).sum(0, keepdim=True)
        terms += offsets
        terms[1] = (terms[1] + mean[:, None]).flip(-1)
        return torch.cat([mean[None], own, mixed, explained, reach]), terms

    def explained_by_pair(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of squares explained by terms of two coordinates, ``(...)``, from the means at each value.

        The terms are ``f = (1 + 1/L) h`` with ``h = x - P y``, and ``y - P f``. Together they explain
        ``⟨y, y⟩ + ⟨h, f⟩``, and ``⟨h, h/L⟩`` is a sum over the flow of h: one cumulative sum, no terms.
        """
        h = x - self.expect(y)
        through = (h * self.weight).cumsum(-1)
        excess = through[..., -1:] / self.pairs  # the mean of h, zero but for rounding of x and y
        through = through[..., :-1] - excess * self._before[1:]
        return self.dot(y, y) + self.dot(h, h - excess) + through.square() @ self._flow[1:].reciprocal()

    def triple(self, means: Tensor) -> Tensor:
        """Return the best terms of all three coordinates, ``(3, ..., n)``, from the means at each of their values."""
        centred = self._centre(means)
        total = centred.sum(0)
        # (1 + 2P) applied to the sum of the terms gives the sum of the means.
        both = total + 4 * self._inverse_3(total)
        both = both - 2 * self.expect(both)
        part = self._plus_inverse(centred - self.expect(both))
        # The operators leave out constants; a third of the mean goes to each axis.
        return self._centre(part + self.expect(part)) + self.mean(means).mean(0) / 3

    def expect(self, f: Tensor) -> Tensor:
        """Return P f: the mean of ``f`` of one coordinate given each value of another."""
        return f.cumsum(-1).flip(-1) / self.weight

    def dot(self, f: Tensor, g: Tensor) -> Tensor:
        """Return the sum of ``f · g`` over the triangle, ``(...)``."""
        return (f * g) @ self.weight

    def mean(self, f: Tensor) -> Tensor:
        """Return the mean of ``f`` over the triangle, ``(..., 1)``."""
        return (f * self.weight).sum(-1, keepdim=True) / self.pairs

    def _centre(self, f: Tensor) -> Tensor:
        return f - self.mean(f)

    def _plus_inverse(self, h: Tensor) -> Tensor:
        """Return ``(1 + 1/L) h`` without constants: ``w L y (t) = flow(t) ∇y(t) - flow(t+1) ∇y(t+1)``."""
        h = self._centre(h)
        step = -(h * self.weight).cumsum(-1)[..., :-1] / self._flow[1:]
        return self._centre(h + pad(step.cumsum(-1), (1, 0)))

    def _inverse_3(self, g: Tensor) -> Tensor:
        """Return ``(L - 3)⁻¹ g`` without constants and without the linear part, which L - 3 maps to zero.

        Differences turn L - 3 into the operator of the same kind one degree lower, which cumulative sums invert.
        """
        slope = self._centre_1(g[..., 1:] - g[..., :-1])
        bend = -(self._weight_1 * slope).cumsum(-1)[..., :-1] / self._flow_1[1:]
        slope = self._centre_1(pad(bend.cumsum(-1), (1, 0)))
        return self._centre(pad(slope.cumsum(-1), (1, 0)))

    def _centre_1(self, u: Tensor) -> Tensor:
        return u - (u * self._weight_1).sum(-1, keepdim=True) / self._weight_1.sum()


def conjugate_gradients(band: Band, mask: Tensor, residual: Tensor, *, tolerance: float = 1e-12) -> Tensor:
    """Return the terms of the best additive approximation, packed, in the shape of ``residual``.

    Preconditioned with the counts, the normal matrix is the identity plus a smooth operator: the number of iterations
    is about seven times n / width, and otherwise hardly depends on n.

    Args:
        band: The pairs of the fit.
        mask: 1 where a packed vector has terms of the axes to use, broadcastable to ``residual``.
        residual: Sums of the matrices along diagonals, rows and columns, ``(..., size)`` float64, as
            :func:`first_residual` returns them.
        tolerance: Relative residual of the normal equations to stop at.
    """
    inverse = mask / band.counts
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
        # Converged heads are frozen: below rounding, their next step would be noise divided by noise.
        step = torch.where(active, energy / (direction * image).sum(-1, keepdim=True), 0)
        terms.addcmul_(direction, step)
        residual = torch.addcmul(residual, image, step, value=-1)
        z = residual * inverse
        fresh = (residual * z).sum(-1, keepdim=True)
        direction = torch.addcmul(z, direction, torch.where(active, fresh / energy, 0))
        energy = torch.where(active, fresh, energy)
    raise ArithmeticError(f"least squares on {band.n} tokens did not converge in {most} iterations")


_DENSE = 1024
"""Largest number of terms on a GPU that is solved by inverse matrices: an iteration must be read from it to stop."""


def solve_densely(band: Band, residuals: Tensor) -> Tensor:
    """Return the same as :func:`conjugate_gradients` for all of :data:`SUBSETS`, ``(subsets, heads, size)``.

    Nothing is read from the device. Time O(size²) for each head.
    """
    inverses, masks = _inverses(band.n, band.width, band.device)
    terms = residuals @ inverses
    # One correction, by the normal equations themselves, of the rounding of the inverse.
    return terms + (residuals - band.normal(terms) * masks) @ inverses


@lru_cache(maxsize=2)
@torch.inference_mode(False)
def _inverses(n: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inverses of the normal matrices ``(subsets, size, size)`` and 1 where a subset has terms.

    Terms that other axes could absorb are left out: along them the matrices, which are singular, are made regular.
    """
    band = Band(n, width, device)
    normal = band.normal(torch.eye(sum(band.sizes), dtype=torch.float64, device=device))
    inverses, masks = [], []
    for subset in SUBSETS:
        mask, basis = _mask(band, subset), _null_basis(band, subset)
        regular = normal * mask * mask[:, None] + n * basis @ basis.T + (1 - mask).diag()
        inverses.append(torch.linalg.inv(regular) * mask * mask[:, None])
        masks.append(mask)
    return torch.stack(inverses), torch.stack(masks)[:, None]


def first_residual(band: Band, sums: Tensor, subset: str) -> tuple[Tensor, Tensor]:
    """Return 1 where a packed vector has terms of the subset, ``(size,)``, and the residual without any term."""
    mask = _mask(band, subset)
    # Row, column and diagonal sums share a total and a first moment. If rounding makes them differ, the singular normal
    # equations have no solution, and the iteration diverges.
    basis = _null_basis(band, subset)
    residual = sums * mask
    return mask, residual - (residual @ basis) @ basis.T


def _mask(band: Band, subset: str) -> Tensor:
    """Return 1 where a packed vector has terms of the subset, ``(size,)`` float64."""
    parts = [torch.full((m,), float(x in subset)) for x, m in zip("abc", band.sizes, strict=True)]
    return torch.cat(parts).to(band.device, torch.float64)


def _null_basis(band: Band, subset: str) -> Tensor:
    """Return orthonormal packed terms of the subset whose sum is zero everywhere, ``(size, count)``."""
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


SUBSETS = ("a", "b", "c", "ab", "ac", "bc", "abc")
_TOGETHER = 2**14
"""Largest size of sums on a CPU of which all subsets are solved at once: it takes fewer operations on more numbers."""
_PAIRS = ("ab", "ac", "bc")


@dataclass(frozen=True)
class Margins:
    """Sufficient statistics of a matrix of logits for least squares: its sums and the sum of its squares.

    Attributes:
        band: Pairs that the sums are over.
        sums: Sums along diagonals, rows and columns, packed as :meth:`Band.pack` does, ``(heads, size)`` float64.
        squares: Sum of squares, ``(heads,)`` float64.
    """

    band: Band
    sums: Tensor
    squares: Tensor


@dataclass(frozen=True)
class SubsetFits:
    """Least squares for every subset of the axes.

    Attributes:
        sse: Sum of squared errors of every subset, in the order of :data:`SUBSETS`, ``(subsets, heads)``.
        tss: Sum of squares around the mean, ``(heads,)``.
        mean: Mean of the matrix, ``(heads,)``.
        reach: Sum of squares of the summands of the matrix, ``(heads,)``: the scale of rounding errors.
        terms: Best terms of all three axes by distance, query and key.
    """

    sse: Tensor
    tss: Tensor
    mean: Tensor
    reach: Tensor
    terms: tuple[Tensor, Tensor, Tensor]


def fit_subsets(margins: Margins, offset: Tensor) -> SubsetFits:
    """Fit every subset of the axes to the sum of a matrix with known margins and a known additive one.

    In closed form on the whole triangle, by conjugate gradients on a band.

    Args:
        margins: Margins of the first matrix.
        offset: Terms of the second, packed, ``(heads, size)``. They are kept separate because they would cancel: an
            axis of a subset absorbs its own offset, so only the offsets of the other axes remain to be explained.
    """
    whole = margins.band.width == margins.band.n
    return _fit_triangle(margins, offset) if whole else _fit_band(margins, offset)


def distance_error(curves: Tensor, band: Band) -> Tensor:
    """Return the sum of squares of distance curves ``(heads, width)`` that query and key terms leave, ``(heads,)``."""
    if band.width == band.n:
        triangle = _triangle(band.n, band.device)
        centred = curves - triangle.mean(curves)
        expected = triangle.expect(centred)
        return (triangle.dot(centred, centred) - triangle.explained_by_pair(expected, expected)).clamp_min(0)
    offset = torch.zeros(len(curves), sum(band.sizes), dtype=torch.float64, device=band.device)
    band.unpack(offset)[0].copy_(curves)
    nothing = Margins(band, torch.zeros_like(offset), torch.zeros(len(curves)).to(offset))
    return fit_subsets(nothing, offset).sse[SUBSETS.index("bc")]


def _fit_triangle(margins: Margins, offset: Tensor) -> SubsetFits:
    band = margins.band
    statistics, terms = _triangle(band.n, band.device).solve(margins.sums, offset)
    mean, products, explained, reach = statistics[0], statistics[1:7], statistics[7:14], statistics[14]
    squares = margins.squares + _left_out(band.device) @ products
    return SubsetFits(
        # The least-squares fit is orthogonal to the error: SSE = total - explained.
        sse=(squares[1:] - explained).clamp_min_(0),
        tss=squares[0].clamp_min(0),
        mean=mean,
        reach=margins.squares + reach + mean.square() * band.pairs,
        terms=(terms[0], terms[1], terms[2]),
    )


@lru_cache(maxsize=1)
@torch.inference_mode(False)  # the cached tensors are also used outside of inference mode
def _triangle(n: int, device: torch.device) -> Triangle:
    """Return the operators, cached for the last size: all layers of a text have the same."""
    return Triangle(n, device)


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _left_out(device: torch.device) -> Tensor:
    """Return 1 where a product of two offsets is of axes that a subset leaves out, ``(subsets + 1, products)`` float64.

    One row for no axis and for each of :data:`SUBSETS`, one column for each axis with itself and for each pair.
    """
    products = ("a", "b", "c", *_PAIRS)
    rows = [[float(not set(product) & set(subset)) for product in products] for subset in ("", *SUBSETS)]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _chosen(x: Tensor, indices: Iterable[int]) -> Tensor:
    """Return ``x[indices]`` without an index tensor, which would have to be copied to a GPU."""
    return torch.stack([x[index] for index in indices])


def _fit_band(margins: Margins, offset: Tensor) -> SubsetFits:
    band = margins.band
    reach = margins.squares + offset.square() @ band.counts
    mean = band.unpack(margins.sums + band.normal(offset))[1].sum(-1) / band.pairs
    offset = offset.clone()
    band.unpack(offset)[1].sub_(mean[:, None])
    left = [offset * (1 - _mask(band, subset)) for subset in ("", *SUBSETS)]  # what a subset does not absorb
    sums = [margins.sums + band.normal(x) for x in left]
    squares = [margins.squares + (x * (margins.sums + y)).sum(-1) for x, y in zip(left, sums, strict=True)]
    solutions = _solve(band, sums[1:])
    # The quadratic form itself: its error is quadratic in that of the iteration.
    sse = [
        (square - (terms * (2 * known - band.normal(terms))).sum(-1)).clamp_min(0)
        for square, terms, known in zip(squares[1:], solutions, sums[1:], strict=True)
    ]
    a, b, c = band.unpack(solutions[-1] + offset)
    return SubsetFits(
        sse=torch.stack(sse), tss=squares[0].clamp_min(0), mean=mean, reach=reach, terms=(a, b + mean[:, None], c)
    )


def _solve(band: Band, sums: Sequence[Tensor]) -> list[Tensor]:
    """Return the terms of every subset, in the order of :data:`SUBSETS`, from its sums, ``(heads, size)`` each."""
    started = (first_residual(band, known, subset) for known, subset in zip(sums, SUBSETS, strict=True))
    if sums[0].device.type != "cpu" and sums[0].shape[-1] <= _DENSE:
        return list(solve_densely(band, torch.stack([residual for _, residual in started])))
    if sums[0].device.type != "cpu" or sums[0].numel() > _TOGETHER:
        return [conjugate_gradients(band, mask, residual) for mask, residual in started]
    masks, residuals = (torch.stack(x) for x in zip(*started, strict=True))
    return list(conjugate_gradients(band, masks[:, None], residuals))
