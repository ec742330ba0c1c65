"""Letters and pairs of letters: symbols without meaning, as many as a list needs."""

from __future__ import annotations

import string

LETTERS: tuple[str, ...] = tuple(string.ascii_lowercase)
BIGRAMS: tuple[str, ...] = tuple(one + two for one in LETTERS for two in LETTERS)
DIGITS: tuple[str, ...] = tuple(string.digits)
