"""Neutral text of an exact number of tokens, to put in front of a prompt."""

from __future__ import annotations

import itertools

from wherewhat.text.prompts.pool import Word
from wherewhat.text.prompts.speller import Speller

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
