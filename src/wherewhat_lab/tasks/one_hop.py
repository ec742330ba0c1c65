"""Tasks of one hop that a single attention head can do.

The canonical tasks of Urrutia et al., 2025 (arXiv 2511.11579): Index needs positions, Retrieval needs symbols, partial
induction needs both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.options import option
from wherewhat_lab.tasks.multi_hop import IntegerTask, PairTask
from wherewhat_lab.tasks.task import QuestionPlan, Sequences, SequenceTask, check_whole, draw_below, draw_other


class OneHopTask(SequenceTask):
    """A target window and a query that points into it."""

    def _sequences(self, plan: QuestionPlan, targets: Tensor, query: Tensor, goals: Tensor) -> Sequences:
        """Return sequences of targets ``(count, target)`` and queries ``(count,)`` with the answers at the goals."""
        targets = targets.scatter(1, goals[:, None], plan.answers[:, None])
        path = torch.stack((torch.full_like(goals, self.target), goals), dim=1)
        return Sequences(torch.cat((targets, query[:, None]), dim=1), plan.answers, plan.hops, path)


@dataclass(frozen=True)
class IndexTask(OneHopTask, IntegerTask):
    """Letters, then an integer m: the answer is the letter m positions to its left.

    Letters are uniform and independent except for the answer. Ids: letters from 0, then the integers from 1 on. Extra
    tokens are letters.
    """

    target: int = option(16, "letters, one of which is the answer")
    symbols: int = option(120, "different letters: a to z, then aa, ab and so on")

    def __post_init__(self) -> None:
        """Check the options."""
        check_whole("target", self.target, least=1)
        check_whole("symbols", self.symbols, least=1)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.symbols + self.target

    def _draw(self, plan: QuestionPlan, *, extra: int, generator: Generator) -> Sequences:
        letters = torch.randint(self.symbols, (len(plan), self.target), generator=generator)
        query = self.symbols + self.target - plan.slots - 1
        prefix = torch.randint(self.symbols, (len(plan), extra), generator=generator)
        return self._sequences(plan, letters, query, plan.slots).behind(prefix)


@dataclass(frozen=True)
class _OneHopPairTask(OneHopTask, PairTask):
    """(letter, digit) pairs, then a (letter, letter) whose right letter is the query."""

    target: int = option(16, "(letter, digit) pairs, one of which is the answer")
    letters: int = option(8, "different letters")
    digits: int = option(8, "different digits")

    def __post_init__(self) -> None:
        """Check the options."""
        check_whole("target", self.target, least=1)
        check_whole("letters", self.letters, least=2)
        check_whole("digits", self.digits, least=1)

    def _query(self, asked: Tensor, generator: Generator) -> Tensor:
        """Draw queries for letters ``(count,)``, with another left letter."""
        return self.answers + draw_other(asked, self.letters, generator) * self.letters + asked

    def _digits(self, count: int, width: int, generator: Generator) -> Tensor:
        return torch.randint(self.digits, (count, width), generator=generator)


@dataclass(frozen=True)
class RetrievalTask(_OneHopPairTask):
    """(letter, digit) pairs, then a (letter, letter): the answer is the one pair with the query's right letter.

    Other pairs have any other letter, uniformly. Ids: first all (letter, digit), then all (letter, letter). Extra
    tokens are other pairs too.
    """

    def _draw(self, plan: QuestionPlan, *, extra: int, generator: Generator) -> Sequences:
        count = len(plan)
        asked = plan.answers // self.digits

        def others(width: int) -> Tensor:
            letters = draw_other(asked[:, None].expand(count, width), self.letters, generator)
            return letters * self.digits + self._digits(count, width, generator)

        sequences = self._sequences(plan, others(self.target), self._query(asked, generator), plan.slots)
        return sequences.behind(others(extra))


@dataclass(frozen=True)
class PartialInductionTask(_OneHopPairTask):
    """(letter, digit) pairs, then a (letter, letter): the answer is the last pair with the query's right letter.

    At least one pair before the answer has the same letter and another digit, so that the letter alone does not
    determine the answer, which can have any position but the first of the target window. Pairs before it have any
    letter, those after it any other letter. Ids: first all (letter, digit), then all (letter, letter). Extra tokens are
    pairs of any letter.
    """

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_whole("target", self.target, least=2)
        check_whole("digits", self.digits, least=2)

    @property
    def slots(self) -> int:
        """Number of positions that can hold the answer."""
        return self.target - 1

    def _follow(self, tokens: list[int]) -> tuple[int, list[int]]:
        """Find the last (letter, digit) with the right letter of the last token."""
        wanted = self._query_letter(tokens)
        if any(token >= self.answers for token in tokens[:-1]):
            raise ConfigError("only the last token may be a (letter, letter)")
        named = self._positions(tokens[:-1], wanted)
        if not named:
            raise ConfigError(f"letter {wanted} has no digit in the sequence")
        return tokens[named[-1]], [len(tokens) - 1, named[-1]]

    def _draw(self, plan: QuestionPlan, *, extra: int, generator: Generator) -> Sequences:
        count, goals = len(plan), plan.slots + 1
        asked, digit = plan.answers // self.digits, plan.answers % self.digits
        before = torch.randint(self.letters, (count, self.target), generator=generator)
        after = draw_other(asked[:, None].expand_as(before), self.letters, generator)
        letters = torch.where(torch.arange(self.target) < goals[:, None], before, after)
        targets = letters * self.digits + self._digits(count, self.target, generator)
        earlier = asked * self.digits + draw_other(digit, self.digits, generator)
        targets.scatter_(1, draw_below(goals, generator)[:, None], earlier[:, None])
        sequences = self._sequences(plan, targets, self._query(asked, generator), goals)
        return sequences.behind(torch.randint(self.answers, (count, extra), generator=generator))
