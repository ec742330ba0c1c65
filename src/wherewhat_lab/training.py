"""A training run that can be interrupted and resumed with the same bytes, and its TensorBoard curves."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Container, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, LoadError, MeasureError
from wherewhat.files import make_folder, remove, remove_temporaries
from wherewhat.models.loaded import resolve_device
from wherewhat.numerics import new_process_settings
from wherewhat.options import config_values
from wherewhat.progress import Progress, Silent
from wherewhat_lab.checkpoints import TrainState, load_model, load_state, read_identity, save_model, save_state
from wherewhat_lab.config import LabConfig, Training
from wherewhat_lab.model import LabModel
from wherewhat_lab.steps import CpuSteps, GpuSteps, Steps, learning_rates

Record = Callable[[int, LabModel], None]
"""Function called with the number of finished steps and the model."""

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"

_NO_EFFECT = ("record_every", "save_every")
"""Options that have no effect on the weights."""


def find_device(device: str) -> torch.device:
    """Return the device of a training."""
    torch_device = resolve_device(device)
    if torch_device.type not in ("cpu", "cuda"):
        raise ConfigError(f"laboratory models are not trained on {device}: use cpu or cuda")
    return torch_device


def identify(model_config: LabConfig, config: Training, **data: str) -> dict[str, Any]:
    """Return model, options and digests of the data of a training as plain values, which determine the weights."""
    options = {name: value for name, value in config_values(config).items() if name not in _NO_EFFECT}
    return {"model": config_values(model_config), "training": options, **data}


def digest(*tensors: Tensor) -> str:
    """Return a hash of tensors and their shapes."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(str(tuple(tensor.shape)).encode())
        hasher.update(tensor.contiguous().numpy().data)
    return hasher.hexdigest()


def run_training(
    model_config: LabConfig,
    config: Training,
    tokens: Tensor,
    answers: Tensor | None,
    *,
    identity: Mapping[str, Any],
    recorded: Container[int],
    order: Tensor | None = None,
    record: Record | None = None,
    directory: Path | None = None,
    progress: Progress | None = None,
    device: torch.device,
) -> LabModel:
    """Train a model on sequences.

    Args:
        model_config: The model.
        config: Options of the training.
        tokens: Training sequences, ``(count, n)``.
        answers: Their answers, ``(count,)``; None to predict every next token.
        identity: Result of :func:`identify`.
        recorded: Steps after which ``record`` is called, besides the last.
        order: Sequences of every step, ``(steps, batch)``; those of ``batch_order`` by default.
        record: Called before the first step, after the steps of ``recorded`` and at the end, without gradients.
        directory: Folder for the state and, at the end, the model; None to keep nothing.
        progress: Progress callback.
        device: Result of :func:`find_device`.

    Returns:
        The trained model, on the device.
    """
    progress = Silent() if progress is None else progress
    state: TrainState | None = None
    if directory is not None:
        make_folder(directory)
        remove_temporaries(directory)
        trained = load_intact(directory / MODEL_FILE, progress, device=str(device))
        if trained is not None:
            _check_same(read_identity(directory / MODEL_FILE) or {}, identity, directory)
            progress.say(f"{directory} holds the trained model already")
            return trained
        if (directory / STATE_FILE).exists():
            state = load_state(directory / STATE_FILE)
            _check_same(state.identity, identity, directory)
            progress.say(f"resuming after step {state.step:,} of {config.steps:,}")
    model = LabModel(model_config)
    if state is not None:
        model.load_state_dict(dict(state.weights))
    model.to(device)
    # A resumed training keeps the number of parts of a batch, which affects rounding.
    threads = min(config.threads or torch.get_num_threads(), config.batch) if state is None else state.threads
    steps: Steps
    if device.type == "cuda":
        steps = GpuSteps(model, tokens, answers, config, state=state, order=order)
    else:
        steps = CpuSteps(model, tokens, answers, config, threads=threads, state=state, order=order)

    def call_record(done: int) -> None:
        if record is not None:
            with torch.no_grad():
                steps.record(lambda: record(done, model))

    first = logged = 0 if state is None else state.step
    rates = learning_rates(config).tolist()
    curves = _event_writer(directory, first)
    dtypes = (torch.bfloat16,) if config.arithmetic.half else ()
    with closing(steps), closing(curves) if curves else nullcontext(), new_process_settings(dtypes):
        if state is None:
            call_record(0)
        for step in progress.track(range(first, config.steps), "training"):
            steps.run(step)
            done = step + 1
            if done in recorded or done == config.steps:
                loss = float(steps.losses[logged:done].mean())
                logged = done
                if not math.isfinite(loss):
                    raise MeasureError(f"the loss is {loss} at step {done}: try a smaller learning_rate")
                if curves:
                    curves.add_scalar("loss", loss, done)
                    curves.add_scalar("learning_rate", rates[step], done)
                call_record(done)
            if directory is not None and done % config.save_every == 0 and done < config.steps:
                snapshot = TrainState(done, threads, identity, model.state_dict(), *steps.moments())
                save_state(snapshot, directory / STATE_FILE)
    if directory is not None:
        save_model(model, directory / MODEL_FILE, identity=identity)
        remove(directory / STATE_FILE)
    return model


def load_intact(path: Path, progress: Progress, *, device: str = "cpu") -> LabModel | None:
    """Return the model of a file; None without one. A damaged file is removed, one of another kind refused."""
    if os.path.lexists(path):
        try:
            return load_model(path, device=device)
        except LoadError as error:
            if error.__cause__ is None:
                raise
            progress.say(f"{error}; training again")
            remove(path)
    return None


def _event_writer(directory: Path | None, first: int) -> Any:
    """Return a writer of TensorBoard curves after ``first`` steps; None without a folder or without TensorBoard."""
    if directory is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # Earlier events of later steps are hidden.
    return SummaryWriter(str(directory / "tensorboard"), purge_step=first + 1)


def _check_same(there: Mapping[str, Any], here: Mapping[str, Any], directory: Path) -> None:
    """Check that a folder holds the requested training and not another one."""
    for part, wanted in here.items():
        stored = there.get(part)
        if stored == wanted:
            continue
        what = f"other {part}"
        if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
            name = next(name for name in {**stored, **wanted} if stored.get(name) != wanted.get(name))
            what = f"{name}={stored.get(name)!r}, not {wanted.get(name)!r}"
        raise ConfigError(f"{directory} holds a training with {what}: choose another directory, or remove it")
