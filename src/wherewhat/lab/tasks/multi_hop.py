"""The number and letter tasks of Urrutia et al., 2026 (arXiv 2605.31558)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.tasks.task import Plan, Sequences, Task, check_hops, check_whole, draw_below, draw_path

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def symbol(index: int) -> str:
    """The symbol number ``index`` from 0: a … z, aa, ab …, as the columns of a spreadsheet are named."""
    text = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, len(ALPHABET))
        text = ALPHABET[letter] + text
    return text


@dataclass(frozen=True)
class Pairs:
    """Token ids of atomic pairs: first all (letter, digit), then all (letter, letter).

    Attributes:
        letters: Number of letters.
        digits: Number of digits.
    """

    letters: int
    digits: int

    @property
    def first_link(self) -> int:
        """Id of the first (letter, letter); smaller ids are the answers, (letter, digit)."""
        return self.letters * self.digits

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.letters * (self.digits + self.letters)

    def spell(self, token: int) -> str:
        """A token as text: ``a1`` or ``ab``, with a dot between the two where letters have more than one character."""
        if token < self.first_link:
            left, digit = divmod(token, self.digits)
            right = str(digit + 1)
        else:
            left, letter = divmod(token - self.first_link, self.letters)
            right = symbol(letter)
        return symbol(left) + ("." if self.letters > len(ALPHABET) else "") + right


def follow_numbers(tokens: Sequence[int], *, symbols: int, integers: int) -> tuple[int, list[int]]:
    """An integer m means "m positions to the left"; follow from the last token until a letter."""
    tokens = _known(tokens, symbols + integers)
    position = len(tokens) - 1
    visited = [position]
    if tokens[position] < symbols:
        raise ConfigError(f"the last token, {tokens[position]}, is a letter: it must be an integer")
    while tokens[position] >= symbols:
        steps = tokens[position] - symbols + 1
        if steps > position:
            raise ConfigError(f"the integer {steps} at position {position} points before the start of the sequence")
        position -= steps
        visited.append(position)
    return tokens[position], visited


def follow_letters(tokens: Sequence[int], *, letters: int, digits: int) -> tuple[int, list[int]]:
    """The right letter of a pair names the left letter of the next; follow from the last until a (letter, digit)."""
    tokens = _known(tokens, letters * (letters + digits))
    bound = letters * digits
    position = len(tokens) - 1
    visited = [position]
    wanted = _asked(tokens, letters=letters, bound=bound)
    while True:
        named = _places(tokens, wanted, letters=letters, digits=digits)
        if len(named) != 1:
            raise ConfigError(f"letter {wanted} is the left letter of {len(named)} pairs: it must be that of one")
        if named[0] >= position:
            raise ConfigError(f"the pair at position {position} names one at {named[0]}, which is not before it")
        position = named[0]
        visited.append(position)
        if tokens[position] < bound:
            return tokens[position], visited
        wanted = (tokens[position] - bound) % letters


def last_bound(tokens: Sequence[int], *, letters: int, digits: int) -> tuple[int, list[int]]:
    """The right letter of the last token names a letter; its last (letter, digit) is the answer."""
    tokens = _known(tokens, letters * (letters + digits))
    bound = letters * digits
    wanted = _asked(tokens, letters=letters, bound=bound)
    if any(token >= bound for token in tokens[:-1]):
        raise ConfigError("only the last token may be a (letter, letter)")
    named = _places(tokens[:-1], wanted, letters=letters, digits=digits)
    if not named:
        raise ConfigError(f"letter {wanted} has no digit in the sequence")
    return tokens[named[-1]], [len(tokens) - 1, named[-1]]


def _known(tokens: Sequence[int], vocabulary: int) -> list[int]:
    known = [int(token) for token in tokens]
    if not known:
        raise ConfigError("the sequence is empty: it must at least have a query")
    for token in known:
        if not 0 <= token < vocabulary:
            raise ConfigError(f"there is no token {token}: ids go from 0 to {vocabulary - 1}")
    return known


def _asked(tokens: Sequence[int], *, letters: int, bound: int) -> int:
    if tokens[-1] < bound:
        raise ConfigError(f"the last token, {tokens[-1]}, is a (letter, digit): it must be a (letter, letter)")
    return (tokens[-1] - bound) % letters


def _places(tokens: Sequence[int], left: int, *, letters: int, digits: int) -> list[int]:
    bound = letters * digits
    lefts = [token // digits if token < bound else (token - bound) // letters for token in tokens]
    return [position for position, letter in enumerate(lefts) if letter == left]


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
        """The answer's token id and the positions visited, the query's first."""
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
        """The answer's token id and the positions visited, the query's first."""
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
