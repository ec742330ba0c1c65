"""Words and sentences of a text as ranges of tokens, and respellings of words with two letters transposed."""

from __future__ import annotations

import random
import re

from torch import Tensor

from wherewhat.measures.measurement import Spans, Text
from wherewhat.models.loaded import LoadedModel

_ENDS = re.compile(r"[.!?][\"'”’)\]_*]*$")
_ABBREVIATED = re.compile(r"(^|\W)(Mr|Mrs|Ms|Dr|St|Capt|Col|Messrs|[A-Z])\.$")
_LETTERS = re.compile(r"[^\W\d_]+")

Ranges = tuple[tuple[int, int], ...]


def with_spans(loaded: LoadedModel, text: str, ids: Tensor) -> Text:
    """Return token ids ``(n,)`` of a text with its words and sentences, which are found on first use.

    Words are separated by white space; tokens of white space only belong to no word. A sentence is a sequence of whole
    words up to one that ends in ``.``, ``!`` or ``?``, with closing marks after it allowed; abbreviated titles do not
    end one, and an incomplete sentence at the end of the text is left out. Both are None where the tokenizer has no
    character offsets, or where it tokenises the text differently from ``ids``.
    """
    prefix = len(loaded.prefix)
    return Text(ids[None], prefix, lambda: _spans(loaded, text, ids), lambda other: loaded.tokenize(other)[prefix:])


def _spans(loaded: LoadedModel, text: str, ids: Tensor) -> Spans:
    prefix = len(loaded.prefix)
    if not getattr(loaded.tokenizer, "is_fast", False):
        return Spans()
    made = loaded.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    count = len(ids) - prefix
    if list(made["input_ids"][:count]) != ids[prefix:].tolist():
        return Spans()
    tokens, characters = find_words(text, made["offset_mapping"][:count])
    # A word cut off by the end of the text is left out.
    if tokens and tokens[-1][1] == count and text[characters[-1][1] :][:1].strip():
        tokens, characters = tokens[:-1], characters[:-1]
    words = tuple((start + prefix, end + prefix) for start, end in tokens)
    sentences = find_sentences(words, [text[start:end] for start, end in characters])
    return Spans(words, sentences, _respellings(loaded, text, ids, words, characters))


def find_words(text: str, offsets: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return words as spans of tokens, and as spans of characters.

    Args:
        text: The text.
        offsets: First character of each token and one past its last, with or without leading white space.
    """
    tokens: list[tuple[int, int]] = []
    characters: list[tuple[int, int]] = []
    for index, (start, end) in enumerate(offsets):
        piece = text[start:end]
        if not piece.strip():
            continue
        first, last = start + len(piece) - len(piece.lstrip()), end - (len(piece) - len(piece.rstrip()))
        # Tokens that share a character, such as the bytes of an accented letter, belong to one word.
        begins = (first == 0 or text[first - 1].isspace()) and (not characters or first >= characters[-1][1])
        if begins or not tokens:
            tokens.append((index, index + 1))
            characters.append((first, last))
        else:
            tokens[-1] = (tokens[-1][0], index + 1)
            characters[-1] = (characters[-1][0], last)
    return tokens, characters


def find_sentences(words: Ranges, texts: list[str]) -> Ranges:
    """Return whole sentences as spans of tokens, from the spans ``(start, end)`` and texts of words."""
    found = []
    start: int | None = None
    for (first, end), word in zip(words, texts, strict=True):
        start = first if start is None else start
        if _ENDS.search(word) and not _ABBREVIATED.search(word):
            found.append((start, end))
            start = None
    return tuple(found)


def transpose_letters(word: str, chooser: random.Random) -> str | None:
    """Return the word with two adjacent, different inner letters transposed; None if there are none."""
    run = max(_LETTERS.finditer(word), key=lambda match: match.end() - match.start(), default=None)
    if run is None:
        return None
    indices = [i for i in range(run.start() + 1, run.end() - 2) if word[i] != word[i + 1]]
    if not indices:
        return None
    i = chooser.choice(indices)
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def _respellings(
    loaded: LoadedModel, text: str, ids: Tensor, words: Ranges, characters: list[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word with two letters transposed; empty where it has no such spelling."""
    chooser = random.Random(0)  # noqa: S311 - a choice of letters, reproducible
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    unknown = loaded.tokenizer.unk_token_id

    def encode(piece: str) -> tuple[int, ...]:
        return tuple(loaded.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    found: list[tuple[int, ...]] = []
    for (first, end), (start, stop) in zip(words, characters, strict=True):
        changed = transpose_letters(text[start:stop], chooser)
        spelled: tuple[int, ...] = ()
        # A word is respelled only where its unchanged form has the same tokens alone as in the text.
        for lead in dict.fromkeys((text[start - 1 : start], "")):
            if changed is not None and encode(lead + text[start:stop]) == tuple(ids[first:end].tolist()):
                spelled = encode(lead + changed)
                break
        usable = bool(spelled) and max(spelled) < rows and unknown not in spelled
        found.append(spelled if usable else ())
    return tuple(found)
