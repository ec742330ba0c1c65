"""How tokens are written."""

from __future__ import annotations

from dataclasses import dataclass

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def symbol(index: int) -> str:
    """The symbol number ``index`` from 0: a … z, aa, ab …, as the columns of a spreadsheet are named."""
    text = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, len(ALPHABET))
        text = ALPHABET[letter] + text
    return text


@dataclass(frozen=True)
class Pairs:
    """Token ids of atomic pairs: first all (letter, digit), then all (letter, letter).

    Attributes:
        letters: Number of letters.
        digits: Number of digits.
    """

    letters: int
    digits: int

    @property
    def first_link(self) -> int:
        """Id of the first (letter, letter); smaller ids are the answers, (letter, digit)."""
        return self.letters * self.digits

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.letters * (self.digits + self.letters)

    def spell(self, token: int) -> str:
        """A token as text: ``a1`` or ``ab``, with a dot between the two where letters have more than one character."""
        if token < self.first_link:
            left, digit = divmod(token, self.digits)
            right = str(digit + 1)
        else:
            left, letter = divmod(token - self.first_link, self.letters)
            right = symbol(letter)
        return symbol(left) + ("." if self.letters > len(ALPHABET) else "") + right
