"""Check a model on all inputs of a task, or on many random ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.progress import Progress, Silent
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.task import SequenceTask, seeded

_BATCH = 2048
LONGEST = 2**12
"""Tokens of an input whose attention weights fill a batch on their own; longer inputs take more memory."""

_ENTRIES = LONGEST**2
"""Largest number of attention weights of a batch: 128 MiB in float64."""

_SHOWN = 5
_MOST = 2_000_000
"""Largest number of sequences that are all checked."""


@dataclass(frozen=True, eq=False)
class Check:
    """Result of a check.

    Attributes:
        inputs: Number of inputs.
        wrong: Number of inputs on which the model's largest logit is not the answer's.
        by_length: Numbers of inputs and of wrong ones, by number of tokens.
        margin: The smallest difference between the answer's logit and the largest other.
        examples: Some inputs with wrong answers, as token ids.
    """

    inputs: int
    wrong: int
    by_length: dict[int, tuple[int, int]]
    margin: float
    examples: tuple[tuple[int, ...], ...]


def check_exhaustively(model: LabModel, task: SequenceTask) -> Check:
    """Check a model on every sequence of the task's length that the task's solver leads to an answer.

    These include sequences that the task does not draw: any tokens in any order, if the query leads to one answer
    within the task's number of hops.

    Args:
        model: The model.
        task: A task with a small vocabulary and short windows.
    """
    queries = task.vocabulary - task.answers
    count = queries * task.vocabulary ** (task.length - 1)
    if count > _MOST:
        raise ConfigError(
            f"{count} sequences of {task.length} of {task.vocabulary} tokens are more than {_MOST}: give a smaller task"
        )
    return _check(model, (part for batch in _solved(task, count) for part in _parts(*batch)))


def check_randomly(
    model: LabModel,
    task: SequenceTask,
    *,
    count: int = 100_000,
    longest: int | None = None,
    progress: Progress | None = None,
) -> Check:
    """Check a model on random inputs, in equal shares of up to nine lengths from the task's to ``longest``.

    Args:
        model: The model.
        task: The task.
        count: Number of inputs.
        longest: Largest number of tokens, n0; that of the task by default.
        progress: Progress callback.
    """
    longest = task.length if longest is None else longest
    if longest < task.length:
        raise ConfigError(f"longest is {longest}: sequences of the task have {task.length} tokens")
    steps = min(8, longest - task.length)
    extras = [round(i * (longest - task.length) / max(steps, 1)) for i in range(steps + 1)]
    shares = [(i + 1) * count // len(extras) - i * count // len(extras) for i in range(len(extras))]
    generator = seeded(0)

    def drawn() -> Iterator[tuple[Tensor, Tensor]]:
        for extra, share in zip(extras, shares, strict=True):
            if share:
                each = int(torch.randint(2**30, (1,), generator=generator))
                sequences = task.sample(share, seed=each, extra=extra)
                yield from _parts(sequences.tokens, sequences.answers)

    parts = sum(-(-share // _batch_size(task.length + extra)) for extra, share in zip(extras, shares, strict=True))
    tracked = (progress or Silent()).track(range(parts), f"{count:,} inputs of up to {longest:,} tokens")
    return _check(model, (part for _, part in zip(tracked, drawn(), strict=True)))


def _solved(task: SequenceTask, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all sequences that have an answer, with their answers."""
    powers = task.vocabulary ** torch.arange(task.length - 1)
    for start in range(0, count, _BATCH):
        number = torch.arange(start, min(count, start + _BATCH))
        free = number % task.vocabulary ** (task.length - 1)
        query = task.answers + number // task.vocabulary ** (task.length - 1)
        tokens = torch.cat((free[:, None] // powers % task.vocabulary, query[:, None]), dim=1)
        rows, answers = [], []
        for row, sequence in enumerate(tokens.tolist()):
            try:
                answer, visited = task.solve(sequence)
            except ConfigError:
                continue  # no answer, or more than one
            if len(visited) - 1 <= task.max_hops:
                rows.append(row)
                answers.append(answer)
        if rows:
            yield tokens[rows], torch.tensor(answers)


def _parts(tokens: Tensor, answers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split sequences into batches of bounded memory."""
    size = _batch_size(tokens.shape[1])
    return zip(torch.split(tokens, size), torch.split(answers, size), strict=True)


def _batch_size(length: int) -> int:
    """Return the number of inputs of a length in one batch."""
    return min(_BATCH, max(1, _ENTRIES // length**2))


@torch.no_grad()
def _check(model: LabModel, parts: Iterable[tuple[Tensor, Tensor]]) -> Check:
    by_length: dict[int, tuple[int, int]] = {}
    margin = torch.inf
    examples: list[tuple[int, ...]] = []
    device = model.embedding.device
    for tokens, answers in parts:
        logits = model(tokens.to(device)).double().cpu()
        right = logits.gather(1, answers[:, None])
        ahead = (right - logits.scatter(1, answers[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]
        failed = ~(ahead > 0)
        inputs, wrong = by_length.get(tokens.shape[1], (0, 0))
        by_length[tokens.shape[1]] = inputs + len(tokens), wrong + int(failed.sum())
        margin = min(margin, float(ahead.min()))
        examples += [tuple(row) for row in tokens[failed][: _SHOWN - len(examples)].tolist()]
    inputs, wrong = (sum(pair[i] for pair in by_length.values()) for i in (0, 1))
    return Check(inputs, wrong, by_length, margin, tuple(examples))
