"""Accuracy by length: the same questions behind more and more tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.dynamics.accuracy import Accuracy, measure_accuracy
from wherewhat.multihop.dynamics.shares import wilson
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.tasks import Task

LENGTHS = (17, 30, 50, 100, 200, 500, 1000, 2000, 5000)
"""Lengths from the one trained on to those of arXiv 2605.31558."""


@dataclass(frozen=True)
class LengthAccuracy:
    """Right answers by length and number of hops.

    Attributes:
        lengths: Tokens of the sequences.
        hops: The numbers of hops.
        hits: Right answers, ``(lengths, hops)`` int64.
        counts: Questions, ``(lengths, hops)`` int64.
    """

    lengths: tuple[int, ...]
    hops: tuple[int, ...]
    hits: Tensor
    counts: Tensor

    @property
    def shares(self) -> Tensor:
        """Share of right answers, ``(lengths, hops)`` float64."""
        return self.hits.double() / self.counts

    @property
    def intervals(self) -> Tensor:
        """95 % intervals of the shares, ``(lengths, hops, 2)``."""
        return wilson(self.hits, self.counts)

    @property
    def overall(self) -> Tensor:
        """Share of right answers of all numbers of hops, ``(lengths,)`` float64."""
        return self.hits.sum(-1).double() / self.counts.sum(-1)

    @property
    def overall_intervals(self) -> Tensor:
        """95 % intervals of those, ``(lengths, 2)``."""
        return wilson(self.hits.sum(-1), self.counts.sum(-1))


def accuracy_by_length(
    model: LabModel,
    task: Task,
    *,
    lengths: Sequence[int] = LENGTHS,
    count: int = 1000,
    seed: int = 1,
    tell: Callable[[int, Accuracy], None] | None = None,
) -> LengthAccuracy:
    """Right answers on sequences with extra tokens in front, which do not change the answer.

    The questions are the same at every length, so differences between lengths are the lengths'. Memory is bounded by a
    few thousand tokens on a CPU and some hundred thousand on a GPU, and by n² numbers for what positions do.

    Args:
        model: A trained model.
        task: The task it was trained on.
        lengths: Tokens of the sequences.
        count: Sequences of each length, with numbers of hops in equal shares.
        seed: Seed of the sequences: one that no training used.
        tell: Told each length as soon as it is done.

    Raises:
        ConfigError: If a length is shorter than the task's sequences, or does not fit a learned encoding.
    """
    if not lengths:
        raise ConfigError("lengths is empty: give at least one")
    for length in lengths:
        if length < task.length:
            raise ConfigError(
                f"length {length} is too short: sequences of this task have at least {task.length} tokens"
            )
        if model.positions is not None and length > len(model.positions):
            raise ConfigError(f"length {length} does not fit a learned encoding of {len(model.positions)} positions")
    found: list[Accuracy] = []
    for length in lengths:
        found.append(measure_accuracy(model, task.sample(count, seed=seed, extra=length - task.length)))
        if tell is not None:
            tell(length, found[-1])
    return LengthAccuracy(
        lengths=tuple(lengths),
        hops=found[0].hops,
        hits=torch.stack([accuracy.hits for accuracy in found]),
        counts=torch.stack([accuracy.counts for accuracy in found]),
    )
