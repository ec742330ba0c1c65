"""Train the small model on bytes of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.options import check_integer, option
from wherewhat.progress import Progress
from wherewhat_lab.config import Arithmetic, LabConfig, Training
from wherewhat_lab.model import LabModel
from wherewhat_lab.steps import batch_order, derived_seed
from wherewhat_lab.training import Record, digest, find_device, identify, run_training

VOCABULARY = 256
"""Bytes are tokens."""


@dataclass(frozen=True)
class LanguageConfig(Training):
    """Options of training on text."""

    cosine: ClassVar[bool] = True

    steps: int = option(5000, "training steps")
    batch: int = option(128, "sequences of a step")
    learning_rate: float = option(1e-3, "learning rate after the warm-up")
    warmup: int = option(200, "steps over which the learning rate rises from 0; afterwards it falls to 0 as a cosine")
    beta1: float = option(0.9, "AdamW's decay rate of the first moment")
    beta2: float = option(0.95, "AdamW's decay rate of the second moment")
    weight_decay: float = option(0.1, "AdamW's weight decay, of all weights")
    data_seed: int = option(0, "seed of the order of the text")
    seed: int = option(0, "seed of the training; without dropout it has no effect")
    context: int = option(512, "input tokens of a sequence")
    clip: float | None = option(1.0, "largest norm of the gradient; none for no clipping")
    precision: Literal["bfloat16", "float32"] = option("bfloat16", "products; weights and sums are float32")
    compile: bool = option(True, "fuse small kernels with torch.compile, on a GPU")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_integer("context", self.context, least=1)
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"clip is {self.clip}: give a positive number, or none")

    @property
    def arithmetic(self) -> Arithmetic:
        """How the steps compute."""
        return Arithmetic(half=self.precision == "bfloat16", fused=self.compile, clip_norm=self.clip)


def batch_starts(config: LanguageConfig, length: int) -> Tensor:
    """Return the first token of every sequence of every step, ``(steps, batch)``; it depends on ``data_seed`` only.

    The text is cut into pieces as long as the context. Each epoch reads all pieces, with a random order and a random
    offset of the cuts, so that sequences start at any position.

    Args:
        config: Options of the training.
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
    """Return about ``count`` logarithmically spaced steps, including 0 and ``steps``; all steps if there are fewer.

    All of the first steps are included, since the spacing is at least one step.
    """
    if count < 2 or steps < 1:
        raise ConfigError(f"{count} records of {steps} steps: give 2 records or more, of 1 step or more")
    recorded: set[int] = set()
    points = count - 1
    while len(recorded) < min(count, steps + 1):  # rounding merges points, so that more are needed
        spaced = torch.logspace(0, math.log10(steps), points, dtype=torch.float64)
        recorded = {0, steps, *spaced.round().long().tolist()}
        points += 1
    return sorted(recorded)


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
    """Train a model to predict each next byte of a text.

    On one machine the same options give bitwise identical weights, also if the process was killed and resumed with the
    same directory. On a CPU this requires the same number of threads. On a GPU it holds for bfloat16; the order of
    summation in float32 attention may differ from run to run.

    Args:
        model_config: The model; its vocabulary is set to that of bytes and its dropout to 0.
        config: Options of the training.
        text: The text, ``(length,)`` uint8.
        record: Called with the steps done and the model, whose weights are float32, without gradients: before the
            first step, after those of ``record_at``, and at the end. A resumed training may call it again for an
            earlier step, with the same weights.
        record_at: Numbers of steps, such as those of :func:`recording_steps`.
        directory: Folder for the state and, at the end, the model. A training that it holds is resumed. None to keep
            nothing.
        progress: Progress callback.
        device: cpu, cuda or cuda:N.

    Returns:
        The trained model, on the device.
    """
    on = find_device(device)
    if text.ndim != 1 or text.dtype != torch.uint8:
        raise ConfigError(
            f"text is {text.dtype} of shape {tuple(text.shape)}: give its bytes, uint8 of shape (length,)"
        )
    order = batch_starts(config, len(text))
    model_config = replace(model_config, vocabulary=VOCABULARY, dropout=0.0)
    return run_training(
        model_config,
        config,
        windows(text.to(on), config.context),
        None,
        identity=identify(model_config, config, text=digest(text.cpu())),
        recorded=frozenset(record_at),
        order=order,
        record=record,
        directory=directory,
        progress=progress,
        device=on,
    )


def windows(text: Tensor, context: int) -> Tensor:
    """Return all sequences with the token after each, ``(length - context, context + 1)``, as a view."""
    return text.unfold(0, context + 1, 1)
