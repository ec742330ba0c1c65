"""Disturbed positions: pure functions from a number of tokens, a rate and a seed to where the tokens stand.

The first ``prefix`` tokens are left alone, but for :func:`shift`. Each returns positions ``(n,)`` and which tokens were
themselves moved, ``(n,)`` bool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.measure.perturb.draws import random_pairs, seeded, share, some


def jitter(n: int, rate: float, seed: int, *, prefix: int = 0, reach: int = 8) -> tuple[Tensor, Tensor]:
    """A share of the tokens stands up to ``reach`` places before or after where it should; two may stand together."""
    chosen = some(n - prefix, rate, seed) + prefix
    # Drawn for all tokens, so that a higher rate adds tokens and leaves the others' steps as they are.
    generator = seeded(seed + 1_000_000)
    steps = torch.randint(1, reach + 1, (n,), generator=generator)[chosen]
    steps = torch.where(torch.rand(n, generator=generator)[chosen] < 0.5, -steps, steps)
    steps = torch.where(chosen + steps < 0, -steps, steps)
    return _moved(n, chosen, chosen + steps)


def swap(n: int, rate: float, seed: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """A share of the tokens exchange their positions in random pairs."""
    pairs = random_pairs(n - prefix, rate, seed) + prefix
    return _moved(n, pairs.flatten(), pairs.flip(1).flatten())


def shuffle(n: int, rate: float, seed: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """A share of the tokens hand their positions round in one random circle: none keeps its own."""
    chosen = some(n - prefix, rate, seed) + prefix
    if len(chosen) < 2:
        chosen = chosen[:0]
    return _moved(n, chosen, chosen.roll(-1))


def gaps(n: int, rate: float, seed: int, *, prefix: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """In front of a share of the tokens ``size`` positions are left out; those tokens count as moved."""
    chosen = some(n - prefix, rate, seed) + prefix
    before = torch.zeros(n, dtype=torch.int64)
    before[chosen] = size
    return torch.arange(n) + before.cumsum(0), before > 0


def shift(n: int, rate: float) -> tuple[Tensor, Tensor]:
    """All tokens stand further on by the share of n; none counts as moved, because all distances stay."""
    return torch.arange(n) + share(n, rate), torch.zeros(n, dtype=torch.bool)


def _moved(n: int, tokens: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    positions, moved = torch.arange(n), torch.zeros(n, dtype=torch.bool)
    positions[tokens] = to
    moved[tokens] = True
    return positions, moved
