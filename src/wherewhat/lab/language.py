"""Train the small model on bytes of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.config import LabConfig, Training, at_least
from wherewhat.lab.model import LabModel
from wherewhat.lab.steps import batch_order, derived_seed
from wherewhat.lab.training import Record, digest, find_device, identify, run_training
from wherewhat.options import option
from wherewhat.progress import Progress

VOCABULARY = 256
"""Bytes are tokens."""


@dataclass(frozen=True)
class LanguageConfig(Training):
    """How a laboratory model is trained on text."""

    steps: int = option(5000, "training steps")
    batch: int = option(128, "sequences of a step")
    learning_rate: float = option(1e-3, "learning rate after the warm-up")
    warmup: int = option(200, "steps over which the learning rate rises from 0; afterwards it falls to 0 as a cosine")
    beta1: float = option(0.9, "AdamW's decay of the gradient's mean")
    beta2: float = option(0.95, "AdamW's decay of the gradient's square")
    weight_decay: float = option(0.1, "AdamW's weight decay, of all weights")
    data_seed: int = option(0, "seed of the order of the text")
    seed: int = option(0, "seed of what training itself draws; nothing so far")
    context: int = option(512, "tokens that a sequence gives the model")
    clip: float | None = option(1.0, "length that the gradient is cut down to; none for any")
    precision: Literal["bfloat16", "float32"] = option("bfloat16", "products; weights and sums are float32")
    compile: bool = option(True, "fuse small kernels by torch.compile, on a GPU")

    def __post_init__(self) -> None:
        """Refuse values that train nothing."""
        super().__post_init__()
        at_least("context", self.context, 1)
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"clip is {self.clip}: give a positive number, or none")

    @property
    def cosine(self) -> bool:
        """Whether the learning rate falls along a cosine, in place of a line."""
        return True

    @property
    def half(self) -> bool:
        """Whether products, though not weights and sums, are bfloat16."""
        return self.precision == "bfloat16"

    @property
    def fused(self) -> bool:
        """Whether small GPU kernels are fused by ``torch.compile``."""
        return self.compile

    @property
    def longest_gradient(self) -> float | None:
        """Length that the gradient of all weights together is cut down to; None for any."""
        return self.clip


def batch_starts(config: LanguageConfig, length: int) -> Tensor:
    """First token of every sequence of every step, ``(steps, batch)``; the same for all models with one ``data_seed``.

    The text is cut into pieces as long as the context. Each epoch reads all of them, in an order of its own and cut at
    places of its own, so that a sequence begins anywhere.

    Args:
        config: How to train.
        length: Tokens of the text.
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


def train_language(
    model_config: LabConfig,
    config: LanguageConfig,
    text: Tensor,
    *,
    record: Record | None = None,
    record_at: Sequence[int] = (),
    directory: Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
) -> LabModel:
    """Train a model to tell each next byte of a text.

    On one machine the weights are the same bit for bit whenever options are, also if the process was killed in between
    and started again with the same directory. On a CPU the number of threads must be the same too, and on a GPU this
    holds for bfloat16: float32's attention may be summed up in another order from run to run.

    Args:
        model_config: The model. Its vocabulary is that of bytes, and it is trained without dropout, whatever it says.
        config: How to train.
        text: The text, ``(length,)`` uint8.
        record: Called with the steps done and the model, whose weights are float32, without gradients: before the
            first step, after those of ``record_at``, and at the end. After a resumption it may be called again for a
            step it has seen, with the same weights.
        record_at: Numbers of steps, such as those of :func:`recording_steps`.
        directory: Folder for the state and, at the end, the model; what it holds of the same training is gone on with.
            None to keep nothing.
        progress: Who is told how far it is.
        device: cpu, cuda or cuda:N.

    Returns:
        The trained model, on the device.
    """
    place = find_device(device)
    if text.ndim != 1 or text.dtype != torch.uint8:
        raise ConfigError(
            f"text is {text.dtype} of shape {tuple(text.shape)}: give its bytes, uint8 of shape (length,)"
        )
    order = batch_starts(config, len(text))
    model_config = replace(model_config, vocabulary=VOCABULARY, dropout=0.0)
    return run_training(
        model_config,
        config,
        windows(text.to(place), config.context),
        None,
        identity=identify(model_config, config, text=digest(text.cpu())),
        recorded=frozenset(record_at),
        order=order,
        record=record,
        directory=directory,
        progress=progress,
        device=place,
    )


def windows(text: Tensor, context: int) -> Tensor:
    """Every sequence there is, ``(length - context, context + 1)``, with the token after it: a view, not a copy."""
    return text.unfold(0, context + 1, 1)
