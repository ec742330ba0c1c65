"""Random choices that all tasks share: which question to ask, and where its path goes.

Everything is drawn on the CPU for all rows at once, from one generator, so that a seed means the same sequences on
every machine; sorting is stable for the same reason, as ties do occur.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from wherewhat.multihop.tasks.checking import check_whole

_STREAMS = 4
_SEEDS = 2**32 // _STREAMS
"""torch's CPU generator looks at 32 bits of a seed."""


def seeded(seed: int, *, stream: int = 0) -> Generator:
    """A generator on the CPU. Streams of one seed have nothing in common with each other or with other seeds.

    Raises:
        ConfigError: If the seed is not a whole number from 0 to 2^30 - 1.
    """
    check_whole("seed", seed, least=0, most=_SEEDS - 1)
    return Generator().manual_seed(seed * _STREAMS + stream)


def draw_below(limits: Tensor, generator: Generator) -> Tensor:
    """Whole numbers from 0 to below ``limits``, one for each, uniform up to 2^-40."""
    return torch.randint(2**62, limits.shape, generator=generator) % limits


def draw_other(values: Tensor, limit: int, generator: Generator) -> Tensor:
    """Whole numbers from 0 to below ``limit`` that differ from ``values``, uniform over the others."""
    return (values + 1 + torch.randint(limit - 1, values.shape, generator=generator)) % limit


@dataclass(frozen=True, eq=False)
class Plan:
    """The questions to ask: all that is balanced.

    Attributes:
        hops: Number of hops ``(count,)``.
        answers: Token ids of the answers ``(count,)``.
        places: Where the answers stand, from 0 for the first place an answer can have ``(count,)``.
    """

    hops: Tensor
    answers: Tensor
    places: Tensor

    def __len__(self) -> int:
        return self.hops.shape[0]

    def select(self, index: Tensor) -> Plan:
        """The rows of an index or mask ``(rows,)``."""
        return Plan(self.hops[index], self.answers[index], self.places[index])


def balanced_plan(count: int, *, hops: Sequence[int], answers: int, places: int, generator: Generator) -> Plan:
    """A plan in random order with hops in equal shares, and answers and places in equal shares for each of them.

    Equal is exact: among the rows of one number of hops, two answers differ by at most 1 in how often they occur, two
    places too, and two combinations of answer and place too.

    Args:
        count: How many questions.
        hops: The numbers of hops to use.
        answers: Number of different answers; their ids start at 0.
        places: Number of different places.
        generator: Where chance comes from.
    """
    row = torch.arange(count)
    which, rank = row % len(hops), row // len(hops)
    # Both indices step with the rank. They meet again after lcm rows; one more step for the places then makes new
    # combinations, until all have come once.
    again = math.lcm(answers, places)
    answer_order = torch.rand(len(hops), answers, generator=generator).argsort(dim=1, stable=True)
    place_order = torch.rand(len(hops), places, generator=generator).argsort(dim=1, stable=True)
    plan = Plan(
        hops=torch.tensor(hops)[which],
        answers=answer_order[which, rank % answers],
        places=place_order[which, (rank + rank // again) % places],
    )
    return plan.select(torch.randperm(count, generator=generator))


def draw_path(
    hops: Tensor, goals: Tensor, *, max_hops: int, first: int, window: int, query: int, generator: Generator
) -> Tensor:
    """Paths from the query through the pre-target window to the goals.

    The positions between are drawn without replacement and visited from right to left.

    Args:
        hops: Number of hops ``(count,)``.
        goals: Positions of the answers ``(count,)``.
        max_hops: The largest number of hops of the task.
        first: First position of the pre-target window.
        window: Its length.
        query: Position of the query.
        generator: Where chance comes from.

    Returns:
        Positions ``(count, max_hops + 1)``, filled up with -1.
    """
    count = len(hops)
    path = torch.full((count, max_hops + 1), -1)
    path[:, 0] = query
    if max_hops > 1:
        drawn = first + torch.rand(count, window, generator=generator).argsort(dim=1, stable=True)[:, : max_hops - 1]
        drawn = drawn.masked_fill(torch.arange(1, max_hops) >= hops[:, None], -1)
        path[:, 1:max_hops] = drawn.sort(dim=1, descending=True).values
    return path.scatter(1, hops[:, None], goals[:, None])
