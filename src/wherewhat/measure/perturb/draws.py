"""Seeded draws: which of so many units are disturbed at a rate, and with which they are swapped.

For one seed, what is drawn at a low rate is among what is drawn at a higher one, except for adjacent pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers that depends on the seed alone."""
    return torch.Generator().manual_seed(seed)


def share(count: int, rate: float, *, per: int = 1) -> int:
    """How many groups of ``per`` units make up a share of ``count`` units, to the nearest."""
    return min(count // per, int(rate * count / per + 0.5))


def some(count: int, rate: float, seed: int) -> Tensor:
    """A share of ``count`` units, in random order, ``(m,)``."""
    return torch.randperm(count, generator=seeded(seed))[: share(count, rate)]


def random_pairs(count: int, rate: float, seed: int) -> Tensor:
    """Disjoint pairs, drawn evenly, that make up a share of ``count`` units, ``(pairs, 2)``."""
    pairs = share(count, rate, per=2)
    return torch.randperm(count, generator=seeded(seed))[: 2 * pairs].view(pairs, 2)


def adjacent_pairs(count: int, rate: float, seed: int) -> Tensor:
    """The same of neighbours, ``(pairs, 2)``: every set of so many disjoint pairs of neighbours is as likely."""
    pairs = share(count, rate, per=2)
    # A pair taken for one unit leaves count - pairs units, of which any may be the pairs.
    starts = torch.randperm(count - pairs, generator=seeded(seed))[:pairs].sort().values + torch.arange(pairs)
    return torch.stack([starts, starts + 1], 1)
