"""Words a tokenizer can tell apart, and drawing some of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from wherewhat.text.prompts.speller import Speller


@dataclass(frozen=True)
class Word:
    """A piece of text and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """Words that are spelt with different tokens, in the same surroundings.

    Attributes:
        lead: White space in front of every word that has tokens of its own; empty where it is part of the words.
        words: The words, those of a single token first.
    """

    lead: Word
    words: tuple[Word, ...]

    @classmethod
    def of(cls, speller: Speller, texts: Iterable[str], *, after: str = " ", answers: bool = True) -> Pool:
        """The words that a tokenizer can spell and tell apart.

        Args:
            speller: The tokenizer.
            texts: The words, the most wanted first.
            after: What stands in front of each of them.
            answers: Whether they are to be answers: then none may begin with the tokens of another.
        """
        texts = [text for text in texts if speller.spells(after + text)]
        spelt = [speller.piece(after + text) for text in texts]
        blank = _common_blank(speller, spelt)
        lead = Word(after if blank else "", spelt[0][:blank] if spelt else ())
        in_front = "" if blank else after
        kept: list[Word] = []
        taken: set[tuple[int, ...]] = set()
        begun: set[tuple[int, ...]] = set()
        for text, ids in zip(texts, (ids[blank:] for ids in spelt), strict=True):
            starts = {ids[:end] for end in range(1, len(ids) + 1)}
            if ids in taken or (answers and (ids in begun or not starts.isdisjoint(taken))):
                continue
            taken.add(ids)
            begun |= starts
            kept.append(Word(in_front + text, ids))
        return cls(lead, tuple(sorted(kept, key=lambda word: len(word.ids) > 1)))

    def of_one_token(self, *, least: int) -> Pool:
        """The words of a single token, if there are at least ``least``; else all of them."""
        short = tuple(word for word in self.words if len(word.ids) == 1)
        return Pool(self.lead, short) if len(short) >= least else self

    def draw(self, rng: random.Random, count: int) -> list[Word]:
        """``count`` different words in random order.

        Words of a single token come before longer ones, and words that differ in their first token before those that
        differ only later.
        """
        shuffled = rng.sample(self.words, len(self.words))
        shuffled.sort(key=lambda word: len(word.ids) > 1)
        firsts: set[int] = set()
        clear: list[Word] = []
        alike: list[Word] = []
        for word in shuffled:
            (alike if word.ids[0] in firsts else clear).append(word)
            firsts.add(word.ids[0])
        chosen = [*clear, *alike][:count]
        rng.shuffle(chosen)
        return chosen

    def draw_again(self, rng: random.Random, *counts: int) -> list[Word]:
        """Words in random order for lists of ``counts`` words, one list after the other.

        All different where there are enough; else each list has every word as often as any other, within one.
        """
        if sum(counts) <= len(self.words):
            return self.draw(rng, sum(counts))
        drawn: list[Word] = []
        for count in counts:
            rounds, rest = divmod(count, len(self.words))
            listed = [*self.words * rounds, *self.draw(rng, rest)]
            rng.shuffle(listed)
            drawn += listed
        return drawn


def _common_blank(speller: Speller, spelt: list[tuple[int, ...]]) -> int:
    """How many white-space tokens all the spellings begin with."""
    if not spelt:
        return 0
    count = min(speller.blanks(ids) for ids in spelt)
    while len({ids[:count] for ids in spelt}) > 1:
        count -= 1
    return count
