"""What every training step uses, as functions of the seed and the step alone: nothing has to be remembered."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from wherewhat.multihop.config import Training


def learning_rates(config: Training) -> Tensor:
    """Learning rate of every step, ``(steps,)`` float64: up from 0 over the warm-up, down to 0 at the end.

    It rises linearly, and falls linearly or, if the config says so, along a cosine.
    """
    step = torch.arange(config.steps, dtype=torch.float64)
    rising = step / max(1, config.warmup)
    falling = (config.steps - step) / max(1, config.steps - config.warmup)
    if config.cosine:
        falling = (1 - (torch.pi * falling).cos()) / 2
    return config.learning_rate * torch.where(step < config.warmup, rising, falling)


def batch_order(config: Training, count: int) -> Tensor:
    """Which of ``count`` sequences every step uses, ``(steps, batch)``: one permutation of all after the other."""
    needed = config.steps * config.batch
    epochs = [
        torch.randperm(count, generator=torch.Generator().manual_seed(derived_seed(config.seed, "order", epoch)))
        for epoch in range(-(-needed // count))
    ]
    return torch.cat(epochs)[:needed].view(config.steps, config.batch)


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed of its own for each use, the same on every machine."""
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
