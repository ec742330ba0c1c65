"""Ablation and patching of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.intervals import wilson
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import in_parts, rows_in_parts, solved_by
from wherewhat.lab.multihop.functions import hop_function
from wherewhat.lab.tasks.task import Sequences, Task
from wherewhat.measures.statistics import change_bounds


def other_answers(task: Task, sequences: Sequences, *, seed: int = 0) -> Sequences:
    """The same sequences with another token in the answer's place, so that only the answer differs.

    A letter becomes any other letter; a (letter, digit) keeps its letter, which the path needs, and gets another digit.

    Args:
        task: The task.
        sequences: The sequences.
        seed: Another seed, other answers.
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


Replacement = Literal["mean", "zero"]


@dataclass(frozen=True)
class Ablation:
    """Answers without each head.

    Attributes:
        to: What its output was replaced by.
        hops: Number of hops of each question, ``(count,)``.
        before: Whether the model answers right, ``(count,)`` bool.
        after: Whether it still does without a head, ``(layers, heads, count)`` bool.
    """

    to: Replacement
    hops: Tensor
    before: Tensor
    after: Tensor

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of hops."""
        return tuple(sorted(set(self.hops.tolist())))

    @property
    def change(self) -> Tensor:
        """Change of accuracy by number of hops, ``(layers, heads, hops)``: negative where the head is needed."""
        which = (self.hops[:, None] == torch.tensor(self.numbers)).double()
        return (self.after.double() - self.before.double()) @ which / which.sum(0)

    def intervals(self) -> Tensor:
        """95 % intervals of the change over questions (Bonett & Price 2012), ``(layers, heads, hops, 2)``."""
        which = self.hops[:, None] == torch.tensor(self.numbers)
        gained, lost = (x.double() @ which.double() for x in (self.after & ~self.before, self.before & ~self.after))
        counts = which.sum(0).expand(gained.shape)
        each = zip(*(x.flatten().long().tolist() for x in (gained, lost, counts)), strict=True)
        return torch.tensor([change_bounds(*x) for x in each], dtype=torch.float64).view(*gained.shape, 2)


@dataclass(frozen=True)
class Patching:
    """Answers with each head's output taken from another input with another answer.

    Attributes:
        hops: The numbers of hops.
        counts: Pairs of inputs of each, both solved, ``(hops,)``.
        follows: Answers that became the other input's, ``(layers, heads, hops)``.
        stays: Answers that stayed what they were, likewise.
    """

    hops: tuple[int, ...]
    counts: Tensor
    follows: Tensor
    stays: Tensor

    @property
    def shares(self) -> Tensor:
        """Share of answers that follow, ``(layers, heads, hops)`` float64."""
        return self.follows.double() / self.counts

    @property
    def intervals(self) -> Tensor:
        """95 % intervals of those shares, ``(layers, heads, hops, 2)``."""
        return wilson(self.follows, self.counts)


def ablate_heads(model: LabModel, sequences: Sequences, *, to: Replacement = "mean") -> Ablation:
    """Answers without each head in turn, its output replaced at all tokens.

    Args:
        model: The model.
        sequences: The questions.
        to: ``mean``: what the head gives at the same position on average over these sequences; ``zero``: nothing.
    """
    if to not in ("mean", "zero"):
        raise ConfigError(f"to is {to!r}: give mean or zero")
    layers = model.config.layers
    sums = _collect(model, sequences.tokens, lambda outputs: outputs.sum(1))
    means = torch.stack(sums).sum(0) / len(sequences)  # (layers, n, heads, d)
    if to == "zero":
        means = torch.zeros_like(means)

    def run(rows: slice) -> Tensor:
        tokens, answers = _move(model, sequences.tokens[rows], sequences.answers[rows])
        found = []
        for layer in range(layers):
            for head in range(model.config.heads):
                instead = means[layer, :, head]
                found.append(_answer_with(model, tokens, layer, head, instead) == answers)
        return torch.stack(found).cpu()

    parts = _by_rows(model, sequences, run)
    after = torch.cat(parts, -1).view(layers, model.config.heads, -1)
    return Ablation(to, sequences.hops, solved_by(model, sequences), after)


def patch_heads(model: LabModel, sequences: Sequences, donors: Sequences) -> Patching:
    """Answers with each head's output at all tokens taken from another input.

    Only pairs count that the model solves both, with different answers.

    Args:
        model: The model.
        sequences: The questions.
        donors: As many others, each with another answer; see :mod:`wherewhat.lab.multihop.interventions`.
    """
    if sequences.tokens.shape != donors.tokens.shape:
        raise ConfigError(
            f"donors {tuple(donors.tokens.shape)} must be as many and as long as sequences "
            f"{tuple(sequences.tokens.shape)}"
        )
    usable = solved_by(model, sequences) & solved_by(model, donors) & (sequences.answers != donors.answers)
    if not bool(usable.any()):
        raise MeasureError(f"none of {len(sequences)} pairs of inputs is solved: there is nothing to patch yet")
    sequences, donors = (x.select(usable.nonzero()[:, 0]) for x in (sequences, donors))
    heads = model.config.heads

    def run(rows: slice) -> Tensor:
        tokens, answers = _move(model, sequences.tokens[rows], sequences.answers[rows])
        theirs, their_answers = _move(model, donors.tokens[rows], donors.answers[rows])
        outputs = _outputs(model, theirs)
        found = []
        for layer in range(model.config.layers):
            for head in range(heads):
                said = _answer_with(model, tokens, layer, head, outputs[layer, :, :, head])
                found.append(torch.stack([said == their_answers, said == answers]))
        return torch.stack(found, 1).cpu()

    said = torch.cat(_by_rows(model, sequences, run), -1).double()  # (2, layers · heads, count)
    numbers = sorted(set(sequences.hops.tolist()))
    which = (sequences.hops[:, None] == torch.tensor(numbers)).double()
    follows, stays = (said @ which).long().view(2, -1, heads, len(numbers))
    return Patching(tuple(numbers), which.sum(0).long(), follows, stays)


def _answer_with(model: LabModel, tokens: Tensor, layer: int, head: int, instead: Tensor) -> Tensor:
    """Answers ``(batch,)`` with one head's output replaced by ``instead`` ``(batch or none, n, d)``."""

    def edit(index: int, attended: Tensor) -> Tensor | None:
        if index != layer:
            return None
        changed = attended.clone()
        changed[:, :, head] = instead
        return changed

    logits: Tensor = model(tokens, edit=edit)
    return logits.argmax(-1)


def _outputs(model: LabModel, tokens: Tensor) -> Tensor:
    """What attention gives before the output projection, ``(layers, batch, n, heads, d)``."""
    found: list[Tensor] = []
    model(tokens, edit=lambda layer, attended: found.append(attended))
    return torch.stack(found)


def _collect(model: LabModel, tokens: Tensor, reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    device, n = model.embedding.device, tokens.shape[1]
    model.places(n)  # once, before threads ask for it
    parts = rows_in_parts(len(tokens), n, device)
    return in_parts(lambda rows: reduce(_outputs(model, tokens[rows].to(device))), parts, device)


def _by_rows(model: LabModel, sequences: Sequences, run: Callable[[slice], Tensor]) -> list[Tensor]:
    device, n = model.embedding.device, sequences.tokens.shape[1]
    return in_parts(run, rows_in_parts(len(sequences), n, device), device)


def _move(model: LabModel, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    return tokens.to(model.embedding.device), answers.to(model.embedding.device)
