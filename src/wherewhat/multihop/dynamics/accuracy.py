"""How many answers of a model are right, by number of hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from wherewhat.multihop.dynamics.parts import in_parts, rows_in_parts
from wherewhat.multihop.dynamics.shares import wilson
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.tasks import Sequences


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
