"""Which part of the text every step reads, and after which steps a model is looked at."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.language.config import LanguageConfig
from wherewhat.multihop.schedule import batch_order, derived_seed


def batch_starts(config: LanguageConfig, length: int) -> Tensor:
    """First token of every sequence of every step, ``(steps, batch)``; the same for all models with one ``data_seed``.

    The text is cut into pieces as long as the context. Each epoch reads all of them, in an order of its own and cut at
    places of its own, so that a sequence begins anywhere.

    Args:
        config: How to train.
        length: Tokens of the text.

    Raises:
        ConfigError: If the text is too short for one sequence and the token after it.
    """
    spare = length - 1 - config.context
    if spare < 0:
        raise ConfigError(
            f"a text of {length} bytes is too short for a context of {config.context}: give {config.context + 1}"
        )
    shifts = min(config.context, spare + 1)
    pieces = (length - shifts) // config.context
    order = batch_order(replace(config, seed=config.data_seed), pieces).flatten()
    epochs = torch.arange(len(order)) // pieces
    generator = torch.Generator().manual_seed(derived_seed(config.data_seed, "shifts"))
    shift = torch.randint(shifts, (int(epochs[-1]) + 1,), generator=generator)
    return (order * config.context + shift[epochs]).view(config.steps, config.batch)


def recording_steps(steps: int, count: int = 40) -> list[int]:
    """About ``count`` numbers of steps, logarithmically spaced, 0 and ``steps`` among them; all if they are fewer.

    The first steps are all there, as spaces cannot be smaller than one step.

    Raises:
        ConfigError: If there are to be fewer than two.
    """
    if count < 2 or steps < 1:
        raise ConfigError(f"{count} records of {steps} steps: give 2 records or more, of 1 step or more")
    found: set[int] = set()
    points = count - 1
    while len(found) < min(count, steps + 1):  # points that fall on the same step are one: take more of them
        spaced = torch.logspace(0, math.log10(steps), points, dtype=torch.float64)
        found = {0, steps, *spaced.round().long().tolist()}
        points += 1
    return sorted(found)
