"""The interface of a task: sampled sequences with answers and paths, in disjoint splits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}: at least {least} is needed")
    if most is not None and value > most:
        raise ConfigError(f"{name} is {value}: at most {most} is possible")


def check_hops(hops: int, pretarget: int) -> None:
    """Refuse more hops than there are places to visit."""
    check_whole("hops", hops, least=1)
    if hops > pretarget + 1:
        raise ConfigError(
            f"hops is {hops}: a pre-target window of {pretarget} has room for at most {pretarget + 1}; make it longer"
        )


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of one task, one per row.

    Attributes:
        tokens: Token ids ``(count, n)``, int64; the last token is the query.
        answers: Token ids of the answers ``(count,)``, int64.
        hops: How many hops lead to them ``(count,)``, int64.
        path: Positions visited ``(count, max_hops + 1)``, int64: the query, then the position each hop reaches, the
            answer's last; -1 fills what is left.
    """

    tokens: Tensor
    answers: Tensor
    hops: Tensor
    path: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, index: Tensor) -> Sequences:
        """The rows of an index or mask ``(rows,)``."""
        return Sequences(self.tokens[index], self.answers[index], self.hops[index], self.path[index])

    def behind(self, prefix: Tensor) -> Sequences:
        """The same questions behind more tokens.

        Args:
            prefix: Token ids ``(count, extra)`` to stand in front.
        """
        extra = prefix.shape[1]
        path = torch.where(self.path >= 0, self.path + extra, self.path)
        return Sequences(torch.cat((prefix, self.tokens), dim=1), self.answers, self.hops, path)


_VALIDATION = 200
"""One sequence in so many is for validation."""

_TEST = 19
"""Test sequences for each of those."""

_ROUNDS = 1000
_EFFORT = 20
"""Sequences drawn anew, per sequence wanted, before giving up."""


def split_sizes(total: int, *, hops: int) -> tuple[int, int, int]:
    """Numbers of training, validation and test sequences: 90 %, 0.5 % and 9.5 %."""
    check_whole("total", total, least=_VALIDATION * hops)
    validation = total // _VALIDATION
    test = total * _TEST // _VALIDATION
    return total - validation - test, validation, test


def fingerprints(tokens: Tensor) -> Tensor:
    """One int64 for each row of ``tokens`` ``(count, n)``: equal rows have equal ones."""
    weights = 1 + 2 * torch.randint(2**62, (tokens.shape[1],), generator=Generator().manual_seed(1))
    return (tokens * weights).sum(dim=1)


def redraw_shared(drawn: Sequences, taken: Tensor, redraw: Callable[[Tensor], Sequences], *, what: str) -> Sequences:
    """Sequences none of which is taken: those that are get drawn anew, for the same question.

    Two different rows with one fingerprint, which chance brings about once in 10^8 times or so, cost a redraw and
    nothing else.

    Args:
        drawn: The sequences.
        taken: Fingerprints of the sequences that they must not contain.
        redraw: Draws the rows of an index ``(rows,)`` anew.
        what: What they are for, to be named if it fails.
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
        f"{len(rows)} of {len(drawn)} {what} sequences are also in another split, however often they are drawn anew: "
        "the task has too few different ones; ask for fewer in total, or give it longer windows or more symbols"
    )


_STREAMS = 4
_SEEDS = 2**32 // _STREAMS
"""torch's CPU generator looks at 32 bits of a seed."""


def seeded(seed: int, *, stream: int = 0) -> Generator:
    """A generator on the CPU. Streams of one seed have nothing in common with each other or with other seeds."""
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
        """The answer's token id and the positions visited, the query's first, by following the task's rule."""

    @abstractmethod
    def _draw(self, plan: Plan, *, extra: int, generator: Generator) -> Sequences:
        """Sequences with the plan's answers; what ``extra`` needs is drawn last."""

    @abstractmethod
    def _spell(self, token: int) -> str:
        """A token as text."""

    def spell(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Token ids ``(n,)`` as text."""
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
