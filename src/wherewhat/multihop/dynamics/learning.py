"""When a model learned what: the steps at which its accuracy passed given levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.dynamics.records import Dynamics


@dataclass(frozen=True)
class Learning:
    """Steps at which accuracy passed levels; -1 where it never did.

    Attributes:
        hops: The numbers of hops.
        levels: The levels.
        passed: Step of the first record with at least that accuracy, by number of hops, ``(levels, hops)`` int64.
        overall: The same for all answers together, ``(levels,)`` int64.
    """

    hops: tuple[int, ...]
    levels: tuple[float, ...]
    passed: Tensor
    overall: Tensor

    def at(self, level: float) -> dict[int, int]:
        """Step by number of hops.

        Raises:
            ConfigError: If another level was asked for.
        """
        steps: list[int] = self.passed[self.index(level)].tolist()
        return dict(zip(self.hops, steps, strict=True))

    def order(self, level: float) -> tuple[tuple[int, ...], ...]:
        """Numbers of hops in the order in which they were learned, those of the same record together.

        What was never learned is not among them.
        """
        steps = {hops: step for hops, step in self.at(level).items() if step >= 0}
        return tuple(tuple(h for h in steps if steps[h] == step) for step in sorted(set(steps.values())))

    def in_order(self, level: float) -> bool:
        """Whether all were learned, each number of hops after the ones below it."""
        return self.order(level) == tuple((hops,) for hops in self.hops)

    def spread(self, level: float) -> int | None:
        """Steps between the first and the last number of hops learned; None if one never was."""
        steps = self.at(level).values()
        return None if min(steps) < 0 else max(steps) - min(steps)

    def index(self, level: float) -> int:
        """Where a level is in the list.

        Raises:
            ConfigError: If it is not.
        """
        if level not in self.levels:
            raise ConfigError(f"learning was found for levels {', '.join(map(str, self.levels))}, not for {level}")
        return self.levels.index(level)


def find_learning(dynamics: Dynamics, *, levels: tuple[float, ...] = (0.5, 0.9, 0.99)) -> Learning:
    """Steps at which accuracy passed ``levels`` for the first time.

    Raises:
        ConfigError: If a level makes no sense.
    """
    for level in levels:
        if not 0 < level <= 1:
            raise ConfigError(f"level is {level}: give a number above 0, up to 1")
    # From whole numbers of hits: a share of exactly 0.9 must not fail by a rounding.
    counts = dynamics.counts.double()
    hits = (dynamics.accuracy.double() * counts).round()
    by_hops = hits / counts
    overall = hits.sum(-1, keepdim=True) / counts.sum()
    passed, together = (_first(dynamics.steps, x, levels) for x in (by_hops, overall))
    hops: list[int] = dynamics.hops.tolist()
    return Learning(tuple(hops), tuple(levels), passed, together[:, 0])


def _first(steps: Tensor, shares: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Step of the first record at or above each level, ``(levels, columns)``."""
    above = shares[None] >= torch.tensor(levels, dtype=torch.float64)[:, None, None]  # (levels, records, columns)
    first = above.int().argmax(1)
    return torch.where(above.any(1), steps[first], -1)
