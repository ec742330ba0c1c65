"""A disturbed text: other tokens, other positions or other features, and which of its tokens are untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """What is done to a text of n tokens.

    Attributes:
        ids: Tokens of the disturbed text, ``(m,)``; m differs from n only where words are respelled.
        origin: Index of each in the untouched text, ``(m,)``; -1 for tokens that are not in it.
        moved: True for the tokens that were themselves disturbed, ``(m,)``. Those that only slide because units of
            different lengths were swapped are not.
        positions: Where the tokens stand, ``(m,)``; None for one after the other.
        orders: Order in which hidden states enter layers, ``(m,)`` by layer.
    """

    ids: Tensor
    origin: Tensor
    moved: Tensor
    positions: Tensor | None = None
    orders: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def untouched(self) -> Tensor:
        """Targets 1 to m-1 whose own token and the one in front of it were not moved, ``(m - 1,)`` bool."""
        return ~(self.moved[1:] | self.moved[:-1])


def nothing(ids: Tensor) -> Change:
    """The text ``ids`` ``(n,)`` as it is."""
    return Change(ids, torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.bool))


def swapped_order(n: int, spans: Sequence[tuple[int, int]], pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Order of n tokens after swapping spans of them.

    Args:
        n: Number of tokens.
        spans: Disjoint spans, first token and one past the last, in order. What is between them stays between.
        pairs: Which spans to swap with each other, ``(pairs, 2)``, no span twice.

    Returns:
        Order, ``(n,)``: place i takes token ``order[i]``; and which places hold a token of a swapped span.
    """
    goes = list(range(len(spans)))
    for one, other in pairs.tolist():
        goes[one], goes[other] = other, one
    order: list[int] = []
    moved: list[bool] = []
    at = 0
    for place, (start, end) in enumerate(spans):
        first, last = spans[goes[place]]
        order += [*range(at, start), *range(first, last)]
        moved += [False] * (start - at) + [goes[place] != place] * (last - first)
        at = end
    order += range(at, n)
    moved += [False] * (n - at)
    return torch.tensor(order, dtype=torch.int64), torch.tensor(moved, dtype=torch.bool)


def replaced(ids: Tensor, spans: Sequence[tuple[int, int]], others: Sequence[Sequence[int]]) -> Change:
    """The text ``ids`` ``(n,)`` with other tokens in the place of spans, which are disjoint and in order."""
    tokens, origin = ids.tolist(), list(range(len(ids)))
    for (start, end), other in reversed(list(zip(spans, others, strict=True))):
        tokens[start:end] = other
        origin[start:end] = [-1] * len(other)
    where = torch.tensor(origin, dtype=torch.int64)
    return Change(torch.tensor(tokens, dtype=torch.int64), where, where < 0)
