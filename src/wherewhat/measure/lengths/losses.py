"""Losses by position, beside those of the same tokens read in pieces no longer than the training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.base import Subject
from wherewhat.measure.losses import token_losses

LADDER = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Multiples of the trained length up to which losses are told, each from the one before."""


def read_in_pieces(
    subject: Subject, ids: Tensor, trained: int, look: Callable[[LayerAttention], None] = lambda _: None
) -> Tensor:
    """What the untouched model loses on each token when it never reads more than the trained length.

    Pieces of that length overlap by half, and of each the second half counts: every token has at least half a trained
    length before it. Each piece begins with the text's first token, on which attention often rests.

    Args:
        subject: The model.
        ids: Token ids ``(1, n)``.
        trained: The trained length.
        look: Is handed each layer of the pieces behind the first: the second half of these is the text beyond.

    Returns:
        Loss by the place it is foretold from, ``(n - 1,)``; NaN in the first half of the first piece.
    """
    n, half = ids.shape[1], trained // 2
    found = torch.full((n - 1,), torch.nan, dtype=torch.float64)
    for start in range(0, n - 1 - half, trained - half):
        stop = min(n - 1, start + trained)
        piece = torch.cat([ids[:, :1], ids[:, start + 1 : stop]], 1)
        logits = subject.run(piece, look if start else lambda _: None, logits=True)
        assert logits is not None
        with_target = torch.cat([piece, ids[:, stop : stop + 1]], 1)
        found[start + half : stop] = token_losses(logits, with_target)[half:]
    return found


def by_multiple(rise: Tensor, trained: int) -> dict[float, float]:
    """Mean of ``rise`` ``(n - 1,)`` on each step of the ladder that the text reaches."""
    found = {}
    start = trained
    for multiple in LADDER:
        if start >= len(rise):
            break
        stop = round(multiple * trained)
        found[multiple] = float(rise[start:stop].mean())
        start = stop
    return found


def buckets(values: Tensor, trained: int, *, first: int = 0) -> Tensor:
    """Mean position and value of each quarter of a trained length from ``first`` on, ``(buckets, 2)``."""
    size = max(1, trained // 4)
    rows = [
        (float(i + min(size, len(values) - i) / 2), float(values[i : i + size].mean()))
        for i in range(first, len(values), size)
    ]
    return torch.tensor(rows)
