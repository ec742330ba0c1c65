"""The tokens a model has to do something at: those of the hop path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.multihop.tasks import Sequences


@dataclass(frozen=True)
class PathTokens:
    """The tokens that hops leave from, of all sequences together.

    Attributes:
        row: Sequence of each, ``(tokens,)``.
        position: Its position, likewise.
        left: Hops from there to the answer, likewise; at the last token of a sequence all of its hops.
        at_query: Whether it is the last token of its sequence.
        ahead: Positions that hops from there reach, the next one first and the answer's last, -1 after it,
            ``(tokens, max_hops)``.
    """

    row: Tensor
    position: Tensor
    left: Tensor
    at_query: Tensor
    ahead: Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def next(self) -> Tensor:
        """Where the next hop leads, ``(tokens,)``."""
        return self.ahead[:, 0]

    @property
    def answer(self) -> Tensor:
        """Where the answer stands, ``(tokens,)``."""
        return self.ahead.gather(1, self.left[:, None] - 1)[:, 0]


def path_tokens(sequences: Sequences) -> PathTokens:
    """The tokens that hops leave from: a path without its end, which is the answer."""
    path = sequences.path
    steps = torch.arange(path.shape[1])
    row, step = (steps < sequences.hops[:, None]).nonzero(as_tuple=True)
    columns = step[:, None] + 1 + torch.arange(path.shape[1] - 1)
    padded = torch.cat([path, torch.full_like(path, -1)], 1)
    return PathTokens(
        row=row,
        position=path[row, step],
        left=sequences.hops[row] - step,
        at_query=step == 0,
        ahead=padded[row[:, None], columns],
    )
