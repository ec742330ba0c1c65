"""Whether what heads are like goes with what a model tolerates, over encodings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from wherewhat.measure.distance.ranks import centred_ranks, cosine

_EXACT = 8
"""Encodings up to which all orders are looked at; 8 have 40,320."""

_DRAWS = 4000


@dataclass(frozen=True)
class Relation:
    """Spearman's correlation over encodings, with how sure it is.

    Attributes:
        rho: The correlation; NaN for fewer than 3 encodings.
        low: Lower end of its 95 % bootstrap interval over encodings; NaN likewise.
        high: Upper end.
        p: Share of all ways to match the two orders that correlate as strongly, either way; NaN likewise.
        n: Number of encodings.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int


def relate(x: Sequence[float], y: Sequence[float], *, seed: int = 0) -> Relation:
    """Rank correlation of two numbers that each encoding has; those that lack one are left out.

    Seeds of one encoding are no independent witnesses, so the numbers are means over seeds, and encodings are what is
    drawn anew and what is permuted.

    Args:
        x: One number per encoding.
        y: The other.
        seed: Seed of the bootstrap.
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    n = len(pairs)
    if n < 3:
        return Relation(math.nan, math.nan, math.nan, math.nan, n)
    values = torch.tensor(pairs, dtype=torch.float64)
    first, second = centred_ranks(values[:, 0]), centred_ranks(values[:, 1])
    rho = float(cosine(first, second))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (_DRAWS, n), generator=generator)
    again = cosine(centred_ranks(values[:, 0][drawn]), centred_ranks(values[:, 1][drawn]))
    again = again[again.isfinite()]  # a draw of one encoding alone has no order
    low, high = (float(again.quantile(q)) for q in (0.025, 0.975)) if len(again) else (math.nan, math.nan)
    return Relation(rho, low, high, _chance(first, second, rho, generator), n)


def _chance(first: Tensor, second: Tensor, rho: float, generator: torch.Generator) -> float:
    """Share of orders of the second that correlate with the first as strongly; exact for few encodings."""
    n = len(first)
    if not math.isfinite(rho):
        return math.nan
    if n <= _EXACT:
        orders = torch.tensor(list(permutations(range(n))))
    else:
        orders = torch.rand(_DRAWS, n, generator=generator).argsort(-1)
    found = cosine(first.expand(len(orders), -1), second[orders])
    return float((found.abs() >= abs(rho) - 1e-12).double().mean())
