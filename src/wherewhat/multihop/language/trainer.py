"""Training of a laboratory model on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.language.config import VOCABULARY, LanguageConfig
from wherewhat.multihop.language.order import batch_starts
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.training import Record, digest, find_device, identify, run_training
from wherewhat.pipeline.progress import Progress


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

    Raises:
        ConfigError: If options do not fit, or the directory holds another training.
        LoadError: If there is no such device, or the directory's files are damaged.
        MeasureError: If the loss is not finite any more.
        StoreError: If the directory cannot be written.
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
