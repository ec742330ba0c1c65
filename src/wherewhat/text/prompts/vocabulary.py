"""Words and symbols that a tokenizer distinguishes, with their token ids inside a text."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NoReturn

from wherewhat.errors import TextError

# Context in which a piece is encoded, by its first character; the first that is not merged with the piece is used.
_BEFORE_OTHERS = ("a", "x", "=", "\n")
_BEFORE_LETTERS = ("=", "\n", ".", ",")


@dataclass(frozen=True)
class PieceTokenizer:
    """Encodes pieces of text as they are encoded in the middle of a text.

    Attributes:
        encode: Returns the ids of a text, without special tokens.
        decode: Returns the text of ids.
        vocabulary: Number of ids the model knows.
        prefix: Ids the model expects in front of every text.
        special: Ids that are not ordinary text: BOS, padding, reserved ones.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    vocabulary: int
    prefix: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    _pieces: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Any, prefix: Iterable[int] = (), *, vocabulary: int | None = None) -> PieceTokenizer:
        """Return one for a Hugging Face tokenizer, or for any object with the same interface.

        Args:
            tokenizer: The tokenizer.
            prefix: Ids the model expects in front of every text.
            vocabulary: Number of ids the model knows, if the tokenizer has more.
        """
        used = set(tokenizer.get_vocab().values())
        known = max(used, default=-1) + 1
        known = known if vocabulary is None else min(known, vocabulary)
        special = set(tokenizer.all_special_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special |= {index for index, token in added.items() if getattr(token, "special", False)}
        special |= set(range(known)) - used

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        return cls(encode, decode, known, tuple(prefix), frozenset(special))

    def encode_start(self, text: str) -> tuple[int, ...]:
        """Return the ids of ``text`` at the beginning of a text."""
        ids = tuple(self.encode(text))
        return ids if self._decodes_to(ids, text) else self._fail(text)

    def encode_piece(self, text: str) -> tuple[int, ...]:
        """Return the ids of ``text`` in the middle of a text.

        Some tokenizers add a space in front of a text and others remove it, so the piece is encoded after another
        character, whose ids are then removed.
        """
        if text not in self._pieces:
            self._pieces[text] = self._find_piece(text) or self._fail(text)
        return self._pieces[text]

    def can_encode(self, text: str) -> bool:
        """Return whether ordinary tokens represent ``text``, case and white space ignored."""
        return text in self._pieces or self._find_piece(text) is not None

    def leading_spaces(self, ids: Sequence[int]) -> int:
        """Return how many of the first ids are white space alone; never all of them."""
        count = 0
        while count < len(ids) - 1 and not self.decode([ids[count]]).strip():
            count += 1
        return count

    def _find_piece(self, text: str) -> tuple[int, ...] | None:
        for context in _BEFORE_LETTERS if text[:1].isalnum() else _BEFORE_OTHERS:
            head = list(self.encode(context))
            ids = list(self.encode(context + text))
            if ids[: len(head)] == head and self._decodes_to(ids[len(head) :], text):
                return tuple(ids[len(head) :])
        return None

    def _decodes_to(self, ids: Sequence[int], text: str) -> bool:
        if not ids or max(ids) >= self.vocabulary or not self.special.isdisjoint(ids):
            return False
        return normalised(self.decode(ids)) == normalised(text)

    def _fail(self, text: str) -> NoReturn:
        raise TextError(f"the tokenizer cannot encode {text!r}: use a model whose tokenizer knows English")


def normalised(text: str) -> str:
    """Return ``text`` without white space and case, which some tokenizers do not keep."""
    return "".join(text.split()).casefold()


@dataclass(frozen=True)
class Word:
    """A piece of text and its token ids.

    Attributes:
        text: The piece.
        ids: Its ids, in the middle of a text.
    """

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """Words with different token ids in the same context.

    Attributes:
        lead: White space in front of every word, if it has its own tokens; empty if it is part of the words' tokens.
        words: The words, those of a single token first.
    """

    lead: Word
    words: tuple[Word, ...]

    @classmethod
    def of(cls, tokenizer: PieceTokenizer, texts: Iterable[str], *, after: str = " ", answers: bool = True) -> Pool:
        """Return the words that a tokenizer can encode and distinguish.

        Args:
            tokenizer: The tokenizer.
            texts: The words, in order of preference.
            after: Text in front of each of them.
            answers: Whether they serve as answers: then none may begin with the tokens of another.
        """
        texts = [text for text in texts if tokenizer.can_encode(after + text)]
        encoded = [tokenizer.encode_piece(after + text) for text in texts]
        # White-space tokens that all of them begin with.
        spaces = min(map(tokenizer.leading_spaces, encoded), default=0)
        while len({ids[:spaces] for ids in encoded}) > 1:
            spaces -= 1
        lead = Word(after if spaces else "", encoded[0][:spaces] if encoded else ())
        kept: list[Word] = []
        used: set[tuple[int, ...]] = set()
        used_starts: set[tuple[int, ...]] = set()
        for text, ids in zip(texts, (ids[spaces:] for ids in encoded), strict=True):
            starts = {ids[:end] for end in range(1, len(ids) + 1)}
            if ids in used or (answers and (ids in used_starts or not starts.isdisjoint(used))):
                continue
            used.add(ids)
            used_starts |= starts
            kept.append(Word(text if spaces else after + text, ids))
        return cls(lead, tuple(sorted(kept, key=lambda word: len(word.ids) > 1)))

    def of_one_token(self, *, least: int) -> Pool:
        """Return the words of a single token if there are at least ``least``, else all words."""
        short = tuple(word for word in self.words if len(word.ids) == 1)
        return Pool(self.lead, short) if len(short) >= least else self

    def draw(self, rng: random.Random, count: int) -> list[Word]:
        """Return ``count`` different words in random order.

        Words of a single token are preferred to longer ones, and words that differ in their first token to those that
        differ only later.
        """
        shuffled = rng.sample(self.words, len(self.words))
        shuffled.sort(key=lambda word: len(word.ids) > 1)
        firsts: set[int] = set()
        distinct: list[Word] = []
        similar: list[Word] = []
        for word in shuffled:
            (similar if word.ids[0] in firsts else distinct).append(word)
            firsts.add(word.ids[0])
        chosen = [*distinct, *similar][:count]
        rng.shuffle(chosen)
        return chosen

    def draw_lists(self, rng: random.Random, *counts: int) -> list[Word]:
        """Return words in random order for lists of ``counts`` words, one list after the other.

        All words differ if there are enough; otherwise their counts in each list differ by at most one.
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


def _words(file: str) -> tuple[str, ...]:
    return tuple((files("wherewhat.text.prompts") / file).read_text("utf-8").split())


NAMES = _words("names.txt")
"""First names."""

THINGS = _words("things.txt")
"""Nouns that need no article after a verb: plurals and mass nouns."""

LETTERS: tuple[str, ...] = tuple(string.ascii_lowercase)
"""Lower-case letters."""

BIGRAMS: tuple[str, ...] = tuple(first + second for first in LETTERS for second in LETTERS)
"""Pairs of lower-case letters."""

DIGITS: tuple[str, ...] = tuple(string.digits)
"""Decimal digits."""
