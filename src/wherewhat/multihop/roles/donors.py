"""Other inputs to take a head's output from: the same question with another answer, or another question."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.roles.deciding import hop_function
from wherewhat.multihop.tasks import Sequences, Task


def other_answers(task: Task, sequences: Sequences, *, seed: int = 0) -> Sequences:
    """The same sequences with another token in the answer's place, so that only the answer differs.

    A letter becomes any other letter; a (letter, digit) keeps its letter, which the path needs, and gets another digit.

    Args:
        task: The task.
        sequences: The sequences.
        seed: Another seed, other answers.

    Raises:
        ConfigError: If there is no other answer to choose from.
    """
    group = task.answers if hop_function(task) == "Index" else int(getattr(task, "digits"))  # noqa: B009 - not of all
    if group < 2:
        raise ConfigError("a task with one digit or symbol has no other answer to put in: give it more")
    generator = torch.Generator().manual_seed(seed)
    first, old = sequences.answers // group * group, sequences.answers % group
    new = first + (old + 1 + torch.randint(group - 1, old.shape, generator=generator)) % group
    where = sequences.path.gather(1, sequences.hops[:, None])
    return replace(sequences, tokens=sequences.tokens.scatter(1, where, new[:, None]), answers=new)


def other_sequences(sequences: Sequences, *, seed: int = 0) -> Sequences:
    """For each sequence another one of the same number of hops with another answer.

    Args:
        sequences: The sequences; the others are found among them.
        seed: Another seed, other pairs.

    Raises:
        ConfigError: If most of them have the same answer, so that there are not enough others.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.empty_like(sequences.hops)
    relabelled = torch.randperm(int(sequences.answers.max()) + 1, generator=generator)
    for hops in sorted(set(sequences.hops.tolist())):
        rows = (sequences.hops == hops).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        # Sorted by answer, a row and the one half the way on differ unless one answer takes more than half.
        rows = rows[relabelled[sequences.answers[rows]].argsort(stable=True)]
        chosen[rows] = rows.roll(-(len(rows) // 2))
    if _same(sequences, chosen):
        raise ConfigError(
            f"{len(sequences)} sequences are too few, or too alike, to give each another one with as many hops and "
            "another answer: give more"
        )
    return sequences.select(chosen)


def _same(sequences: Sequences, chosen: Tensor) -> bool:
    return bool((sequences.answers == sequences.answers[chosen]).any())
