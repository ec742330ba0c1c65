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
from wherewhat.measures.statistics import share_bounds
from wherewhat.runs.records import TensorTable
from wherewhat.scores import Column
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.task import Sequences, SequenceTask

Result = TypeVar("Result")

_TOKENS = {"cpu": 2**12, "cuda": 2**18}
"""Tokens of a batch: chosen for the caches of a CPU, and for the occupancy of a GPU."""


def split_rows(count: int, n: int, device: torch.device) -> list[slice]:
    """Divide ``count`` sequences of ``n`` tokens into batches of about the same size and of bounded memory."""
    most = max(1, _TOKENS.get(device.type, 2**14) // n)
    edges = torch.linspace(0, count, -(-count // most) + 1, dtype=torch.float64).round().long().tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def map_batches(work: Callable[[slice], Result], rows: int | list[slice], n: int, model: LabModel) -> list[Result]:
    """Apply ``work`` to every batch of rows, in order, without gradients.

    On a CPU, as many batches run at a time as torch has threads, one thread each. At this size the alternative, all
    threads on each operation, mostly waits, and its results would depend on the number of threads. On a GPU batches run
    one after the other.

    Args:
        work: Function of a batch, given as a slice of rows.
        rows: Number of rows, or the batches.
        n: Tokens of each row.
        model: The model that ``work`` runs.
    """
    device = model.embedding.device
    model.position_tables(n)  # cached before threads need it
    batches = split_rows(rows, n, device) if isinstance(rows, int) else rows

    def run(batch: slice) -> Result:
        with torch.no_grad():  # gradient mode is local to a thread
            return work(batch)

    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return [run(batch) for batch in batches]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(run, batches))
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Accuracy:
    """Correct answers by number of hops.

    Attributes:
        hops: The numbers of hops.
        hits: Correct answers of each, ``(hops,)`` int64.
        counts: Questions of each, ``(hops,)`` int64.
        loss: Mean cross-entropy of the answers of each, ``(hops,)`` float64.
    """

    hops: tuple[int, ...]
    hits: Tensor
    counts: Tensor
    loss: Tensor

    @property
    def shares(self) -> Tensor:
        """Share of correct answers, ``(hops,)`` float64."""
        return self.hits.double() / self.counts

    @property
    def overall(self) -> float:
        """Share of correct answers over all numbers of hops."""
        return int(self.hits.sum()) / int(self.counts.sum())

    @property
    def overall_interval(self) -> tuple[float, float]:
        """95 % interval of ``overall``."""
        return share_bounds(self.overall, int(self.counts.sum()))

    def table(self) -> TensorTable:
        """Return everything as named tensors; :meth:`from_table` is the inverse."""
        columns = {"hops": torch.tensor(self.hops), "hits": self.hits, "counts": self.counts, "loss": self.loss}
        return {name: Column(values, ("hop",)) for name, values in columns.items()}

    @classmethod
    def from_table(cls, table: TensorTable) -> Accuracy:
        """Return the accuracy in a table."""
        values = {name: column.values for name, column in table.items()}
        return cls(tuple(values["hops"].tolist()), values["hits"], values["counts"], values["loss"])


def measure_accuracy(model: LabModel, sequences: Sequences) -> Accuracy:
    """Return the correct answers of a model by number of hops, in passes of bounded memory."""
    return count_hits(_judge_all(model, sequences), sequences.hops, sequences.hop_numbers)


def solved_by(model: LabModel, sequences: Sequences) -> Tensor:
    """Return which questions a model answers correctly, ``(count,)`` bool on the CPU."""
    return _judge_all(model, sequences)[0] > 0


def _judge_all(model: LabModel, sequences: Sequences) -> Tensor:
    device = model.embedding.device

    def run(rows: slice) -> Tensor:
        return judge(model(sequences.tokens[rows].to(device)), sequences.answers[rows]).cpu()

    return torch.cat(map_batches(run, len(sequences), sequences.tokens.shape[1], model), 1)


def judge(logits: Tensor, answers: Tensor) -> Tensor:
    """Return 1 for each correct answer and 0 for others, and its cross-entropy, ``(2, count)`` float64.

    Args:
        logits: Logits of the last tokens, ``(count, vocabulary)``.
        answers: Token ids ``(count,)``.
    """
    answers = answers.to(logits.device)
    loss = functional.cross_entropy(logits.float(), answers, reduction="none")
    return torch.stack([(logits.argmax(-1) == answers).double(), loss.double()])


def count_hits(judged: Tensor, hops: Tensor, listed: Sequence[int]) -> Accuracy:
    """Return the correct answers by number of hops.

    Args:
        judged: Result of :func:`judge`, ``(2, count)``.
        hops: Number of hops of each question, ``(count,)``.
        listed: The numbers of hops to count.
    """
    which = (hops.cpu()[:, None] == torch.tensor(listed)).double()  # (count, hops)
    hits, loss = judged @ which
    counts = which.sum(0)
    return Accuracy(tuple(listed), hits.long(), counts.long(), loss / counts)


EXTRA = (0, 30, 40, 50, 60, 80, 100, 200, 300, 400, 500, 700, 800, 1000, 1500, 2000, 3000, 5000)
"""Numbers of extra tokens of arXiv 2605.31558, whose axis counts the tokens added to the 17 of its tasks."""


def accuracy_by_extra(
    model: LabModel, task: SequenceTask, *, extra: Sequence[int] = EXTRA, count: int = 1000, seed: int = 1
) -> dict[int, Accuracy]:
    """Return the correct answers by number of extra tokens in front of the sequences, which do not change the answer.

    The questions are the same for every number, so differences are due to length. Memory is bounded by a few thousand
    tokens on a CPU and some hundred thousand on a GPU, and by n² numbers for the tables of positions.

    Args:
        model: A trained model.
        task: The task it was trained on.
        extra: Numbers of tokens added to the task's own; 0 for its own length.
        count: Sequences of each, with numbers of hops in equal shares.
        seed: Seed of the sequences: one that no training used.
    """
    for added in extra:
        if model.positions is not None and task.length + added > len(model.positions):
            raise ConfigError(
                f"{added} extra tokens make {task.length + added}, which does not fit a learned encoding of "
                f"{len(model.positions)} positions"
            )
    return {added: measure_accuracy(model, task.sample(count, seed=seed, extra=added)) for added in extra}
