"""What a task is: a frozen dataclass of options that samples sequences and solves them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.tasks.checking import check_whole
from wherewhat.multihop.tasks.drawing import Plan, balanced_plan, seeded
from wherewhat.multihop.tasks.sequences import Sequences
from wherewhat.multihop.tasks.splitting import fingerprints, redraw_shared, split_sizes


class Task(ABC):
    """A task whose answer is a token of the sequence, found by hops from the last token."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of tokens."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sequence, query included, without extra ones."""

    @property
    @abstractmethod
    def max_hops(self) -> int:
        """Largest number of hops."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """Number of tokens that can be the answer; their ids come first."""

    @property
    @abstractmethod
    def places(self) -> int:
        """Number of positions where the answer can stand."""

    @abstractmethod
    def solve(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The answer's token id and the positions visited, the query's first, by following the task's rule.

        Raises:
            ConfigError: If the rule does not lead to one answer.
        """

    @abstractmethod
    def _draw(self, plan: Plan, *, extra: int, generator: Generator) -> Sequences:
        """Sequences with the plan's answers; what ``extra`` needs is drawn last."""

    @abstractmethod
    def _spell(self, token: int) -> str:
        """A token as text."""

    def spell(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Token ids ``(n,)`` as text.

        Raises:
            ConfigError: If there is no such token.
        """
        tokens = [int(token) for token in ids]
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ConfigError(f"there is no token {token}: ids go from 0 to {self.vocabulary - 1}")
        return [self._spell(token) for token in tokens]

    def sample(self, count: int, *, seed: int, hops: int | None = None, extra: int = 0) -> Sequences:
        """Sequences in random order, the same for the same arguments.

        Numbers of hops come in equal shares, and for each of them answers, positions of answers and their
        combinations do too: no two differ by more than 1 in how often they occur.

        Args:
            count: How many.
            seed: Another seed, other sequences.
            hops: The number of hops of all of them; all numbers in equal shares if not given.
            extra: Tokens to put in front that do not change the answer. The last ``length`` tokens are the same
                whatever it is.

        Raises:
            ConfigError: If an argument is out of range.
        """
        check_whole("count", count, least=1)
        check_whole("extra", extra, least=0)
        if hops is not None:
            check_whole("hops", hops, least=1, most=self.max_hops)
        generator = seeded(seed)
        return self._draw(self._plan(count, hops, generator), extra=extra, generator=generator)

    def splits(self, total: int = 480_000, seed: int = 0) -> tuple[Sequences, Sequences, Sequences]:
        """Training, validation and test sequences: 90 %, 0.5 % and 9.5 %, each balanced as `sample` is.

        No sequence is in two of them: one that an earlier split has is drawn anew for the same number of hops, answer
        and position, so balance stays. The test set is drawn first, the training set last. Within a split a sequence
        may come twice, as chance has it; in the tasks of the paper's size none is expected to.

        Args:
            total: How many sequences together.
            seed: Another seed, other sequences; they have nothing to do with those `sample` draws from it.

        Raises:
            ConfigError: If ``total`` is too small, or the task has too few different sequences for it.
        """
        names = ("training", "validation", "test")
        sizes = split_sizes(total, hops=self.max_hops)
        taken = torch.empty(0, dtype=torch.int64)
        found: list[Sequences] = []
        for stream in (3, 2, 1):
            generator = seeded(seed, stream=stream)
            plan = self._plan(sizes[stream - 1], None, generator)

            def draw(rows: Tensor, plan: Plan = plan, generator: Generator = generator) -> Sequences:
                return self._draw(plan.select(rows), extra=0, generator=generator)

            drawn = draw(torch.arange(len(plan)))
            found.append(redraw_shared(drawn, taken, draw, what=names[stream - 1]))
            taken = torch.cat((taken, fingerprints(found[-1].tokens)))
        test, validation, train = found
        return train, validation, test

    def _plan(self, count: int, hops: int | None, generator: Generator) -> Plan:
        numbers = range(1, self.max_hops + 1) if hops is None else (hops,)
        return balanced_plan(count, hops=tuple(numbers), answers=self.answers, places=self.places, generator=generator)
