"""Ablation and patching of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import map_batches, solved_by
from wherewhat.lab.tasks.task import Sequences


def other_sequences(sequences: Sequences, *, seed: int = 0) -> Sequences:
    """Return, for each sequence, another one with the same number of hops and another answer.

    Args:
        sequences: The sequences, among which the others are found.
        seed: Seed of the pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.empty_like(sequences.hops)
    relabelled = torch.randperm(int(sequences.answers.max()) + 1, generator=generator)
    for hops in sorted(set(sequences.hops.tolist())):
        rows = (sequences.hops == hops).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        # Sorted by answer, a row and the row half the list later differ unless one answer has more than half.
        rows = rows[relabelled[sequences.answers[rows]].argsort(stable=True)]
        chosen[rows] = rows.roll(-(len(rows) // 2))
    if bool((sequences.answers == sequences.answers[chosen]).any()):
        raise ConfigError(
            f"{len(sequences)} sequences are too few, or too alike, to give each another one with as many hops and "
            "another answer: give more"
        )
    return sequences.select(chosen)


Replacement = Literal["mean", "zero"]


@dataclass(frozen=True)
class Ablation:
    """Answers without each head.

    Attributes:
        to: Replacement of its output.
        hops: Number of hops of each question, ``(count,)``.
        before: Whether the model answers correctly, ``(count,)`` bool.
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


@dataclass(frozen=True)
class Patching:
    """Answers with each head's output taken from another input with another answer.

    Attributes:
        hops: The numbers of hops.
        counts: Pairs of solved inputs of each, ``(hops,)``.
        follows: Answers that became the other input's, ``(layers, heads, hops)``.
        stays: Answers that did not change, ``(layers, heads, hops)``.
    """

    hops: tuple[int, ...]
    counts: Tensor
    follows: Tensor
    stays: Tensor

    @property
    def shares(self) -> Tensor:
        """Share of answers that follow, ``(layers, heads, hops)`` float64."""
        return self.follows.double() / self.counts


def ablate_heads(model: LabModel, sequences: Sequences, *, to: Replacement = "mean") -> Ablation:
    """Return the answers without each head in turn, its output replaced at all tokens.

    Args:
        model: The model.
        sequences: The questions.
        to: ``mean``: the head's mean output at the same position over these sequences; ``zero``: zeros.
    """
    if to not in ("mean", "zero"):
        raise ConfigError(f"to is {to!r}: give mean or zero")
    layers, heads = model.config.layers, model.config.heads
    count, n = sequences.tokens.shape
    sums = map_batches(lambda rows: _outputs(model, _on_device(model, sequences.tokens[rows])).sum(1), count, n, model)
    means = torch.stack(sums).sum(0) / count  # (layers, n, heads, d)
    if to == "zero":
        means = torch.zeros_like(means)

    def run(rows: slice) -> Tensor:
        tokens, answers = (_on_device(model, x[rows]) for x in (sequences.tokens, sequences.answers))
        found = [
            _answers_with(model, tokens, layer, head, means[layer, :, head]) == answers
            for layer in range(layers)
            for head in range(heads)
        ]
        return torch.stack(found).cpu()

    after = torch.cat(map_batches(run, count, n, model), -1).view(layers, heads, -1)
    return Ablation(to, sequences.hops, solved_by(model, sequences), after)


def patch_heads(model: LabModel, sequences: Sequences, sources: Sequences) -> Patching:
    """Return the answers with each head's output at all tokens taken from another input.

    Only pairs count of which the model solves both, and whose answers differ.

    Args:
        model: The model.
        sequences: The questions.
        sources: The other inputs, one for each question; see :func:`other_sequences`.
    """
    if sequences.tokens.shape != sources.tokens.shape:
        raise ConfigError(
            f"sources {tuple(sources.tokens.shape)} must be as many and as long as sequences "
            f"{tuple(sequences.tokens.shape)}"
        )
    usable = solved_by(model, sequences) & solved_by(model, sources) & (sequences.answers != sources.answers)
    if not bool(usable.any()):
        raise MeasureError(f"none of {len(sequences)} pairs of inputs is solved: there is nothing to patch yet")
    sequences, sources = (x.select(usable.nonzero()[:, 0]) for x in (sequences, sources))
    heads = model.config.heads

    def run(rows: slice) -> Tensor:
        tokens, answers = (_on_device(model, x[rows]) for x in (sequences.tokens, sequences.answers))
        source_tokens, source_answers = (_on_device(model, x[rows]) for x in (sources.tokens, sources.answers))
        outputs = _outputs(model, source_tokens)
        found = []
        for layer in range(model.config.layers):
            for head in range(heads):
                given = _answers_with(model, tokens, layer, head, outputs[layer, :, :, head])
                found.append(torch.stack([given == source_answers, given == answers]))
        return torch.stack(found, 1).cpu()

    count, n = sequences.tokens.shape
    given = torch.cat(map_batches(run, count, n, model), -1).double()  # (2, layers · heads, count)
    numbers = sorted(set(sequences.hops.tolist()))
    which = (sequences.hops[:, None] == torch.tensor(numbers)).double()
    follows, stays = (given @ which).long().view(2, -1, heads, len(numbers))
    return Patching(tuple(numbers), which.sum(0).long(), follows, stays)


def _answers_with(model: LabModel, tokens: Tensor, layer: int, head: int, output: Tensor) -> Tensor:
    """Return the answers ``(batch,)`` with one head's output replaced by ``output`` ``(batch or none, n, d)``."""

    def edit(index: int, attended: Tensor) -> Tensor | None:
        if index != layer:
            return None
        changed = attended.clone()
        changed[:, :, head] = output
        return changed

    logits: Tensor = model(tokens, edit=edit)
    return logits.argmax(-1)


def _outputs(model: LabModel, tokens: Tensor) -> Tensor:
    """Return the heads' outputs before the output projection, ``(layers, batch, n, heads, d)``."""
    found: list[Tensor] = []
    model(tokens, edit=lambda layer, attended: found.append(attended))
    return torch.stack(found)


def _on_device(model: LabModel, x: Tensor) -> Tensor:
    return x.to(model.embedding.device)
