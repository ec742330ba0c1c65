"""The fixed sequences a model is watched on while it learns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.tasks import Sequences


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Sequences that are not trained on.

    Attributes:
        sequences: All of them: accuracy is that on these.
        scored: How many of them, from the first on, heads are scored on.
    """

    sequences: Sequences
    scored: int

    @property
    def to_score(self) -> Sequences:
        """Those that heads are scored on."""
        return self.sequences.select(torch.arange(self.scored))

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """The numbers of hops that occur, ascending."""
        return tuple(sorted(set(self.sequences.hops.tolist())))

    @cached_property
    def fingerprint(self) -> int:
        """A number that other sequences, or the same in another order, do not share."""
        digest = hashlib.blake2b(str((self.scored, tuple(self.sequences.tokens.shape))).encode(), digest_size=7)
        for tensor in (self.sequences.tokens, self.sequences.answers):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return int.from_bytes(digest.digest())


def hold_out(sequences: Sequences, *, scored: int = 256, tested: int = 1024) -> HeldOut:
    """Choose from sequences, with numbers of hops in equal shares.

    Accuracy takes most of the time on a CPU: of 1,024 sequences about as long as five training steps. On a GPU all
    that there are cost nothing worth speaking of.

    Args:
        sequences: Where to choose from, such as a task's validation sequences; the first of each number of hops are
            taken.
        scored: How many to score heads on.
        tested: How many to know accuracy from, the scored ones included.

    Raises:
        ConfigError: If there are too few, or the numbers make no sense.
    """
    classes = sorted(set(sequences.hops.tolist()))
    if not len(classes) <= scored <= tested:
        raise ConfigError(
            f"scored is {scored} and tested {tested}: score at least one sequence of each of {len(classes)} numbers of "
            "hops, and test at least those"
        )
    # Ranks within a number of hops: sorting by them takes turns.
    rank = torch.empty_like(sequences.hops)
    for hops in classes:
        rows = (sequences.hops == hops).nonzero()[:, 0]
        rank[rows] = torch.arange(len(rows))
    rows = _in_turns(rank, sequences.hops)[:tested]
    wanted = -(-tested // len(classes))
    if len(rows) < tested or int(rank[rows].max()) >= wanted:
        fewest = min(int((sequences.hops == hops).sum()) for hops in classes)
        raise ConfigError(
            f"tested is {tested}: that takes {wanted} sequences of each number of hops, and of one there are {fewest}; "
            "ask for fewer, or give more"
        )
    return HeldOut(sequences.select(rows), scored)


def _in_turns(rank: Tensor, hops: Tensor) -> Tensor:
    """Row numbers by rank, and by hops among equal ranks."""
    return (rank * (int(hops.max()) + 1) + hops).argsort(stable=True)
