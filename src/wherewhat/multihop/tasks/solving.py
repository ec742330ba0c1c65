"""Plain solvers, written from what the tasks say and not from how sequences are made.

They read one sequence, token by token, and trust nothing: a sequence that breaks the rule, or leaves a choice, is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from wherewhat.errors import ConfigError


def follow_numbers(tokens: Sequence[int], *, symbols: int, integers: int) -> tuple[int, list[int]]:
    """An integer m means "m positions to the left"; follow from the last token until a letter.

    Raises:
        ConfigError: If the last token is no integer, or one points before the start.
    """
    tokens = _known(tokens, symbols + integers)
    position = len(tokens) - 1
    visited = [position]
    if tokens[position] < symbols:
        raise ConfigError(f"the last token, {tokens[position]}, is a letter: it must be an integer")
    while tokens[position] >= symbols:
        steps = tokens[position] - symbols + 1
        if steps > position:
            raise ConfigError(f"the integer {steps} at position {position} points before the start of the sequence")
        position -= steps
        visited.append(position)
    return tokens[position], visited


def follow_letters(tokens: Sequence[int], *, letters: int, digits: int) -> tuple[int, list[int]]:
    """The right letter of a pair names the left letter of the next; follow from the last until a (letter, digit).

    Raises:
        ConfigError: If the last token is no (letter, letter), or a letter does not name exactly one earlier pair.
    """
    tokens = _known(tokens, letters * (letters + digits))
    bound = letters * digits
    position = len(tokens) - 1
    visited = [position]
    wanted = _asked(tokens, letters=letters, bound=bound)
    while True:
        named = _places(tokens, wanted, letters=letters, digits=digits)
        if len(named) != 1:
            raise ConfigError(f"letter {wanted} is the left letter of {len(named)} pairs: it must be that of one")
        if named[0] >= position:
            raise ConfigError(f"the pair at position {position} names one at {named[0]}, which is not before it")
        position = named[0]
        visited.append(position)
        if tokens[position] < bound:
            return tokens[position], visited
        wanted = (tokens[position] - bound) % letters


def last_bound(tokens: Sequence[int], *, letters: int, digits: int) -> tuple[int, list[int]]:
    """The right letter of the last token names a letter; its last (letter, digit) is the answer.

    Raises:
        ConfigError: If the last token is no (letter, letter), another one is, or the letter has no digit.
    """
    tokens = _known(tokens, letters * (letters + digits))
    bound = letters * digits
    wanted = _asked(tokens, letters=letters, bound=bound)
    if any(token >= bound for token in tokens[:-1]):
        raise ConfigError("only the last token may be a (letter, letter)")
    named = _places(tokens[:-1], wanted, letters=letters, digits=digits)
    if not named:
        raise ConfigError(f"letter {wanted} has no digit in the sequence")
    return tokens[named[-1]], [len(tokens) - 1, named[-1]]


def _known(tokens: Sequence[int], vocabulary: int) -> list[int]:
    known = [int(token) for token in tokens]
    if not known:
        raise ConfigError("the sequence is empty: it must at least have a query")
    for token in known:
        if not 0 <= token < vocabulary:
            raise ConfigError(f"there is no token {token}: ids go from 0 to {vocabulary - 1}")
    return known


def _asked(tokens: Sequence[int], *, letters: int, bound: int) -> int:
    if tokens[-1] < bound:
        raise ConfigError(f"the last token, {tokens[-1]}, is a (letter, digit): it must be a (letter, letter)")
    return (tokens[-1] - bound) % letters


def _places(tokens: Sequence[int], left: int, *, letters: int, digits: int) -> list[int]:
    bound = letters * digits
    lefts = [token // digits if token < bound else (token - bound) // letters for token in tokens]
    return [position for position, letter in enumerate(lefts) if letter == left]
