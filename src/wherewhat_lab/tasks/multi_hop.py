"""The number and letter tasks of Urrutia et al., 2026 (arXiv 2605.31558)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.options import option
from wherewhat_lab.tasks.task import QuestionPlan, Sequences, SequenceTask, check_whole, draw_below


class IntegerTask(SequenceTask):
    """A task of letters and integers, which come after them: integer m points m positions to the left."""

    symbols: int

    @property
    def answers(self) -> int:
        """Number of tokens that can be the answer; their ids come first."""
        return self.symbols

    def _follow(self, tokens: list[int]) -> tuple[int, list[int]]:
        """Follow integers from the last token until a letter."""
        position = len(tokens) - 1
        visited = [position]
        if tokens[position] < self.symbols:
            raise ConfigError(f"the last token, {tokens[position]}, is a letter: it must be an integer")
        while tokens[position] >= self.symbols:
            steps = tokens[position] - self.symbols + 1
            if steps > position:
                raise ConfigError(f"the integer {steps} at position {position} points before the start of the sequence")
            position -= steps
            visited.append(position)
        return tokens[position], visited


class PairTask(SequenceTask):
    """A task of atomic pairs: token ids are first all (letter, digit), the answers, then all (letter, letter)."""

    letters: int
    digits: int

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.letters * (self.digits + self.letters)

    @property
    def answers(self) -> int:
        """Number of tokens that can be the answer; their ids come first."""
        return self.letters * self.digits

    def _follow(self, tokens: list[int]) -> tuple[int, list[int]]:
        """Follow pairs, whose right letter is the left letter of the next, from the last until a (letter, digit)."""
        position = len(tokens) - 1
        visited = [position]
        wanted = self._query_letter(tokens)
        while True:
            named = self._positions(tokens, wanted)
            if len(named) != 1:
                raise ConfigError(f"letter {wanted} is the left letter of {len(named)} pairs: it must be that of one")
            if named[0] >= position:
                raise ConfigError(f"the pair at position {position} names one at {named[0]}, which is not before it")
            position = named[0]
            visited.append(position)
            if tokens[position] < self.answers:
                return tokens[position], visited
            wanted = (tokens[position] - self.answers) % self.letters

    def _query_letter(self, tokens: list[int]) -> int:
        if tokens[-1] < self.answers:
            raise ConfigError(f"the last token, {tokens[-1]}, is a (letter, digit): it must be a (letter, letter)")
        return (tokens[-1] - self.answers) % self.letters

    def _positions(self, tokens: list[int], left: int) -> list[int]:
        """Return the positions of the pairs with a left letter."""
        bound = self.answers
        lefts = [token // self.digits if token < bound else (token - bound) // self.letters for token in tokens]
        return [position for position, letter in enumerate(lefts) if letter == left]


class MultiHopTask(SequenceTask):
    """A target window that holds the answer, a pre-target window that paths visit, and a query."""

    pretarget: int
    hops: int

    @property
    def length(self) -> int:
        """Tokens of a sequence, query included, without extra ones."""
        return self.target + self.pretarget + 1

    @property
    def max_hops(self) -> int:
        """Largest number of hops."""
        return self.hops

    def _check_windows(self) -> None:
        check_whole("target", self.target, least=1)
        check_whole("pretarget", self.pretarget, least=1)
        check_whole("hops", self.hops, least=1)
        if self.hops > self.pretarget + 1:
            raise ConfigError(
                f"hops is {self.hops}: a pre-target window of {self.pretarget} allows at most {self.pretarget + 1}; "
                "make it longer"
            )

    def _draw_path(self, plan: QuestionPlan, generator: Generator) -> Tensor:
        """Draw paths from the query through the pre-target window to the answers, ``(count, max_hops + 1)``.

        The positions between are drawn without replacement and visited from right to left; -1 fills the rest.
        """
        count, hops = len(plan), plan.hops
        path = torch.full((count, self.hops + 1), -1)
        path[:, 0] = self.length - 1
        if self.hops > 1:
            order = torch.rand(count, self.pretarget, generator=generator).argsort(dim=1, stable=True)
            drawn = self.target + order[:, : self.hops - 1]
            drawn = drawn.masked_fill(torch.arange(1, self.hops) >= hops[:, None], -1)
            path[:, 1 : self.hops] = drawn.sort(dim=1, descending=True).values
        return path.scatter(1, hops[:, None], plan.slots[:, None])


@dataclass(frozen=True)
class LetterTask(MultiHopTask, PairTask):
    """Pairs: the right letter of a pair is the left letter of the next, until a (letter, digit), the answer.

    The target window holds (letter, digit), the pre-target window and the query (letter, letter). A path visits
    positions of the pre-target window drawn without replacement, from right to left. The letters of its pairs, the
    query's left one included, are distinct, and no other pair uses them: others draw uniformly from the remaining ones.
    Ids: first all (letter, digit), then all (letter, letter). Extra tokens are (letter, digit) of remaining letters.
    """

    target: int = option(8, "(letter, digit) pairs, one of which is the answer")
    pretarget: int = option(8, "(letter, letter) pairs between them and the query")
    hops: int = option(4, "largest number of hops; all numbers from 1 occur equally often")
    letters: int = option(8, "different letters")
    digits: int = option(8, "different digits")

    def __post_init__(self) -> None:
        """Check the options."""
        self._check_windows()
        check_whole("letters", self.letters, least=1)
        check_whole("digits", self.digits, least=1)
        if self.letters < self.hops + 2:
            raise ConfigError(
                f"letters is {self.letters}: a chain of {self.hops} hops uses {self.hops + 1} and other pairs need "
                f"one more, so give at least {self.hops + 2}"
            )

    def _draw(self, plan: QuestionPlan, *, extra: int, generator: Generator) -> Sequences:
        count = len(plan)
        path = self._draw_path(plan, generator)
        # All letters in random order, the answer's first: the chain uses the first ones, backwards from the answer to
        # the query, and other pairs use the rest.
        keys = torch.rand(count, self.letters, generator=generator)
        order = keys.scatter(1, plan.answers[:, None] // self.digits, -1.0).argsort(dim=1, stable=True)

        def left_over(width: int) -> Tensor:
            used = plan.hops[:, None].expand(count, width) + 1
            return order.gather(1, used + draw_below(self.letters - used, generator))

        def bound(width: int) -> Tensor:
            digits = torch.randint(self.digits, (count, width), generator=generator)
            return left_over(width) * self.digits + digits

        targets = bound(self.target).scatter(1, plan.slots[:, None], plan.answers[:, None])
        aside = self.answers + left_over(self.pretarget) * self.letters + left_over(self.pretarget)
        tokens = torch.cat((targets, aside, torch.empty(count, 1, dtype=torch.int64)), dim=1)
        row, step = (path[:, 1:] >= 0).nonzero(as_tuple=True)
        to_go = plan.hops[row] - step
        tokens[row, path[row, step]] = self.answers + order[row, to_go] * self.letters + order[row, to_go - 1]
        return Sequences(tokens, plan.answers, plan.hops, path).behind(bound(extra))


@dataclass(frozen=True)
class NumberTask(MultiHopTask, IntegerTask):
    """Letters, then integers: integer m points m positions to the left; the letter that is reached is the answer.

    The target window holds letters, uniform and independent except for the answer; the pre-target window and the query
    hold integers. A path visits positions of the pre-target window drawn without replacement, from right to left. Any
    other integer there, at position p, is uniform on 1 … p. Ids: letters from 0, then the integers from 1 on. Extra
    tokens are letters, to which no integer points.
    """

    target: int = option(8, "letters, one of which is the answer")
    pretarget: int = option(8, "integers between them and the query")
    hops: int = option(4, "largest number of hops; all numbers from 1 occur equally often")
    symbols: int = option(120, "different letters: a to z, then aa, ab and so on")
    integers: int | None = option(None, "different integers in the vocabulary; as many as the windows need by default")

    def __post_init__(self) -> None:
        """Check the options."""
        self._check_windows()
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

    def _draw(self, plan: QuestionPlan, *, extra: int, generator: Generator) -> Sequences:
        count, query = len(plan), self.length - 1
        path = self._draw_path(plan, generator)
        letters = torch.randint(self.symbols, (count, self.target), generator=generator)
        letters.scatter_(1, plan.slots[:, None], plan.answers[:, None])
        # The id of integer m is symbols + m - 1, so m - 1 from 0 to below p.
        positions = torch.arange(self.target, query).expand(count, self.pretarget)
        aside = self.symbols + draw_below(positions, generator)
        tokens = torch.cat((letters, aside, torch.empty(count, 1, dtype=torch.int64)), dim=1)
        row, step = (path[:, 1:] >= 0).nonzero(as_tuple=True)
        here, there = path[row, step], path[row, step + 1]
        tokens[row, here] = self.symbols + here - there - 1
        sequences = Sequences(tokens, plan.answers, plan.hops, path)
        return sequences.behind(torch.randint(self.symbols, (count, extra), generator=generator))
