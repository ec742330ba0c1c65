"""Accuracy by number of hops and by input length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from wherewhat.errors import ConfigError
from wherewhat.lab.intervals import wilson
from wherewhat.lab.model import LabModel
from wherewhat.lab.tasks.task import Sequences, Task

Part = TypeVar("Part")
Result = TypeVar("Result")

_TOKENS = {"cpu": 2**12, "cuda": 2**18}
"""Tokens of a part: what keeps a processor's caches, or a GPU, busy."""


def rows_in_parts(count: int, n: int, device: torch.device) -> list[slice]:
    """``count`` sequences of ``n`` tokens in parts of about the same size and of bounded memory."""
    most = max(1, _TOKENS.get(device.type, 2**14) // n)
    edges = torch.linspace(0, count, -(-count // most) + 1, dtype=torch.float64).round().long().tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def in_parts(work: Callable[[Part], Result], parts: Sequence[Part], device: torch.device) -> list[Result]:
    """``work`` on every part, in order, without gradients.

    On a CPU as many parts at a time as torch has threads, one thread each: at this size torch's own way, all threads on
    each operation, is mostly waiting, and what comes out would depend on their number.

    Args:
        work: What to do with a part.
        parts: The parts.
        device: Where it is done; on a GPU parts are done one after the other.
    """

    def alone(part: Part) -> Result:
        with torch.no_grad():  # whether gradients are kept is a matter of each thread
            return work(part)

    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return [alone(part) for part in parts]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Accuracy:
    """Right answers by number of hops.

    Attributes:
        hops: The numbers of hops.
        hits: Right answers of each, ``(hops,)`` int64.
        counts: Questions of each, ``(hops,)`` int64.
        loss: Mean cross-entropy of the answers of each, ``(hops,)`` float64.
    """

    hops: tuple[int, ...]
    hits: Tensor
    counts: Tensor
    loss: Tensor

    @property
    def shares(self) -> Tensor:
        """Share of right answers, ``(hops,)`` float64."""
        return self.hits.double() / self.counts

    @property
    def overall(self) -> float:
        """Share of right answers of all."""
        return float(self.hits.sum() / self.counts.sum())

    @property
    def intervals(self) -> Tensor:
        """95 % intervals of the shares, ``(hops, 2)``."""
        return wilson(self.hits, self.counts)


def measure_accuracy(model: LabModel, sequences: Sequences) -> Accuracy:
    """Right answers of a model by number of hops, in passes of bounded memory."""
    return count_hits(_judge_all(model, sequences), sequences.hops, sorted(set(sequences.hops.tolist())))


def solved_by(model: LabModel, sequences: Sequences) -> Tensor:
    """Which questions a model answers right, ``(count,)`` bool on the CPU."""
    return _judge_all(model, sequences)[0] > 0


def _judge_all(model: LabModel, sequences: Sequences) -> Tensor:
    device, n = model.embedding.device, sequences.tokens.shape[1]
    model.places(n)  # once, before threads ask for it

    def run(rows: slice) -> Tensor:
        return judge(model(sequences.tokens[rows].to(device)), sequences.answers[rows]).cpu()

    return torch.cat(in_parts(run, rows_in_parts(len(sequences), n, device), device), 1)


def judge(logits: Tensor, answers: Tensor) -> Tensor:
    """1 for each right answer and 0 for others, and its cross-entropy, ``(2, count)`` float64.

    Args:
        logits: Logits of the last tokens, ``(count, vocabulary)``.
        answers: Token ids ``(count,)``.
    """
    answers = answers.to(logits.device)
    loss = functional.cross_entropy(logits.float(), answers, reduction="none")
    return torch.stack([(logits.argmax(-1) == answers).double(), loss.double()])


def count_hits(judged: Tensor, hops: Tensor, listed: Sequence[int]) -> Accuracy:
    """Right answers by number of hops.

    Args:
        judged: What :func:`judge` says, ``(2, count)``.
        hops: Number of hops of each question, ``(count,)``.
        listed: The numbers of hops to count.
    """
    which = (hops.cpu()[:, None] == torch.tensor(listed)).double()  # (count, hops)
    hits, loss = judged @ which
    counts = which.sum(0)
    return Accuracy(tuple(listed), hits.long(), counts.long(), loss / counts)


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
