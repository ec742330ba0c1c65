"""The interface of a task: sampled sequences with answers and paths, in disjoint splits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.options import check_integer

_MOST_TOKENS = 10**9
"""Largest number of tokens of all sequences, and of any number of a task."""


check_whole = partial(check_integer, most=10**7)
"""Refuse an option that is not an integer, or so large that sequences would not fit into memory."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of one task, one per row.

    Attributes:
        tokens: Token ids ``(count, n)``, int64; the last token is the query.
        answers: Token ids of the answers ``(count,)``, int64.
        hops: Numbers of hops to the answers ``(count,)``, int64.
        path: Visited positions ``(count, max_hops + 1)``, int64: the query's, then the position that each hop reaches,
            the answer's last; -1 fills the rest.
    """

    tokens: Tensor
    answers: Tensor
    hops: Tensor
    path: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def hop_numbers(self) -> tuple[int, ...]:
        """The numbers of hops that occur, ascending."""
        return tuple(sorted(set(self.hops.tolist())))

    def select(self, index: Tensor) -> Sequences:
        """Return the rows of an index or mask ``(rows,)``."""
        return Sequences(self.tokens[index], self.answers[index], self.hops[index], self.path[index])

    def behind(self, prefix: Tensor) -> Sequences:
        """Return the same questions after a prefix ``(count, extra)``."""
        extra = prefix.shape[1]
        path = torch.where(self.path >= 0, self.path + extra, self.path)
        return Sequences(torch.cat((prefix, self.tokens), dim=1), self.answers, self.hops, path)


_VALIDATION = 200
"""One sequence in 200 is for validation."""

_TEST = 19
"""Test sequences for each validation sequence."""

_ROUNDS = 1000
_EFFORT = 20
"""Largest number of redraws per sequence."""


def split_sizes(total: int, *, hops: int) -> tuple[int, int, int]:
    """Return the numbers of training, validation and test sequences: 90 %, 0.5 % and 9.5 %."""
    check_whole("total", total, least=_VALIDATION * hops)
    validation = total // _VALIDATION
    test = total * _TEST // _VALIDATION
    return total - validation - test, validation, test


def fingerprints(tokens: Tensor) -> Tensor:
    """Return a hash of each row of ``tokens`` ``(count, n)``, int64."""
    weights = 1 + 2 * torch.randint(2**62, (tokens.shape[1],), generator=Generator().manual_seed(1))
    return (tokens * weights).sum(dim=1)


def redraw_shared(drawn: Sequences, taken: Tensor, redraw: Callable[[Tensor], Sequences], *, what: str) -> Sequences:
    """Return sequences of which none is taken: those that are get redrawn for the same question.

    A hash collision of two different rows, which has a probability of about 10^-8, only costs a redraw.

    Args:
        drawn: The sequences.
        taken: Hashes of the sequences that they must not contain.
        redraw: Function that redraws the rows of an index ``(rows,)``.
        what: Name of the split for error messages.
    """
    tokens, path = drawn.tokens.clone(), drawn.path.clone()
    rows, fresh = torch.arange(len(drawn)), drawn
    effort = _EFFORT * len(drawn)
    for _ in range(_ROUNDS):
        rows = rows[torch.isin(fingerprints(fresh.tokens), taken)]
        if not len(rows):
            return Sequences(tokens, drawn.answers, drawn.hops, path)
        effort -= len(rows)
        if effort < 0:
            break
        fresh = redraw(rows)
        tokens[rows], path[rows] = fresh.tokens, fresh.path
    raise ConfigError(
        f"{len(rows)} of {len(drawn)} {what} sequences are also in another split after many redraws: "
        "the task has too few different ones; ask for fewer in total, or give it longer windows or more symbols"
    )


_STREAMS = 4
_SEEDS = 2**32 // _STREAMS
"""torch's CPU generator uses 32 bits of a seed."""


def seeded(seed: int, *, stream: int = 0) -> Generator:
    """Return a generator on the CPU; different streams and seeds are independent."""
    check_whole("seed", seed, least=0, most=_SEEDS - 1)
    return Generator().manual_seed(seed * _STREAMS + stream)


def draw_below(limits: Tensor, generator: Generator) -> Tensor:
    """Draw whole numbers from 0 to below ``limits``, one for each, uniform up to 2^-40."""
    return torch.randint(2**62, limits.shape, generator=generator) % limits


def draw_other(values: Tensor, limit: int, generator: Generator) -> Tensor:
    """Draw whole numbers from 0 to below ``limit`` that differ from ``values``, uniformly."""
    return (values + 1 + torch.randint(limit - 1, values.shape, generator=generator)) % limit


@dataclass(frozen=True, eq=False)
class QuestionPlan:
    """The balanced properties of questions.

    Attributes:
        hops: Number of hops ``(count,)``.
        answers: Token ids of the answers ``(count,)``.
        slots: Positions of the answers, counted from the first one that can hold an answer ``(count,)``.
    """

    hops: Tensor
    answers: Tensor
    slots: Tensor

    def __len__(self) -> int:
        return self.hops.shape[0]

    def select(self, index: Tensor) -> QuestionPlan:
        """Return the rows of an index or mask ``(rows,)``."""
        return QuestionPlan(self.hops[index], self.answers[index], self.slots[index])


def balanced_plan(count: int, *, hops: Sequence[int], answers: int, slots: int, generator: Generator) -> QuestionPlan:
    """Draw a plan in random order in which hops, and for each of them answers and slots, occur equally often.

    Among the rows of one number of hops, the counts of two answers differ by at most 1, and so do those of two slots
    and of two combinations of answer and slot.

    Args:
        count: Number of questions.
        hops: The numbers of hops to use.
        answers: Number of different answers; their ids start at 0.
        slots: Number of different slots.
        generator: Source of randomness.
    """
    row = torch.arange(count)
    which, rank = row % len(hops), row // len(hops)
    # Both indices advance with the rank and repeat after lcm rows; shifting the slot by one then makes new
    # combinations, until all have occurred once.
    again = math.lcm(answers, slots)
    answer_order = torch.rand(len(hops), answers, generator=generator).argsort(dim=1, stable=True)
    slot_order = torch.rand(len(hops), slots, generator=generator).argsort(dim=1, stable=True)
    plan = QuestionPlan(
        hops=torch.tensor(hops)[which],
        answers=answer_order[which, rank % answers],
        slots=slot_order[which, (rank + rank // again) % slots],
    )
    return plan.select(torch.randperm(count, generator=generator))


class SequenceTask(ABC):
    """A task whose answer is a token of the sequence, found by hops from the last token.

    By default a sequence is a target window, which can hold the answer anywhere, and a query one hop away from it.
    """

    target: int

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of tokens."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """Number of tokens that can be the answer; their ids come first."""

    @property
    def length(self) -> int:
        """Tokens of a sequence, query included, without extra ones."""
        return self.target + 1

    @property
    def max_hops(self) -> int:
        """Largest number of hops."""
        return 1

    @property
    def slots(self) -> int:
        """Number of positions that can hold the answer."""
        return self.target

    def solve(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return the answer's token id and the visited positions, starting with the query's, by the task's rule."""
        known = [int(token) for token in tokens]
        if not known:
            raise ConfigError("the sequence is empty: it must have at least a query")
        for token in known:
            if not 0 <= token < self.vocabulary:
                raise ConfigError(f"there is no token {token}: ids go from 0 to {self.vocabulary - 1}")
        return self._follow(known)

    @abstractmethod
    def _follow(self, tokens: list[int]) -> tuple[int, list[int]]:
        """Return the answer and the visited positions of a sequence of known tokens."""

    @abstractmethod
    def _draw(self, plan: QuestionPlan, *, extra: int, generator: Generator) -> Sequences:
        """Draw sequences with the plan's answers; extra tokens are drawn last."""

    def sample(self, count: int, *, seed: int, hops: int | None = None, extra: int = 0) -> Sequences:
        """Draw sequences in random order, the same for the same arguments.

        Numbers of hops occur equally often, and for each of them so do answers, positions of answers and their
        combinations: counts differ by at most 1.

        Args:
            count: Number of sequences.
            seed: Seed of the sequences.
            hops: The number of hops of all sequences; all numbers equally often by default.
            extra: Number of tokens in front that do not change the answer. The last ``length`` tokens do not depend on
                it.
        """
        check_whole("count", count, least=1)
        check_whole("extra", extra, least=0)
        if hops is not None:
            check_whole("hops", hops, least=1, most=self.max_hops)
        self._check_tokens(count, extra)
        generator = seeded(seed)
        return self._draw(self._plan(count, hops, generator), extra=extra, generator=generator)

    def splits(self, total: int = 480_000, seed: int = 0) -> tuple[Sequences, Sequences, Sequences]:
        """Draw training, validation and test sequences: 90 %, 0.5 % and 9.5 %, each balanced like :meth:`sample`.

        No sequence is in two splits: one that an earlier split has is redrawn for the same number of hops, answer and
        position, which preserves the balance. The test set is drawn first, the training set last. Within a split a
        sequence may occur twice by chance, which is not expected for tasks of the paper's size.

        Args:
            total: Number of sequences in all splits.
            seed: Seed of the sequences, which are independent of those that :meth:`sample` draws.
        """
        names = ("training", "validation", "test")
        sizes = split_sizes(total, hops=self.max_hops)
        self._check_tokens(total, 0)
        taken = torch.empty(0, dtype=torch.int64)
        splits: list[Sequences] = []
        for stream in (3, 2, 1):
            generator = seeded(seed, stream=stream)
            plan = self._plan(sizes[stream - 1], None, generator)

            def draw(rows: Tensor, plan: QuestionPlan = plan, generator: Generator = generator) -> Sequences:
                return self._draw(plan.select(rows), extra=0, generator=generator)

            drawn = draw(torch.arange(len(plan)))
            splits.append(redraw_shared(drawn, taken, draw, what=names[stream - 1]))
            taken = torch.cat((taken, fingerprints(splits[-1].tokens)))
        test, validation, train = splits
        return train, validation, test

    def _check_tokens(self, count: int, extra: int) -> None:
        if count * (self.length + extra) > _MOST_TOKENS:
            raise ConfigError(
                f"{count} sequences of {self.length + extra} tokens have more than {_MOST_TOKENS:,} in all: give fewer"
            )

    def _plan(self, count: int, hops: int | None, generator: Generator) -> QuestionPlan:
        numbers = range(1, self.max_hops + 1) if hops is None else (hops,)
        return balanced_plan(count, hops=tuple(numbers), answers=self.answers, slots=self.slots, generator=generator)
