"""A prompt: token ids, the positions of its key items, and the correct answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.errors import TextError
from wherewhat.text.prompts.vocabulary import Pool, Speller, Word


@dataclass(frozen=True)
class Item:
    """A key item of a prompt: a word whose place matters.

    Attributes:
        role: What it is: ``"entity"``, ``"attribute"``, ``"letter"``, ``"number"``, ``"digit"``, ``"question"`` (what
            is asked for, wherever it is said again), ``"example"`` (a whole solved example) or ``"block"`` (a copy of
            a random sequence).
        group: Items that belong together share it, such as the two words of a pair; counted from 0, left to right.
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
        text: What the ids after the prefix say. Tokenizers that fold case or white space change it in their ids.
        items: Key items in the order of their places; none overlaps another.
        query: The last position, whose logits predict the answer.
        answer: Token ids of the right answer; empty where nothing is asked.
        candidates: Token ids of every possible answer. None begins with another: scores can be compared.
        correct: Which of the candidates is the answer; -1 where nothing is asked.
        answer_item: Which of the items holds the answer in the context, token by token, white space in front of it
            left out; -1 where nothing is asked.
        seed: Seed the list of prompts was made with.
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    text: str
    items: tuple[Item, ...]
    query: int
    answer: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    correct: int
    answer_item: int
    seed: int

    def __post_init__(self) -> None:
        """Check that ids, items and answer fit together."""
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
            raise self._wrong("it has no answer, but candidates or a place for one: leave them empty and -1")

    @property
    def asks(self) -> bool:
        """Whether there is a question to answer."""
        return bool(self.answer)

    @property
    def answer_group(self) -> int:
        """Group of the item that holds the answer: its place among the alternatives; -1 where nothing is asked."""
        return self.items[self.answer_item].group if self.asks else -1

    def _check_answer(self) -> None:
        if not 0 <= self.correct < len(self.candidates):
            raise self._wrong(f"correct is {self.correct}, but there are {len(self.candidates)} candidates")
        if self.candidates[self.correct] != self.answer:
            raise self._wrong(f"candidate {self.correct} is not the answer")
        # Neighbours in sorted order are enough: a prefix sorts directly before what it begins.
        ordered = sorted(self.candidates)
        for one, next_one in itertools.pairwise(ordered):
            if next_one[: len(one)] == one:
                raise self._wrong(f"candidate {list(one)} begins another: they cannot be told apart")
        if not 0 <= self.answer_item < len(self.items):
            raise self._wrong(f"answer_item is {self.answer_item}, but there are {len(self.items)} items")
        item = self.items[self.answer_item]
        # White space that begins an answer may stand in front of the item.
        if self.ids[: item.end][-len(self.answer) :] != self.answer or item.end - item.start > len(self.answer):
            raise self._wrong(f"item {self.answer_item} does not hold the answer's tokens")

    def _wrong(self, reason: str) -> TextError:
        return TextError(f"prompt '{self.name}' does not fit together: {reason}")


SENTENCES = "The day was quiet and nothing much was happening. Nobody was in a hurry to be anywhere else."
"""What the filler repeats; it shares no word with what prompts ask for."""


def filler(speller: Speller, tokens: int) -> Word:
    """The last ``tokens`` tokens of the sentences above, repeated, and a line end.

    Cutting at the front leaves the seam to the prompt clean; at most the first word is incomplete.
    """
    words = [f" {word}" for word in SENTENCES.split()]
    # The full stop goes with the line end: many tokenizers have a token for both.
    last = [words[-1].removesuffix("."), ".\n"]
    backwards = itertools.chain(reversed(last), reversed(words[:-1]), itertools.cycle(reversed(words)))
    texts: list[str] = []
    pieces: list[tuple[int, ...]] = []
    while tokens > 0:
        text = next(backwards)
        ids = speller.piece(text)
        if len(ids) > tokens:
            ids = ids[-tokens:]
            text = speller.decode(ids)
        texts.append(text)
        pieces.append(ids)
        tokens -= len(ids)
    return Word("".join(reversed(texts)), tuple(itertools.chain.from_iterable(reversed(pieces))))


class Draft:
    """A prompt in the making, without the model's prefix and without filler."""

    def __init__(self, speller: Speller) -> None:
        self.speller = speller
        self.ids: list[int] = []
        self.items: list[Item] = []
        self._texts: list[str] = []
        self._candidates: tuple[tuple[int, ...], ...] = ()
        self._correct = self._answer_item = -1

    def say(self, text: str) -> None:
        """Add text that is no item."""
        self.add(Word(text, self.speller.piece(text) if self.ids else self.speller.start(text)))

    def add(self, word: Word) -> None:
        """Add text whose ids are known."""
        self.ids += word.ids
        self._texts.append(word.text)

    def item(self, word: Word, role: str, group: int, *, pool: Pool) -> int:
        """Add a word as an item, white space in front of it left out, and return the item's index."""
        self.add(pool.lead)
        start = len(self.ids) + self.speller.blanks(word.ids)
        self.add(word)
        return self.mark(role, group, start)

    def say_item(self, text: str, role: str, group: int) -> int:
        """Add text as an item, white space in front of it left out, and return the item's index."""
        ids = self.speller.piece(text)
        start = len(self.ids) + self.speller.blanks(ids)
        self.add(Word(text, ids))
        return self.mark(role, group, start)

    def mark(self, role: str, group: int, start: int) -> int:
        """Make an item of everything since ``start``, and return its index."""
        self.items.append(Item(role, group, start, len(self.ids)))
        return len(self.items) - 1

    def example(self, group: int, start: int) -> None:
        """Make one item of everything since ``start``, in place of the items in it."""
        self.items = [item for item in self.items if item.start < start]
        self.mark("example", group, start)

    def ask(self, words: Sequence[Word], *, correct: int, answer_item: int, pool: Pool) -> None:
        """End with a question: the next token begins one of ``words``."""
        self.add(pool.lead)
        self._candidates = tuple(word.ids for word in words)
        self._correct, self._answer_item = correct, answer_item

    def prompt(self, *, name: str, kind: str, seed: int, tokens: int | None = None) -> Prompt:
        """The finished prompt, filled up in front to ``tokens`` tokens."""
        prefix = self.speller.prefix
        wanted = 0 if tokens is None else tokens - len(prefix) - len(self.ids)
        front = filler(self.speller, wanted)
        shift = len(prefix) + len(front.ids)
        ids = (*prefix, *front.ids, *self.ids)
        return Prompt(
            name=name,
            kind=kind,
            ids=ids,
            text=front.text + "".join(self._texts),
            items=tuple(Item(item.role, item.group, item.start + shift, item.end + shift) for item in self.items),
            query=len(ids) - 1,
            answer=self._candidates[self._correct] if self._candidates else (),
            candidates=self._candidates,
            correct=self._correct,
            answer_item=self._answer_item,
            seed=seed,
        )
