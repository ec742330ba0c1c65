"""Prompts: token ids, the positions of key items and the correct answer, and as many pairs or symbols as fit."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wherewhat.errors import ConfigError, TextError
from wherewhat.text.prompts.vocabulary import PieceTokenizer, Pool, Word


@dataclass(frozen=True)
class PromptItem:
    """A span of tokens of a prompt with a known role.

    Attributes:
        role: ``"entity"``, ``"attribute"``, ``"letter"``, ``"number"``, ``"digit"``, ``"question"`` (each repetition of
            the word asked about), ``"example"`` (a whole solved example) or ``"block"`` (a copy of a random sequence).
        group: Number shared by items that belong together, such as the two words of a pair; from 0, left to right.
        start: Its first token, as an index into the prompt's ids.
        end: One past its last token.
    """

    role: str
    group: int
    start: int
    end: int

    def __post_init__(self) -> None:
        """Refuse an empty or impossible span."""
        if not 0 <= self.start < self.end:
            raise TextError(f"item '{self.role}' spans tokens {self.start} to {self.end}: that is no token")


@dataclass(frozen=True)
class Prompt:
    """Token ids with known key items, and a question about them where the kind has one.

    Attributes:
        name: Label in results; unique within the list it was made with.
        kind: The kind of prompt, such as ``"binding"``.
        ids: Token ids, the model's prefix (mostly BOS or nothing) included.
        text: Text of the ids after the prefix, before tokenizers normalise case or white space.
        items: Key items in order of position, without overlap.
        query: The last position, whose logits predict the answer.
        answer: Token ids of the correct answer; empty without a question.
        candidates: Token ids of every possible answer. None begins with another, so that scores can be compared.
        correct: Index of the answer among the candidates; -1 without a question.
        answer_item: Index of the item with the answer's tokens in the context, without white space in front of it; -1
            without a question.
        seed: Seed of the list of prompts.
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    text: str
    items: tuple[PromptItem, ...]
    query: int
    answer: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    correct: int
    answer_item: int
    seed: int

    def __post_init__(self) -> None:
        """Check that ids, items and answer are consistent."""
        if not self.ids:
            raise self._wrong("it has no tokens")
        if self.query != len(self.ids) - 1:
            raise self._wrong(f"query {self.query} is not its last position {len(self.ids) - 1}")
        ends = 0
        for item in self.items:
            if item.start < ends:
                raise self._wrong(f"item '{item.role}' at {item.start} starts before the item in front of it ends")
            ends = item.end
        if ends > len(self.ids):
            raise self._wrong(f"item '{self.items[-1].role}' ends at {ends}, beyond its {len(self.ids)} tokens")
        if self.asks:
            self._check_answer()
        elif self.candidates or self.correct != -1 or self.answer_item != -1:
            raise self._wrong("it has no answer, but candidates or an index of one: leave them empty and -1")

    @property
    def asks(self) -> bool:
        """Whether the prompt ends in a question."""
        return bool(self.answer)

    @property
    def answer_group(self) -> int:
        """Group of the item with the answer: its position among the alternatives; -1 without a question."""
        return self.items[self.answer_item].group if self.asks else -1

    def _check_answer(self) -> None:
        if not 0 <= self.correct < len(self.candidates):
            raise self._wrong(f"correct is {self.correct}, but there are {len(self.candidates)} candidates")
        if self.candidates[self.correct] != self.answer:
            raise self._wrong(f"candidate {self.correct} is not the answer")
        # Neighbours in sorted order are enough: a prefix sorts directly before what it begins.
        ordered = sorted(self.candidates)
        for candidate, following in itertools.pairwise(ordered):
            if following[: len(candidate)] == candidate:
                raise self._wrong(f"candidate {list(candidate)} begins another: their scores cannot be compared")
        if not 0 <= self.answer_item < len(self.items):
            raise self._wrong(f"answer_item is {self.answer_item}, but there are {len(self.items)} items")
        item = self.items[self.answer_item]
        # White space at the start of an answer may precede the item.
        if self.ids[: item.end][-len(self.answer) :] != self.answer or item.end - item.start > len(self.answer):
            raise self._wrong(f"item {self.answer_item} does not hold the answer's tokens")

    def _wrong(self, reason: str) -> TextError:
        return TextError(f"prompt '{self.name}' does not fit together: {reason}")


SENTENCES = "The day was quiet and nothing much was happening. Nobody was in a hurry to be anywhere else."
"""Repeated as filler; shares no word with the questions of prompts."""


def filler(tokenizer: PieceTokenizer, tokens: int) -> Word:
    """Return the last ``tokens`` tokens of ``SENTENCES``, repeated and ended by a line feed.

    The text is truncated at the front, so that at most its first word is incomplete.
    """
    words = [f" {word}" for word in SENTENCES.split()]
    # The full stop goes with the line end: many tokenizers have a token for both.
    last = [words[-1].removesuffix("."), ".\n"]
    backwards = itertools.chain(reversed(last), reversed(words[:-1]), itertools.cycle(reversed(words)))
    texts: list[str] = []
    pieces: list[tuple[int, ...]] = []
    while tokens > 0:
        text = next(backwards)
        ids = tokenizer.encode_piece(text)
        if len(ids) > tokens:
            ids = ids[-tokens:]
            text = tokenizer.decode(ids)
        texts.append(text)
        pieces.append(ids)
        tokens -= len(ids)
    return Word("".join(reversed(texts)), tuple(itertools.chain.from_iterable(reversed(pieces))))


class PromptBuilder:
    """Assembles a prompt, without the model's prefix and without filler.

    Attributes:
        tokenizer: The tokenizer.
        ids: Token ids so far.
        items: Key items so far.
    """

    def __init__(self, tokenizer: PieceTokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.items: list[PromptItem] = []
        self._texts: list[str] = []
        self._candidates: tuple[tuple[int, ...], ...] = ()
        self._correct = self._answer_item = -1

    def add_text(self, text: str) -> None:
        """Append text that is not an item."""
        encode = self.tokenizer.encode_piece if self.ids else self.tokenizer.encode_start
        self.add_word(Word(text, encode(text)))

    def add_word(self, word: Word) -> None:
        """Append text whose ids are known."""
        self.ids += word.ids
        self._texts.append(word.text)

    def add_item(self, word: Word, role: str, group: int) -> int:
        """Append a word as an item, without white space in front of it, and return the item's index."""
        start = len(self.ids) + self.tokenizer.leading_spaces(word.ids)
        self.add_word(word)
        self.items.append(PromptItem(role, group, start, len(self.ids)))
        return len(self.items) - 1

    def add_pool_item(self, pool: Pool, word: Word, role: str, group: int) -> int:
        """Append a word of a pool as an item, and return the item's index."""
        self.add_word(pool.lead)
        return self.add_item(word, role, group)

    def merge_example(self, group: int, start: int) -> None:
        """Replace the items from token ``start`` on by a single one."""
        self.items = [item for item in self.items if item.start < start]
        self.items.append(PromptItem("example", group, start, len(self.ids)))

    def set_question(self, pool: Pool, words: Sequence[Word], *, correct: int, answer_item: int) -> None:
        """End with a question: the next tokens are one of ``words``."""
        self.add_word(pool.lead)
        self._candidates = tuple(word.ids for word in words)
        self._correct, self._answer_item = correct, answer_item

    def build(self, *, name: str, kind: str, seed: int, tokens: int | None = None) -> Prompt:
        """Return the finished prompt, with filler in front up to ``tokens`` tokens."""
        prefix = self.tokenizer.prefix
        front = filler(self.tokenizer, 0 if tokens is None else tokens - len(prefix) - len(self.ids))
        shift = len(prefix) + len(front.ids)
        ids = (*prefix, *front.ids, *self.ids)
        return Prompt(
            name=name,
            kind=kind,
            ids=ids,
            text=front.text + "".join(self._texts),
            items=tuple(replace(item, start=item.start + shift, end=item.end + shift) for item in self.items),
            query=len(ids) - 1,
            answer=self._candidates[self._correct] if self._candidates else (),
            candidates=self._candidates,
            correct=self._correct,
            answer_item=self._answer_item,
            seed=seed,
        )


SMALLEST = 2
"""Smallest number of pairs or symbols."""

UNLIMITED = sys.maxsize
"""Largest number of pairs or symbols where there is no limit."""


@dataclass(frozen=True)
class PromptTask:
    """Prompts of one kind with a question, for one tokenizer.

    Attributes:
        kind: Name of the kind.
        option: Name of the option that sets the size.
        size: Number of pairs or symbols; None for as many as fit.
        default: Size if neither ``size`` nor a number of tokens is given.
        largest: Largest size that the tokenizer allows.
        index: Index of the pair or symbol asked for; None for all in turn.
        write: Builds a prompt of a given size that asks for a given index.
    """

    kind: str
    option: str
    size: int | None
    default: int
    largest: int
    index: int | None
    write: Callable[[int, int, random.Random], PromptBuilder]

    def fitted(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """Return ``count`` prompts of one size, of at most ``tokens`` tokens with the model's prefix."""
        self._check_size()
        smallest = max(SMALLEST, 0 if self.index is None else self.index + 1)
        if self.size is not None or tokens is None:
            size = max(smallest, min(self.default, self.largest)) if self.size is None else self.size
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
        while high <= self.largest and fits(high):
            low, high = high, 2 * high
        high = min(high, self.largest + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _check_size(self) -> None:
        if self.largest < SMALLEST:
            raise ConfigError(
                f"this tokenizer distinguishes only {self.largest} words that {self.kind} prompts could use, "
                f"of at least {SMALLEST}: use a model whose tokenizer knows English"
            )
        if self.size is not None and self.size > self.largest:
            raise ConfigError(
                f"{self.option} is {self.size}: with this tokenizer, {self.kind} prompts have at most {self.largest}"
            )
        limit = self.largest if self.size is None else self.size
        if self.index is not None and self.index >= limit:
            raise ConfigError(f"index_answer is {self.index}: choose from 0 to {limit - 1}")

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
