"""What a task yields: token sequences with their answers and the paths that lead there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of one task, one per row.

    Attributes:
        tokens: Token ids ``(count, n)``, int64; the last token is the query.
        answers: Token ids of the answers ``(count,)``, int64.
        hops: How many hops lead to them ``(count,)``, int64.
        path: Positions visited ``(count, max_hops + 1)``, int64: the query, then the position each hop reaches, the
            answer's last; -1 fills what is left.
    """

    tokens: Tensor
    answers: Tensor
    hops: Tensor
    path: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, index: Tensor) -> Sequences:
        """The rows of an index or mask ``(rows,)``."""
        return Sequences(self.tokens[index], self.answers[index], self.hops[index], self.path[index])

    def behind(self, prefix: Tensor) -> Sequences:
        """The same questions behind more tokens.

        Args:
            prefix: Token ids ``(count, extra)`` to stand in front.
        """
        extra = prefix.shape[1]
        path = torch.where(self.path >= 0, self.path + extra, self.path)
        return Sequences(torch.cat((prefix, self.tokens), dim=1), self.answers, self.hops, path)
