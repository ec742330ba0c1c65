"""Training of a laboratory model on a task: from two configs to weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from wherewhat.errors import ConfigError
from wherewhat.multihop.config import LabConfig, TrainConfig
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.tasks import Sequences, Task
from wherewhat.multihop.training import (
    MODEL_FILE,
    STATE_FILE,
    Record,
    digest,
    find_device,
    identify,
    run_training,
)
from wherewhat.pipeline.progress import Progress

__all__ = ["MODEL_FILE", "STATE_FILE", "Record", "train"]


def train(
    task: Task,
    model_config: LabConfig,
    train_config: TrainConfig,
    *,
    record: Record | None = None,
    directory: Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
    sequences: Sequences | None = None,
) -> LabModel:
    """Train a model on the last token of a task's sequences.

    On a CPU the weights are the same bit for bit whenever seeds, options and the number of threads are, also if the
    process was killed in between and started again with the same directory. On a GPU a whole step is one recorded
    graph, and the sums in it may be rounded in another order from run to run.

    Args:
        task: The task; its vocabulary is the model's.
        model_config: The model; its ``vocabulary`` is replaced by the task's.
        train_config: How to train.
        record: Called before the first step, after every ``record_every`` steps and at the end, without gradients.
            After a resumption it may be called again for a step it has seen, with the same weights.
        directory: Folder for the state and, at the end, the model; what it holds of the same training is gone on with.
            None to keep nothing.
        progress: Who is told how far it is.
        device: cpu, cuda or cuda:N.
        sequences: The training sequences, if they are drawn already: the first of the task's ``splits`` for the
            config's ``sequences`` and ``data_seed``.

    Returns:
        The trained model, on the device.

    Raises:
        ConfigError: If options do not fit, or the directory holds another training.
        LoadError: If there is no such device, or the directory's files are damaged.
        MeasureError: If the loss is not finite any more.
        StoreError: If the directory cannot be written.
    """
    place = find_device(device)
    model_config = replace(model_config, vocabulary=task.vocabulary)
    if sequences is None:
        sequences = task.splits(train_config.sequences, train_config.data_seed)[0]
    _check_fits(sequences, model_config)
    return run_training(
        model_config,
        train_config,
        sequences.tokens,
        sequences.answers,
        identity=identify(model_config, train_config, sequences=digest(sequences.tokens, sequences.answers)),
        recorded=range(0, train_config.steps, train_config.record_every),
        record=record,
        directory=directory,
        progress=progress,
        device=place,
    )


def _check_fits(sequences: Sequences, model_config: LabConfig) -> None:
    """Refuse sequences that are not ones of the model's vocabulary.

    Raises:
        ConfigError: If they are not.
    """
    tokens, answers = sequences.tokens, sequences.answers
    low, high = int(min(tokens.min(), answers.min())), int(max(tokens.max(), answers.max()))
    if low < 0 or high >= model_config.vocabulary:
        raise ConfigError(f"sequences hold tokens {low} to {high}: the vocabulary has {model_config.vocabulary}")
