"""A prompt while it is written: text, ids and items grow together, so that every place is known."""

from __future__ import annotations

from collections.abc import Sequence

from wherewhat.text.prompts.filler import filler
from wherewhat.text.prompts.pool import Pool, Word
from wherewhat.text.prompts.prompt import Item, Prompt
from wherewhat.text.prompts.speller import Speller


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
