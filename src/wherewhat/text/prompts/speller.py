"""A tokenizer as prompts see it: pieces of text become ids as they would in the middle of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wherewhat.errors import TextError

# What a piece is encoded behind, by how the piece begins; the first one that stays a token of its own is taken.
_AFTER_LETTER = ("a", "x", "=", "\n")
_AFTER_BREAK = ("=", "\n", ".", ",")


@dataclass(frozen=True)
class Speller:
    """Spells text in a model's tokens.

    Attributes:
        encode: Ids of a text, without special tokens.
        decode: Text of ids.
        vocabulary: Number of ids the model knows.
        prefix: Ids the model expects in front of every text.
        special: Ids that are no ordinary text: BOS, padding, reserved ones.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    vocabulary: int
    prefix: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    _pieces: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Any, prefix: Iterable[int] = (), *, vocabulary: int | None = None) -> Speller:
        """A speller from a Hugging Face tokenizer, or from anything that can be called like one.

        Args:
            tokenizer: The tokenizer.
            prefix: Ids the model expects in front of every text.
            vocabulary: Number of ids the model knows, where that is less than what the tokenizer has.
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

    def start(self, text: str) -> tuple[int, ...]:
        """Ids of ``text`` at the beginning of a text.

        Raises:
            TextError: If the tokenizer cannot spell it.
        """
        ids = tuple(self.encode(text))
        if not self._says(ids, text):
            raise self._cannot(text)
        return ids

    def piece(self, text: str) -> tuple[int, ...]:
        """Ids of ``text`` in the middle of a text.

        Some tokenizers put a space in front of whatever they encode and others drop it, so the piece is encoded
        behind something else, which is then taken away.

        Raises:
            TextError: If the tokenizer cannot spell it.
        """
        found = self._pieces.get(text)
        if found is None:
            found = self._find_piece(text)
            if found is None:
                raise self._cannot(text)
            self._pieces[text] = found
        return found

    def spells(self, text: str) -> bool:
        """Whether the tokenizer can say ``text`` with ordinary tokens; case and white space do not count."""
        return text in self._pieces or self._find_piece(text) is not None

    def blanks(self, ids: Sequence[int]) -> int:
        """How many of the first ids are white space on their own; never all of them."""
        count = 0
        while count < len(ids) - 1 and not self.decode([ids[count]]).strip():
            count += 1
        return count

    def _find_piece(self, text: str) -> tuple[int, ...] | None:
        for anchor in _AFTER_BREAK if text[:1].isalnum() else _AFTER_LETTER:
            head = list(self.encode(anchor))
            ids = list(self.encode(anchor + text))
            if ids[: len(head)] == head and self._says(ids[len(head) :], text):
                return tuple(ids[len(head) :])
        return None

    def _says(self, ids: Sequence[int], text: str) -> bool:
        if not ids or max(ids) >= self.vocabulary or not self.special.isdisjoint(ids):
            return False
        return plain(self.decode(ids)) == plain(text)

    def _cannot(self, text: str) -> TextError:
        return TextError(f"the tokenizer cannot spell {text!r}: use a model whose tokenizer knows English")


def plain(text: str) -> str:
    """``text`` without white space and in one case: what every tokenizer for English keeps."""
    return "".join(text.split()).casefold()
