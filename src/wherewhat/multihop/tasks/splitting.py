"""Training, validation and test sequences that have nothing in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.tasks.checking import check_whole
from wherewhat.multihop.tasks.sequences import Sequences

_VALIDATION = 200
"""One sequence in so many is for validation."""

_TEST = 19
"""Test sequences for each of those."""

_ROUNDS = 1000
_EFFORT = 20
"""Sequences drawn anew, per sequence wanted, before giving up."""


def split_sizes(total: int, *, hops: int) -> tuple[int, int, int]:
    """Numbers of training, validation and test sequences: 90 %, 0.5 % and 9.5 %.

    Raises:
        ConfigError: If the validation set would not have every number of hops.
    """
    check_whole("total", total, least=_VALIDATION * hops)
    validation = total // _VALIDATION
    test = total * _TEST // _VALIDATION
    return total - validation - test, validation, test


def fingerprints(tokens: Tensor) -> Tensor:
    """One int64 for each row of ``tokens`` ``(count, n)``: equal rows have equal ones."""
    weights = 1 + 2 * torch.randint(2**62, (tokens.shape[1],), generator=Generator().manual_seed(1))
    return (tokens * weights).sum(dim=1)


def redraw_shared(drawn: Sequences, taken: Tensor, redraw: Callable[[Tensor], Sequences], *, what: str) -> Sequences:
    """Sequences none of which is taken: those that are get drawn anew, for the same question.

    Two different rows with one fingerprint, which chance brings about once in 10^8 times or so, cost a redraw and
    nothing else.

    Args:
        drawn: The sequences.
        taken: Fingerprints of the sequences that they must not contain.
        redraw: Draws the rows of an index ``(rows,)`` anew.
        what: What they are for, to be named if it fails.

    Raises:
        ConfigError: If the task has too few different sequences.
    """
    tokens, path = drawn.tokens.clone(), drawn.path.clone()
    rows, fresh = torch.arange(len(drawn)), drawn
    effort = _EFFORT * len(drawn)
    for _ in range(_ROUNDS):
        rows = rows[torch.isin(fingerprints(fresh.tokens), taken)]
        if not len(rows):
            return Sequences(tokens, drawn.answers, drawn.hops, path)
        effort -= len(rows)
        if effort < 0:
            break
        fresh = redraw(rows)
        tokens[rows], path[rows] = fresh.tokens, fresh.path
    raise ConfigError(
        f"{len(rows)} of {len(drawn)} {what} sequences are also in another split, however often they are drawn anew: "
        "the task has too few different ones; ask for fewer in total, or give it longer windows or more symbols"
    )
