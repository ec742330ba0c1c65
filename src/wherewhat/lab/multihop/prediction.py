"""From a trained head's frequencies to the length at which it fails, beside the accuracy that is measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.lab.constructions.failure_length import head_failure_lengths
from wherewhat.lab.model import LabModel
from wherewhat.lab.tasks.task import Task

_ADDED = 48
"""Tokens added in front of the inputs that heads are looked at on, so that there are contents to go by."""

_DOES_IT = 0.8
"""Share of inputs on which a head must put most of its weight on the right key to count as doing the hop."""


@dataclass(frozen=True)
class HopHead:
    """A head that does the first hop, and where it should stop.

    Attributes:
        layer: Its layer.
        head: Its index there.
        right: Share of inputs on which its largest weight is on the key that the hop leads to.
        median: Predicted length at which it fails on half of the inputs; infinite if beyond what was looked at.
        surviving: Predicted share of inputs on which it still has half of its weight there, ``(lengths,)``.
    """

    layer: int
    head: int
    right: float
    median: float
    surviving: Tensor


@torch.no_grad()
def predict_hop_heads(
    model: LabModel, task: Task, lengths: Sequence[int], *, count: int = 96, seed: int = 2
) -> list[HopHead]:
    """Heads that do the first hop on one-hop inputs, with the lengths at which their frequencies let them fail.

    The prediction is made from inputs a few dozen tokens longer than those trained on: keys in front of those are
    taken to be like the ones that are there, moved to their distance.

    Args:
        model: A trained model with rotation.
        task: Its task.
        lengths: Lengths to predict survival at.
        count: Inputs.
        seed: Seed of the inputs.
    """
    sequences = task.sample(count, seed=seed, hops=1, extra=_ADDED)
    right = sequences.path[:, 1]
    device = model.embedding.device
    found = []
    for attention in model.attention(sequences.tokens.to(device)):
        weights = attention.pattern(slice(attention.n - 1, attention.n))[:, :, 0]  # (inputs, heads, keys)
        hits = (weights.argmax(-1).cpu() == right[:, None]).double().mean(0)
        if not bool((hits >= _DOES_IT).any()):
            continue
        # Added tokens stand in front of the target window: those are what further ones will be like.
        failures = head_failure_lengths(attention, right, like=slice(0, _ADDED), longest=max(*lengths, attention.n))
        for head in (hits >= _DOES_IT).nonzero()[:, 0].tolist():
            surviving = torch.stack([failures.surviving(n)[head] for n in lengths])
            found.append(
                HopHead(attention.layer, head, float(hits[head]), float(failures.median[head]), surviving.cpu())
            )
    return found
