"""The pairs of query and key a fit looks at, and the additive model's normal equations on them.

Every supported region is a causal band after a change of origin. With queries i and keys j of a text, first key s
and smallest distance m, put ``i' = i - s - m`` and ``j' = j - s``: the pairs with ``i - j ≥ m`` and ``j ≥ s`` are those
with ``i' ≥ j'``. So one triangle of side n, cut to distances below ``width``, is all the mathematics needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
        """Number of distances, queries and keys: how values of the three axes are packed into one vector."""
        return self.width, self.n, self.n

    @cached_property
    def counts(self) -> Tensor:
        """Pairs at each distance, of each query and of each key, packed, ``(size,)`` float64."""
        by_distance = self.n - torch.arange(self.width, device=self.device, dtype=torch.float64)
        by_query = torch.arange(1, self.n + 1, device=self.device, dtype=torch.float64).clamp_max(self.width)
        return self.pack(by_distance, by_query, by_query.flip(0))

    @staticmethod
    def pack(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Values by distance, query and key as one vector ``(..., size)``."""
        return torch.cat([a, b, c], -1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values by distance ``(..., width)``, query ``(..., n)`` and key ``(..., n)``."""
        w, n = self.width, self.n
        return packed[..., :w], packed[..., w : w + n], packed[..., w + n :]

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.width * self.n - self.width * (self.width - 1) // 2

    @property
    def rank(self) -> int:
        """Free parameters of a + b + c: two constants and a ramp are counted twice among them."""
        return 2 * self.n + self.width - 3

    def normal(self, packed: Tensor) -> Tensor:
        """Sums of ``a[i-j] + b[i] + c[j]`` along diagonals, rows and columns: the normal matrix times (a, b, c).

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
        # Distances a query sees are 0 … min(i, w-1); a key is seen at the same ones counted from the end.
        rows[..., :w] += sum_a
        columns[..., n - w :] += sum_a.flip(-1)
        rows += sum_c
        columns += tail_b
        if w < n:
            rows[..., w:] += sum_a[..., -1:] - sum_c[..., : n - w]
            columns[..., : n - w] += sum_a[..., -1:] - tail_b[..., w:]
        return out
