"""When heads became purely positional or purely symbolic, and how many there were at each moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.measure.swaps.labels import LABELS, label
from wherewhat.multihop.dynamics.records import Dynamics

PURE = ("positional", "symbolic")
"""The labels that count as pure."""


@dataclass(frozen=True)
class Purity:
    """Labels of heads over the steps of one training.

    Attributes:
        gammas: How far from 0 and 1 scores of a pure head may be.
        steps: Steps of the records, ``(records,)``.
        codes: Label of each head, an index into ``LABELS`` or -1 for none, ``(gammas, records, layers, heads)``.
        counts: Heads of each label, ``(gammas, records, labels)``.
        since: Step of the first record from which on a head has had the pure label it ends with,
            ``(gammas, layers, heads)``; -1 for heads that do not end pure.
    """

    gammas: tuple[float, ...]
    steps: Tensor
    codes: Tensor
    counts: Tensor
    since: Tensor

    @property
    def final(self) -> Tensor:
        """Label of each head at the end, ``(gammas, layers, heads)``."""
        return self.codes[:, -1]

    def pure(self, kind: str, gamma: float) -> list[tuple[int, int]]:
        """Layer and head of those that end with a label.

        Raises:
            ConfigError: If there is no such label, or another γ was asked for.
        """
        if kind not in LABELS:
            raise ConfigError(f"there is no label '{kind}': known are {', '.join(LABELS)}")
        found = self.final[self.index(gamma)] == LABELS.index(kind)
        return [(layer, head) for layer, head in found.nonzero().tolist()]

    def index(self, gamma: float) -> int:
        """Where a γ is in the list.

        Raises:
            ConfigError: If it is not.
        """
        if gamma not in self.gammas:
            raise ConfigError(f"purity was found for gamma {', '.join(map(str, self.gammas))}, not for {gamma}")
        return self.gammas.index(gamma)


def find_purity(dynamics: Dynamics, *, gammas: tuple[float, ...] = (0.1, 0.05), along_path: bool = False) -> Purity:
    """Labels of heads by their mean scores over sequences.

    Args:
        dynamics: The records.
        gammas: How far from 0 and 1 scores of a pure head may be.
        along_path: Take the scores at all tokens that hops leave from, in place of those at the last token.

    Raises:
        ConfigError: If a γ makes no sense.
    """
    for gamma in gammas:
        if not 0 <= gamma < 0.5:
            raise ConfigError(f"gamma is {gamma}: give a number from 0 to below 0.5")
    scores = (dynamics.s_pos_path, dynamics.s_sym_path) if along_path else (dynamics.s_pos, dynamics.s_sym)
    s_pos, s_sym = (x.double() for x in scores)
    codes = torch.stack([label(s_pos, s_sym, gamma) for gamma in gammas])
    counts = torch.stack([(codes == code).sum((-1, -2)) for code in range(len(LABELS))], -1)
    final = codes[:, -1:]
    # Counted from the end, how many records in a row have the label of the last.
    lasted = (codes == final).flip(1).cumprod(1).sum(1)
    since = dynamics.steps[len(dynamics) - lasted]
    pure = torch.isin(final[:, 0], torch.tensor([LABELS.index(kind) for kind in PURE]))
    return Purity(tuple(gammas), dynamics.steps, codes, counts, torch.where(pure, since, -1))
