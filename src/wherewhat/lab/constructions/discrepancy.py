"""Discrepancy: the difference of the largest and the second largest logit of a query, by length of the input.

Softmax depends on differences only, so a head that attends to one key of n needs a difference that does not vanish with
n. For the constructions of arXiv 2605.31558 it is known exactly (``docs/constructions.md`` derives it); for any other
head it is measured. Logits of constructions are those of queries and keys of length 1, without a scale. An input has n
tokens, the last of which is the query: distances go from 0 to n - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError

Input = Literal["best", "worst"]
"""The input with the largest or with the smallest discrepancy."""


def index_discrepancy(n: int, theta: float, *, at: Input = "best") -> float:
    """Return the discrepancy of the Index construction, ``min over 1 ≤ t ≤ T of 1 - cos tθ``.

    The key at distance d has the logit ``cos((d - m)θ)`` for the integer m. Keys reach m positions to the right of the
    one pointed at and n - 1 - m to the left, and cosines are even, so T is ``max(m, n - 1 - m)``: ``⌈(n - 1) / 2⌉`` at
    the best m, n - 1 at the worst (m = n - 1, or a letter, which points at itself). It is positive at every n if and
    only if θ/π is irrational.

    Args:
        n: Tokens of the input.
        theta: Angle per position.
        at: The largest or the smallest over inputs.
    """
    _check(n, theta)
    reach = n // 2 if at == "best" else n - 1
    return float(_one_minus_cos(torch.arange(1, reach + 1, dtype=torch.float64) * theta).min())


def index_bound(n: int, theta: float, *, at: Input = "worst") -> float:
    """Return an upper bound of :func:`index_discrepancy`, ``min{1 - cos θ, 2π² / (T + 1)²}``.

    By Dirichlet's theorem some t ≤ T has tθ within ``2π / (T + 1)`` of a multiple of 2π, and ``1 - cos x ≤ x² / 2``. At
    the worst input this is the theorem's ``min{1 - cos θ, 2π² / n²}``.
    """
    _check(n, theta)
    reach = n // 2 if at == "best" else n - 1
    return min(float(_one_minus_cos(torch.tensor(theta, dtype=torch.float64))), 2 * (math.pi / (reach + 1)) ** 2)


def retrieval_discrepancy(n: int, theta: float, omega: float, *, at: Input = "best") -> float:
    """Return the discrepancy of the Retrieval construction: the correct key's logit minus the largest other.

    The key at distance d whose letter is a steps after the queried one has the logit ``cos(dθ + aω)``. One key, at a
    distance D from 1 to n - 1, has a = 0; at any other distance, including the query's own 0, a is anything else. The
    best input takes the farthest letter everywhere, the worst the nearest.

    Args:
        n: Tokens of the input, 2 or more.
        theta: Angle per position; 0 for none.
        omega: Angle between neighbouring letters, 2π over their number.
        at: The largest or the smallest over inputs; below 0 where the head is wrong on that input.
    """
    _check(n, theta, zero=True)
    letters = count_letters(omega)
    distances = torch.arange(n, dtype=torch.float64) * theta
    # Differences of cosines near 1 lose digits, those of 1 - cos do not.
    lost = _one_minus_cos(distances[:, None] + torch.arange(1, letters, dtype=torch.float64) * omega)
    lost = lost.amax(1) if at == "best" else lost.amin(1)
    smallest, where = lost.topk(2, largest=False)
    other = torch.full_like(distances, float(smallest[0]))
    other[where[0]] = smallest[1]  # the correct key is not among the others
    gap = (other - _one_minus_cos(distances))[1:]
    return float(gap.max() if at == "best" else gap.min())


def retrieval_bound(n: int, theta: float, omega: float) -> float:
    """Return the theorem's bound of the discrepancy of Retrieval, ``1 - cos(ω - nθ)``, for nθ ≤ ω.

    It holds at the worst input for distances up to n, which are inputs of n + 1 tokens.
    """
    _check(n, theta, zero=True)
    return float(_one_minus_cos(torch.tensor(omega - n * theta, dtype=torch.float64)))


def count_letters(omega: float) -> int:
    """Return the number of letters with an angle ``omega`` between neighbours."""
    letters = round(2 * math.pi / omega) if 0 < omega <= 2 * math.pi else 0
    if letters < 2 or not math.isclose(letters * omega, 2 * math.pi, rel_tol=1e-9):
        raise ConfigError(f"omega is {omega}: give 2π over the number of letters, which is 2 or more")
    return letters


@dataclass(frozen=True, eq=False)
class Discrepancy:
    """Difference of the last query's largest and second largest logit.

    Attributes:
        values: Per head and input, ``(heads, inputs)`` float64.
        margins: The correct key's logit minus the largest other, ``(heads, inputs)`` float64: below 0 where another key
            has the largest. None if no correct keys were given.
    """

    values: Tensor
    margins: Tensor | None = None


def measured_discrepancy(attention: LayerAttention, *, right: Tensor | None = None) -> Discrepancy:
    """Return the discrepancy of the last query of every input, for every head, in logits with their scale.

    Args:
        attention: One layer of a pass over inputs of one length.
        right: Positions of the keys that should have the largest logits, ``(inputs,)``.
    """
    row = slice(attention.n - 1, attention.n)
    visible = attention.visible(row)
    scores = attention.attn_scores(row).double().masked_fill(~visible, -torch.inf)[:, :, 0]  # (inputs, heads, keys)
    if attention.m < 2 or int(visible.sum(-1).min()) < 2:
        raise MeasureError(f"the last of {attention.n} queries sees fewer than two keys: there is no second largest")
    first, second = scores.topk(2, dim=-1).values.unbind(-1)
    margins = None
    if right is not None:
        if right.shape != scores.shape[:1] or int(right.min()) < 0 or int(right.max()) >= attention.m:
            raise MeasureError(
                f"right keys {tuple(right.shape)} must be one position from 0 to {attention.m - 1} for each of "
                f"{len(scores)} inputs"
            )
        index = right.to(scores.device)[:, None, None].expand(-1, scores.shape[1], 1)
        at_right = scores.gather(-1, index)
        if bool(at_right.isinf().any()):
            raise MeasureError("a right key is hidden from the last query: give keys that it sees")
        margins = (at_right - scores.scatter(-1, index, -torch.inf).amax(-1, keepdim=True))[..., 0].T.cpu()
    return Discrepancy((first - second).T.cpu(), margins)


def _one_minus_cos(x: Tensor) -> Tensor:
    return 2 * (x / 2).sin().square()


def _check(n: int, theta: float, *, zero: bool = False) -> None:
    if n < 2:
        raise ConfigError(f"n is {n}: a second largest logit needs 2 tokens or more")
    if not (0 < theta < math.inf or (zero and theta == 0)):
        raise ConfigError(f"theta is {theta}: give a positive angle{' or 0' if zero else ''}")
