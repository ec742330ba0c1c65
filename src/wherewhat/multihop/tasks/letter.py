"""The letter task of Urrutia et al., 2026 (arXiv 2605.31558): letters name the next pair, places do not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.tasks.base import Task
from wherewhat.multihop.tasks.checking import check_hops, check_whole
from wherewhat.multihop.tasks.drawing import Plan, draw_below, draw_path
from wherewhat.multihop.tasks.sequences import Sequences
from wherewhat.multihop.tasks.solving import follow_letters
from wherewhat.multihop.tasks.spelling import Pairs


@dataclass(frozen=True)
class LetterTask(Task):
    """Atomic pairs: a pair's right letter names the left letter of the next, until a (letter, digit), the answer.

    The target window holds (letter, digit), the pre-target window and the query (letter, letter). A path visits
    positions of the pre-target window drawn without replacement, from right to left. The letters of its pairs, the
    query's left one included, are distinct, and no other pair uses them: others draw from the letters left, uniformly.
    Ids: first all (letter, digit), then all (letter, letter). Extra tokens are (letter, digit) of letters left.
    """

    target: int = field(default=8, metadata={"help": "(letter, digit) pairs, one of which is the answer"})
    pretarget: int = field(default=8, metadata={"help": "(letter, letter) pairs between them and the query"})
    hops: int = field(default=4, metadata={"help": "largest number of hops; all from 1 on in equal shares"})
    letters: int = field(default=8, metadata={"help": "different letters"})
    digits: int = field(default=8, metadata={"help": "different digits"})

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_whole("target", self.target, least=1)
        check_whole("pretarget", self.pretarget, least=1)
        check_hops(self.hops, self.pretarget)
        check_whole("letters", self.letters, least=1)
        check_whole("digits", self.digits, least=1)
        if self.letters < self.hops + 2:
            raise ConfigError(
                f"letters is {self.letters}: a chain of {self.hops} hops uses {self.hops + 1} and other pairs need "
                f"one more, so give at least {self.hops + 2}"
            )

    @property
    def _pairs(self) -> Pairs:
        return Pairs(self.letters, self.digits)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self._pairs.vocabulary

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
        return self._pairs.first_link

    @property
    def places(self) -> int:
        """Number of positions where the answer can stand."""
        return self.target

    def solve(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The answer's token id and the positions visited, the query's first.

        Raises:
            ConfigError: If a letter on the way does not name exactly one earlier pair.
        """
        return follow_letters(tokens, letters=self.letters, digits=self.digits)

    def _spell(self, token: int) -> str:
        return self._pairs.spell(token)

    def _draw(self, plan: Plan, *, extra: int, generator: Generator) -> Sequences:
        count = len(plan)
        path = draw_path(
            plan.hops,
            plan.places,
            max_hops=self.hops,
            first=self.target,
            window=self.pretarget,
            query=self.length - 1,
            generator=generator,
        )
        # All letters in random order but the answer's first: the chain is read from there backwards to the query, and
        # what comes after it is left for other pairs.
        keys = torch.rand(count, self.letters, generator=generator)
        order = keys.scatter(1, plan.answers[:, None] // self.digits, -1.0).argsort(dim=1, stable=True)

        def left_over(width: int) -> Tensor:
            used = plan.hops[:, None].expand(count, width) + 1
            return order.gather(1, used + draw_below(self.letters - used, generator))

        def bound(width: int) -> Tensor:
            digits = torch.randint(self.digits, (count, width), generator=generator)
            return left_over(width) * self.digits + digits

        first_link = self._pairs.first_link
        targets = bound(self.target).scatter(1, plan.places[:, None], plan.answers[:, None])
        aside = first_link + left_over(self.pretarget) * self.letters + left_over(self.pretarget)
        tokens = torch.cat((targets, aside, torch.empty(count, 1, dtype=torch.int64)), dim=1)
        row, step = (path[:, 1:] >= 0).nonzero(as_tuple=True)
        to_go = plan.hops[row] - step
        tokens[row, path[row, step]] = first_link + order[row, to_go] * self.letters + order[row, to_go - 1]
        return Sequences(tokens, plan.answers, plan.hops, path).behind(bound(extra))
