"""Training of a laboratory model: from a task and two configs to weights, stopped and resumed at will."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measure.options import config_values
from wherewhat.models.placement import resolve_device
from wherewhat.multihop.board import Board
from wherewhat.multihop.checkpoint import (
    TrainState,
    load_model,
    load_state,
    read_identity,
    save_model,
    save_state,
)
from wherewhat.multihop.config import LabConfig, TrainConfig
from wherewhat.multihop.gpu_steps import GpuSteps
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.schedule import learning_rates
from wherewhat.multihop.steps import CpuSteps, Steps
from wherewhat.multihop.tasks import Sequences, Task
from wherewhat.pipeline.progress import Progress, Silent
from wherewhat.store.atomic import make_folder, remove, remove_temporaries

Record = Callable[[int, LabModel], None]
"""Told the number of steps done, with the model as it is then."""

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"

_HARMLESS = ("record_every", "save_every")
"""Options that change nothing about the weights."""


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
    progress = Silent() if progress is None else progress
    place = resolve_device(device)
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"laboratory models are not trained on {device}: use cpu or cuda")
    model_config = replace(model_config, vocabulary=task.vocabulary)
    if sequences is None:
        sequences = task.splits(train_config.sequences, train_config.data_seed)[0]
    identity = _identify(model_config, train_config, sequences)
    state: TrainState | None = None
    if directory is not None:
        make_folder(directory)
        remove_temporaries(directory)
        if (directory / MODEL_FILE).exists():
            _check_same(read_identity(directory / MODEL_FILE) or {}, identity, directory)
            progress.say(f"{directory} holds the trained model already")
            return load_model(directory / MODEL_FILE, device=str(place))
        if (directory / STATE_FILE).exists():
            state = load_state(directory / STATE_FILE)
            _check_same(state.identity, identity, directory)
            progress.say(f"going on after step {state.step:,} of {train_config.steps:,}")
    model = LabModel(model_config)
    if state is not None:
        model.load_state_dict(dict(state.weights))
    model.to(place)
    threads = _count_threads(train_config, state)
    steps: Steps
    if place.type == "cuda":
        steps = GpuSteps(model, sequences.tokens, sequences.answers, train_config, state=state)
    else:
        steps = CpuSteps(model, sequences.tokens, sequences.answers, train_config, threads=threads, state=state)
    try:
        _run(model, steps, train_config, identity, threads, record, directory, progress, state)
    finally:
        steps.close()
    if directory is not None:
        save_model(model, directory / MODEL_FILE, identity=identity)
        remove(directory / STATE_FILE)
    return model


def _run(
    model: LabModel,
    steps: Steps,
    config: TrainConfig,
    identity: Mapping[str, Any],
    threads: int,
    record: Record | None,
    directory: Path | None,
    progress: Progress,
    state: TrainState | None,
) -> None:
    """All steps that are left, with records, states and curves in between."""
    first = 0 if state is None else state.step
    rates = learning_rates(config).tolist()
    board = Board(None if directory is None else directory / "tensorboard", first=first)

    def show(done: int) -> None:
        if record is not None:
            with torch.no_grad():
                steps.record(lambda: record(done, model))

    try:
        if state is None:
            show(0)
        for step in progress.track(range(first, config.steps), "training"):
            steps.run(step)
            done = step + 1
            if done % config.record_every == 0 or done == config.steps:
                loss = float(steps.losses[max(first, done - config.record_every) : done].mean())
                if not math.isfinite(loss):
                    raise MeasureError(f"the loss is {loss} at step {done}: try a smaller learning_rate")
                board.add(done, loss=loss, learning_rate=rates[step])
                show(done)
            if directory is not None and done % config.save_every == 0 and done < config.steps:
                mean, square = steps.moments()
                found = TrainState(done, threads, identity, model.state_dict(), mean, square)
                save_state(found, directory / STATE_FILE)
    finally:
        board.close()


def _count_threads(config: TrainConfig, state: TrainState | None) -> int:
    """Parts of a batch; a resumed training keeps their number, which decides the order of sums."""
    if state is not None:
        return state.threads
    wanted = torch.get_num_threads() if config.threads is None else config.threads
    return min(wanted, config.batch)


def _identify(model_config: LabConfig, train_config: TrainConfig, sequences: Sequences) -> dict[str, Any]:
    """What is trained, on what and how, as plain values: two trainings with the same give the same weights.

    Raises:
        ConfigError: If the sequences are not ones of the model's vocabulary.
    """
    tokens, answers = sequences.tokens, sequences.answers
    low, high = int(min(tokens.min(), answers.min())), int(max(tokens.max(), answers.max()))
    if low < 0 or high >= model_config.vocabulary:
        raise ConfigError(f"sequences hold tokens {low} to {high}: the vocabulary has {model_config.vocabulary}")
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (tokens, answers):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().data)
    options = {name: value for name, value in config_values(train_config).items() if name not in _HARMLESS}
    return {"model": config_values(model_config), "training": options, "sequences": digest.hexdigest()}


def _check_same(there: Mapping[str, Any], here: Mapping[str, Any], directory: Path) -> None:
    """Refuse to go on with another training than the one asked for.

    Raises:
        ConfigError: With the first thing that differs.
    """
    for part, wanted in here.items():
        found = there.get(part)
        if found == wanted:
            continue
        what = f"other {part}"
        if isinstance(found, Mapping) and isinstance(wanted, Mapping):
            name = next(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
            what = f"{name}={found.get(name)!r}, not {wanted.get(name)!r}"
        raise ConfigError(f"{directory} holds a training with {what}: choose another directory, or remove it")
