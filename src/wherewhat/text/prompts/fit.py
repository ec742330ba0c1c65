"""Choose the number of pairs or symbols that fits a prompt's length, with balanced answer positions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.text.prompts.prompt import PromptBuilder
from wherewhat.text.prompts.vocabulary import PieceTokenizer

SMALLEST = 2
"""Smallest number of pairs or symbols."""


def check_whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    """Refuse a value that is not an integer of at least ``least``, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}: at least {least} is needed")


@dataclass(frozen=True)
class PromptTask:
    """Prompts of one kind with a question, for one tokenizer.

    Attributes:
        kind: Name of the kind.
        option: Name of the option that sets the size.
        size: Number of pairs or symbols; None for as many as fit.
        default: Size if neither ``size`` nor a number of tokens is given.
        largest: Largest size that the tokenizer allows; None for no limit.
        index: Index of the pair or symbol asked for; None for all in turn.
        write: Builds a prompt of a given size that asks for a given index.
    """

    kind: str
    option: str
    size: int | None
    default: int
    largest: int | None
    index: int | None
    write: Callable[[int, int, random.Random], PromptBuilder]

    def fitted(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """Return ``count`` prompts of one size, of at most ``tokens`` tokens with the model's prefix."""
        self._check_size()
        smallest = max(SMALLEST, 0 if self.index is None else self.index + 1)
        if self.size is not None or tokens is None:
            default = self.default if self.largest is None else min(self.default, self.largest)
            size = max(smallest, default) if self.size is None else self.size
            built = self._build(size, count, seed)
            self._check_tokens(built, size, tokenizer, tokens)
            return built
        space = tokens - len(tokenizer.prefix)
        self._check_tokens(self._build(smallest, count, seed), smallest, tokenizer, tokens)
        # The size is found with one prompt; if words differ in length, the others may need a smaller one.
        size = self._largest_fitting(smallest, space, seed)
        while size > smallest:
            built = self._build(size, count, seed)
            longest = max(len(builder.ids) for builder in built)
            if longest <= space:
                return built
            each = longest / size
            size = max(smallest, size - max(1, int((longest - space) / each)))
        return self._build(smallest, count, seed)

    def _build(self, size: int, count: int, seed: int) -> list[PromptBuilder]:
        rng = generator(self.kind, seed, "places")
        asked = balanced(size, count, rng) if self.index is None else [self.index] * count
        return [self.write(size, index, generator(self.kind, seed, number)) for number, index in enumerate(asked)]

    def _largest_fitting(self, low: int, space: int, seed: int) -> int:
        """Return the largest size whose first prompt has at most ``space`` tokens, by bisection."""

        def fits(size: int) -> bool:
            return len(self._build(size, 1, seed)[0].ids) <= space

        high = low + 1
        while (self.largest is None or high <= self.largest) and fits(high):
            low, high = high, 2 * high
        if self.largest is not None:
            high = min(high, self.largest + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _check_size(self) -> None:
        name, size = self.option, self.size
        if self.largest is not None and self.largest < SMALLEST:
            raise ConfigError(
                f"this tokenizer distinguishes only {self.largest} words that {self.kind} prompts could use, "
                f"of at least {SMALLEST}: use a model whose tokenizer knows English"
            )
        if size is not None and size < SMALLEST:
            raise ConfigError(f"{name} is {size}: {self.kind} prompts need at least {SMALLEST}")
        if self.largest is not None and size is not None and size > self.largest:
            raise ConfigError(f"{name} is {size}: with this tokenizer, {self.kind} prompts have at most {self.largest}")
        limit = self.largest if size is None else size
        if self.index is not None and (self.index < 0 or (limit is not None and self.index >= limit)):
            last = "" if limit is None else f" to {limit - 1}"
            raise ConfigError(f"index_answer is {self.index}: choose from 0{last}")

    def _check_tokens(
        self, built: list[PromptBuilder], size: int, tokenizer: PieceTokenizer, tokens: int | None
    ) -> None:
        needed = len(tokenizer.prefix) + max(len(builder.ids) for builder in built)
        if tokens is not None and needed > tokens:
            raise ConfigError(
                f"tokens is {tokens}: {self.kind} prompts with {self.option} {size} need at least {needed} tokens"
            )


def balanced(size: int, count: int, rng: random.Random) -> list[int]:
    """Return ``count`` indices below ``size`` in random order, whose numbers of occurrences differ by at most one.

    Indices that exceed whole rounds are spread evenly over the range.
    """
    rounds, rest = divmod(count, size)
    indices = list(range(size)) * rounds
    indices += [rng.randrange(part * size // rest, (part + 1) * size // rest) for part in range(rest)]
    rng.shuffle(indices)
    return indices


def generator(kind: str, seed: int, what: int | str) -> random.Random:
    """Return a separate random generator for each prompt, so that prompts do not depend on their number."""
    return random.Random(f"{kind} {seed} {what}")  # noqa: S311 - reproducible, not secret
