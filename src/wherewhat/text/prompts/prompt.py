"""A prompt: token ids, where its key items are, and which answer is right."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from wherewhat.errors import TextError


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
