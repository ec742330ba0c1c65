"""The RoPE planes of a head, and sums of products over a causal band in linear time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.tensors import check_finite, check_heads
from wherewhat.options import short_repr


@dataclass(frozen=True)
class Planes:
    """Dimensions of a head grouped by their rotation angle.

    Dimensions are ordered: first of every plane, unrotated ones, second of every plane. As complex numbers these are
    the planes followed by the unrotated dimensions, whose imaginary part and angle are zero. In statistics *by plane*,
    the unrotated dimensions together are one more plane, the last, that never turns.

    Attributes:
        order: Head dimensions in that order, ``(d,)``.
        turning: Angle per position of each plane, ``(planes,)`` float64.
        rest: Number of unrotated dimensions.
        scaling: Factor of the rotation on the planes.
    """

    order: Tensor
    turning: Tensor
    rest: int
    scaling: float = 1.0

    __repr__ = short_repr

    @classmethod
    def of(cls, rotation: Rotation | None, d: int, *, device: torch.device | None = None) -> Planes:
        """Return the planes of heads with ``d`` dimensions; all are unrotated if ``rotation`` is None."""
        if rotation is None:
            return cls(torch.arange(d, device=device), torch.zeros(0, dtype=torch.float64, device=device), d)
        first, second = rotation.pairs.T
        if rotation.planes and int(second.max()) >= d:
            raise MeasureError(f"the rotation turns dimension {int(second.max())} of heads with {d} dimensions")
        turned = set(rotation.pairs.flatten().tolist())
        rest = torch.tensor([x for x in range(d) if x not in turned], dtype=first.dtype)
        order = torch.cat([first, rest, second]).to(device)
        return cls(order, rotation.inv_freq.double().to(device), len(rest), rotation.scaling)

    @property
    def count(self) -> int:
        """Number of planes, with the unrotated dimensions as one."""
        return len(self.turning) + (self.rest > 0)

    @property
    def dimensions(self) -> Tensor:
        """Number of dimensions of each plane, ``(count,)`` float64."""
        return self.by_plane(torch.ones(len(self.order), dtype=torch.float64, device=self.turning.device))

    @property
    def period(self) -> Tensor:
        """Positions per full turn of each plane, ``(count,)`` float64; infinite if it never turns."""
        never = torch.full((self.count - len(self.turning),), math.inf, dtype=torch.float64, device=self.turning.device)
        return torch.cat([2 * math.pi / self.turning.abs(), never])

    def arrange(self, x: Tensor) -> Tensor:
        """Return ``x`` ``(..., d)`` with its dimensions in order, float64."""
        return x[..., self.order].double()

    def to_complex(self, x: Tensor) -> Tensor:
        """Return arranged ``(..., d)`` as planes and unrotated dimensions, ``(..., planes + rest)`` complex128."""
        count = len(self.turning) + self.rest
        return torch.complex(x[..., :count].contiguous(), torch.nn.functional.pad(x[..., count:], (0, self.rest)))

    def to_real(self, z: Tensor) -> Tensor:
        """Undo :meth:`to_complex`."""
        return torch.cat([z.real, z.imag[..., : len(self.turning)]], -1)

    def rotor(self, positions: Tensor) -> Tensor:
        """Return the complex factors of the rotation, ``(n, planes + rest)`` complex128, without the scaling."""
        angle = positions.to(self.turning)[:, None] * torch.nn.functional.pad(self.turning, (0, self.rest))
        return torch.polar(torch.ones_like(angle), angle)

    def by_plane(self, values: Tensor) -> Tensor:
        """Return sums over each plane's dimensions of arranged values ``(..., d)``, ``(..., count)``."""
        turned = len(self.turning)
        planes = values[..., :turned] + values[..., turned + self.rest :]
        rest = values[..., turned : turned + self.rest]
        return torch.cat([planes, rest.sum(-1, keepdim=True)], -1) if self.rest else planes

    def size(self, z: Tensor) -> Tensor:
        """Return the length of ``z`` ``(..., planes + rest)`` in each plane, ``(..., count)``."""
        size = z.abs()
        turned, rest = size[..., : len(self.turning)], size[..., len(self.turning) :]
        return torch.cat([turned, rest.square().sum(-1, keepdim=True).sqrt()], -1) if self.rest else size

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values by plane ``(..., count)`` for each complex dimension, ``(..., planes + rest)``."""
        if not self.rest:
            return values
        return torch.cat([values[..., :-1], values[..., -1:].expand(*values.shape[:-1], self.rest)], -1)


@dataclass(frozen=True)
class BandSums:
    """Sums over the pairs ``0 ≤ i - j < width`` of logits ``W[i, j] = q_i · k_j`` and of their parts ``q_if k_jf``.

    Attributes:
        rows: Sums of W over each query's keys, ``(..., heads, n)``.
        columns: Sums of W over each key's queries, ``(..., heads, n)``.
        totals: Sums of each dimension's part, ``(..., heads, d)``.
        products: Sums of each dimension's part times W, ``(..., heads, d)``; their sum is the sum of squares.
        reach: Sum of W² over the whole triangle, ``(..., heads)``: the scale of rounding errors.
    """

    rows: Tensor
    columns: Tensor
    totals: Tensor
    products: Tensor
    reach: Tensor

    @property
    def squares(self) -> Tensor:
        """Sum of W², ``(..., heads)``."""
        return self.products.sum(-1)

    def varies(self, tss: Tensor) -> Tensor:
        """Return whether a sum of squares around the mean exceeds rounding errors."""
        return tss > 1e-12 * self.reach.clamp_min(1e-300)


def band_sums(q: Tensor, k: Tensor, width: int) -> BandSums:
    """Return sums of ``q_i · k_j`` for heads that share a key head, in time O(n d²) and memory O(n d).

    Args:
        q: ``(..., heads, n, d)`` float64.
        k: ``(..., n, d)`` float64, shared by the heads.
        width: Number of distances.
    """
    n = k.shape[-2]
    whole = _triangle(q, k)
    if width >= n:
        return whole
    # A band is the triangle minus the smaller triangle of the far pairs.
    far = _triangle(q[..., width:, :], k[..., : n - width, :])
    whole.rows[..., width:] -= far.rows
    whole.columns[..., : n - width] -= far.columns
    products = whole.products - far.products
    return BandSums(whole.rows, whole.columns, whole.totals - far.totals, products, whole.reach)


def _triangle(q: Tensor, k: Tensor) -> BandSums:
    heads, n, d = q.shape[-3:]
    lead = k.shape[:-2]
    size = min(n, max(64, d))  # work inside a chunk grows with it, work between chunks shrinks
    chunks = -(-n // size)
    pad = chunks * size - n
    # Padded tokens are zero and do not change the sums.
    q = torch.nn.functional.pad(q, (0, 0, 0, pad)).view(*lead, heads, chunks, size, d)
    k = torch.nn.functional.pad(k, (0, 0, 0, pad)).view(*lead, 1, chunks, size, d)
    inside = (q @ k.mT).tril_()  # (..., heads, chunks, size, size)
    key_sums = k.sum(-2)
    before = key_sums.cumsum(-2) - key_sums  # (..., 1, chunks, d): keys of earlier chunks
    query_sums = q.sum(-2)
    after = query_sums.sum(-2, keepdim=True) - query_sums.cumsum(-2)  # (..., heads, chunks, d): queries of later chunks
    gram = k.mT @ k
    gram = gram.cumsum(-3) - gram  # (..., 1, chunks, d, d)
    rows = inside.sum(-1) + (q @ before[..., None])[..., 0]
    columns = inside.sum(-2) + (k @ after[..., None])[..., 0]
    products = (q * (inside @ k + q @ gram)).sum((-3, -2))
    return BandSums(
        rows=rows.flatten(-2)[..., :n],
        columns=columns.flatten(-2)[..., :n],
        totals=(q * (k.cumsum(-2) + before[..., None, :])).sum((-3, -2)),
        products=products,
        reach=products.sum(-1),
    )


def check(q: Tensor, k: Tensor, window: int | None) -> int:
    """Check queries and keys, and return the number of distances.

    Args:
        q: ``(heads, n, d)``.
        k: ``(kv_heads, n, d)``.
        window: Sliding window, if any.
    """
    check_heads(q, k)
    if q.shape[1:] != k.shape[1:]:
        raise MeasureError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must have the same n and d")
    n = q.shape[1]
    if n < 4:
        raise MeasureError(f"{n} tokens are too few for planes: at least 4 are needed")
    if window is not None and window < 3:
        raise MeasureError(f"window={window} leaves too few distances: at least 3 are needed")
    check_finite(q, k)
    return n if window is None else min(n, window)
