"""The number task of Urrutia et al., 2026 (arXiv 2605.31558): integers say how far to go, places decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator

from wherewhat.errors import ConfigError
from wherewhat.multihop.tasks.base import Task
from wherewhat.multihop.tasks.checking import check_hops, check_whole
from wherewhat.multihop.tasks.drawing import Plan, draw_below, draw_path
from wherewhat.multihop.tasks.sequences import Sequences
from wherewhat.multihop.tasks.solving import follow_numbers
from wherewhat.multihop.tasks.spelling import symbol


@dataclass(frozen=True)
class NumberTask(Task):
    """Letters, then integers: integer m means "m positions to the left"; follow until a letter, which is the answer.

    The target window holds letters, uniform and independent but for the answer; the pre-target window and the query
    hold integers. A path visits positions of the pre-target window drawn without replacement, from right to left. Any
    other integer there, at position p, is uniform on 1 … p. Ids: letters from 0, then the integers from 1 on. Extra
    tokens are letters; integers point as if they were not there.
    """

    target: int = field(default=8, metadata={"help": "letters, one of which is the answer"})
    pretarget: int = field(default=8, metadata={"help": "integers between them and the query"})
    hops: int = field(default=4, metadata={"help": "largest number of hops; all from 1 on in equal shares"})
    symbols: int = field(default=120, metadata={"help": "different letters: a to z, then aa, ab and so on"})
    integers: int | None = field(
        default=None,
        metadata={"help": "different integers in the vocabulary; as many as the windows need if not given"},
    )

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_whole("target", self.target, least=1)
        check_whole("pretarget", self.pretarget, least=1)
        check_hops(self.hops, self.pretarget)
        check_whole("symbols", self.symbols, least=1)
        needed = self.target + self.pretarget
        if self.integers is not None:
            check_whole("integers", self.integers, least=1)
            if self.integers < needed:
                raise ConfigError(
                    f"integers is {self.integers}: windows of {self.target} and {self.pretarget} need {needed}"
                )

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.symbols + (self.target + self.pretarget if self.integers is None else self.integers)

    @property
    def length(self) -> int:
        """Tokens of a sequence, query included, without extra ones."""
        return self.target + self.pretarget + 1

    @property
    def max_hops(self) -> int:
        """Largest number of hops."""
        return self.hops

    @property
    def answers(self) -> int:
        """Number of tokens that can be the answer; their ids come first."""
        return self.symbols

    @property
    def places(self) -> int:
        """Number of positions where the answer can stand."""
        return self.target

    def solve(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The answer's token id and the positions visited, the query's first.

        Raises:
            ConfigError: If the integers do not lead to a letter.
        """
        return follow_numbers(tokens, symbols=self.symbols, integers=self.vocabulary - self.symbols)

    def _spell(self, token: int) -> str:
        return symbol(token) if token < self.symbols else str(token - self.symbols + 1)

    def _draw(self, plan: Plan, *, extra: int, generator: Generator) -> Sequences:
        count, query = len(plan), self.length - 1
        path = draw_path(
            plan.hops,
            plan.places,
            max_hops=self.hops,
            first=self.target,
            window=self.pretarget,
            query=query,
            generator=generator,
        )
        letters = torch.randint(self.symbols, (count, self.target), generator=generator)
        letters.scatter_(1, plan.places[:, None], plan.answers[:, None])
        # The id of integer m is symbols + m - 1, so m - 1 from 0 to below p.
        positions = torch.arange(self.target, query).expand(count, self.pretarget)
        aside = self.symbols + draw_below(positions, generator)
        tokens = torch.cat((letters, aside, torch.empty(count, 1, dtype=torch.int64)), dim=1)
        row, step = (path[:, 1:] >= 0).nonzero(as_tuple=True)
        here, there = path[row, step], path[row, step + 1]
        tokens[row, here] = self.symbols + here - there - 1
        sequences = Sequences(tokens, plan.answers, plan.hops, path)
        return sequences.behind(torch.randint(self.symbols, (count, extra), generator=generator))
