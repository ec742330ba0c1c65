"""A multi-hop study: recipe, training, recording, best and last checkpoint, and accuracy with extra tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from wherewhat.boundary import MOST_TOKENS, check_at_most, check_distinct
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import remove
from wherewhat.numerics import new_process_settings
from wherewhat.options import build_config, config_values, nearest
from wherewhat.progress import Progress, Silent
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.identity import versions
from wherewhat.runs.records import (
    RECORDS_FILE,
    StudyRun,
    TensorTable,
    open_study_run,
    read_part,
    save_table,
    study_config,
)
from wherewhat_lab.checkpoints import load_model, save_model
from wherewhat_lab.config import LabConfig, TrainConfig
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.accuracy import EXTRA, Accuracy, accuracy_by_extra, measure_accuracy
from wherewhat_lab.multihop.scores import best_step, hold_out, multihop_recorder
from wherewhat_lab.study import complete_once, complete_run
from wherewhat_lab.tasks import find_task
from wherewhat_lab.tasks.task import Sequences, SequenceTask
from wherewhat_lab.training import (
    MODEL_FILE,
    STATE_FILE,
    Record,
    digest,
    find_device,
    identify,
    load_intact,
    run_training,
)

STUDY = "multihop"
TEST = "test"
"""Part of a run directory that holds the accuracy on test sequences."""

BEST_FILE = "best.safetensors"
"""File of a run directory with the best checkpoint."""

_BEST = "best_"
"""Prefix of the best checkpoint's columns in the part :data:`TEST`."""

Checkpoint = Literal["last", "best"]
"""The model at the end, or the first one with the largest recorded accuracy, as in arXiv 2605.31558."""


def train(
    task: SequenceTask,
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

    On a CPU the same seeds, options and number of threads give bitwise identical weights, also if the process was
    killed and resumed with the same directory. On a GPU a whole step is one CUDA graph, and the order of its floating
    point sums may differ from run to run.

    Args:
        task: The task; its vocabulary is the model's.
        model_config: The model; its ``vocabulary`` is replaced by the task's.
        train_config: Options of the training.
        record: Called before the first step, after every ``record_every`` steps and at the end, without gradients.
            A resumed training may call it again for an earlier step, with the same weights.
        directory: Folder for the state and, at the end, the model. A training that it holds is resumed. None to keep
            nothing.
        progress: Progress callback.
        device: cpu, cuda or cuda:N.
        sequences: Training sequences; by default the first of the task's ``splits`` for the options ``sequences`` and
            ``data_seed``.

    Returns:
        The trained model, on the device.
    """
    on = find_device(device)
    model_config = replace(model_config, vocabulary=task.vocabulary)
    if sequences is None:
        sequences = task.splits(train_config.sequences, train_config.data_seed)[0]
    low, high = torch.cat([sequences.tokens.flatten(), sequences.answers]).aminmax()
    if low < 0 or high >= task.vocabulary:
        raise ConfigError(f"sequences hold tokens {int(low)} to {int(high)}: the vocabulary has {task.vocabulary}")
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
        device=on,
    )


_GIVEN = ("vocabulary", "seed")
"""Options that the task or the list of seeds determines."""


@dataclass(frozen=True)
class Setup:
    """One task, one model and one training.

    Attributes:
        name: Name of the task.
        task: The task.
        model: The model.
        training: Options of the training.
    """

    name: str
    task: SequenceTask
    model: LabConfig
    training: TrainConfig

    @classmethod
    def of(cls, task: str, options: Mapping[str, Any]) -> Setup:
        """Return a setup from the task's name and options of task, model and training in one mapping."""
        kinds = (find_task(task), LabConfig, TrainConfig)
        homes = {f.name: kind for kind in kinds for f in dataclasses.fields(kind) if f.name not in _GIVEN}
        by_kind: dict[type[Any], dict[str, Any]] = {kind: {} for kind in kinds}
        for name, value in options.items():
            if name not in homes:
                hint = nearest(name, sorted(homes))
                raise ConfigError(f"there is no option '{name}' of task, model or training: {hint}")
            by_kind[homes[name]][name] = value
        configs = [build_config(kind, by_kind[kind]) for kind in kinds]
        return cls(task, configs[0], replace(configs[1], vocabulary=configs[0].vocabulary), configs[2])

    def seeded(self, seed: int) -> Setup:
        """Return the setup with another seed of the initial weights, order of sequences and dropout."""
        return replace(self, model=replace(self.model, seed=seed), training=replace(self.training, seed=seed))

    def values(self) -> dict[str, Any]:
        """Return everything as plain values, for a file and for its hash."""
        return {
            "task": self.name,
            "task_options": config_values(self.task),
            "model": config_values(self.model),
            "training": config_values(self.training),
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Setup:
        """Return a setup from what :meth:`values` returned."""
        return cls(
            values["task"],
            build_config(find_task(values["task"]), values["task_options"]),
            build_config(LabConfig, values["model"]),
            build_config(TrainConfig, values["training"]),
        )


@dataclass(frozen=True)
class MultihopRecipe:
    """A multi-hop study.

    Attributes:
        tasks: Names of the tasks.
        seeds: Seeds of each.
        extra: Numbers of extra tokens with which the trained models are tested.
        extra_count: Sequences of each.
        options: Options of task, model and training, for all tasks.
        task_options: The same by name of the task; these take precedence.
        setups: One per task.
    """

    tasks: tuple[str, ...] = ("number", "letter")
    seeds: tuple[int, ...] = (0, 1, 2)
    extra: tuple[int, ...] = EXTRA
    extra_count: int = 1000
    options: Mapping[str, Any] = field(default_factory=dict)
    task_options: Mapping[str, Any] = field(default_factory=dict)
    setups: tuple[Setup, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check the values and make the setups."""
        for name in ("tasks", "seeds", "extra"):
            check_distinct(name, getattr(self, name))
        check_at_most(MOST_TOKENS, extra=self.extra, extra_count=self.extra_count)
        if not all(isinstance(own, Mapping) for own in self.task_options.values()):
            raise ConfigError("in a recipe, task_options is a table of tables")
        setups = (Setup.of(task, {**self.options, **self.task_options.get(task, {})}) for task in self.tasks)
        object.__setattr__(self, "setups", tuple(setups))


class MultihopRun(StudyRun):
    """A finished training with its last and best checkpoint, records and test."""

    @cached_property
    def setup(self) -> Setup:
        """Task, model and training."""
        return Setup.from_values(self.config)

    @property
    def seed(self) -> int:
        """Seed of the weights, the order of sequences and dropout."""
        return int(self.config["model"]["seed"])

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that the run holds: runs of earlier versions have the last one only."""
        return ("last", "best") if (self.path / BEST_FILE).exists() else ("last",)

    @property
    def best_step(self) -> int:
        """Step of the best checkpoint: the first record with the largest accuracy on held-out sequences."""
        return best_step(self.records())

    def model(self, checkpoint: Checkpoint = "last", *, device: str = "cpu") -> LabModel:
        """Return the trained model."""
        return load_model(self.path / self._named(checkpoint, MODEL_FILE, BEST_FILE), device=device)

    def test(self, checkpoint: Checkpoint = "last") -> Accuracy:
        """Return the correct answers on all test sequences, by number of hops."""
        prefix, table = self._named(checkpoint, "", _BEST), self.table(TEST)
        return Accuracy.from_table(
            {
                name.removeprefix(prefix): column
                for name, column in table.items()
                if name.startswith(_BEST) == bool(prefix)
            }
        )

    def _named(self, checkpoint: Checkpoint, last: str, best: str) -> str:
        """Return one of two names; raise an error if the run does not hold the checkpoint."""
        if checkpoint not in self.checkpoints:
            raise StoreError(
                f"{self.path} holds the last checkpoint only, as runs of earlier versions do: choose 'last', or train "
                "again in another folder"
            )
        return best if checkpoint == "best" else last

    def size(self) -> int:
        """Return the number of bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


@new_process_settings()
def train_and_record(
    setup: Setup,
    *,
    out: Path,
    device: str = "cpu",
    progress: Progress | None = None,
    scored: int = 256,
    tested: int = 1024,
) -> MultihopRun:
    """Train a model and record the scores of its heads and its accuracy during training.

    A finished run is read; an interrupted one is resumed.

    Args:
        setup: SequenceTask, model and training.
        out: Folder of run directories.
        device: cpu, cuda or cuda:N.
        progress: Progress callback.
        scored: Held-out sequences that heads are scored on.
        tested: Held-out sequences that accuracy is measured on.
    """
    progress = progress or Silent()
    # Heads are always scored along the path; runs are found again by all of these names.
    recorded = {"scored": scored, "tested": tested, "along_path": True}
    config = study_config(STUDY, **setup.values(), **recorded, device=device.partition(":")[0], versions=versions())
    name = f"multihop-{setup.name}-{setup.model.encoding}-seed{setup.model.seed}"
    run = RunDirectory.open(out, name=name, config=config)

    def complete() -> None:
        training, validation, testing = setup.task.splits(setup.training.sequences, setup.training.data_seed)
        held_out = hold_out(validation, scored=min(scored, len(validation)), tested=min(tested, len(validation)))
        kept = load_intact(run.path / BEST_FILE, progress) is not None
        if not kept:  # a training that began without it has to start from step 0
            for name in (MODEL_FILE, STATE_FILE, RECORDS_FILE):
                remove(run.path / name)
        recorder = multihop_recorder(held_out, path=run.path / RECORDS_FILE, identity=run.config_hash)

        def record_and_keep_best(step: int, model: LabModel) -> None:
            recorder(step, model)
            if best_step(recorder.records.until(step)) == step:
                save_model(model, run.path / BEST_FILE, identity={"step": step})

        def test(model: LabModel) -> TensorTable:
            best = load_model(run.path / BEST_FILE, device=str(model.embedding.device))
            tables = {prefix: measure_accuracy(net, testing).table() for prefix, net in (("", model), (_BEST, best))}
            return {f"{prefix}{name}": column for prefix, table in tables.items() for name, column in table.items()}

        complete_run(
            run,
            recorder,
            train=lambda record: train(
                setup.task,
                setup.model,
                setup.training,
                record=None if record is None and kept else record_and_keep_best,
                directory=run.path,
                progress=progress,
                device=device,
                sequences=training,
            ),
            part=TEST,
            measure=test,
            device=device,
            files=[MODEL_FILE, BEST_FILE],
        )

    complete_once(run, complete, progress=progress)
    return MultihopRun(run)


def open_run(path: Path) -> MultihopRun:
    """Open a run directory that :func:`train_and_record` finished."""
    return MultihopRun(open_study_run(path, STUDY))


_SEED = 1_000_003
"""Seed of the longer sequences, which no training uses."""


@new_process_settings()
def measure_extra(
    run: MultihopRun, extra: Sequence[int], *, count: int, checkpoint: Checkpoint = "last", device: str = "cpu"
) -> dict[int, Accuracy]:
    """Return the accuracy by number of extra tokens; each is measured once and kept as a part of the run directory.

    Args:
        run: A finished training.
        extra: Numbers of tokens added to those of the task.
        count: Sequences of each number.
        checkpoint: The model to test.
        device: cpu, cuda or cuda:N.
    """
    directory, task = run.directory, run.setup.task
    model = run.model(checkpoint, device=device)
    if checkpoint == "best" and run.best_step == int(run.records().steps[-1]):
        checkpoint = "last"  # the same weights
    prefix = "" if checkpoint == "last" else "best checkpoint, "
    # Parts are named by the total length, as in earlier versions.
    keys = {added: f"{prefix}length {task.length + added}, {count} sequences" for added in extra}
    missing = [added for added, key in keys.items() if not directory.has(key)]
    if missing:
        started = time.perf_counter()
        accuracies = accuracy_by_extra(model, task, extra=missing, count=count, seed=_SEED)
        seconds = (time.perf_counter() - started) / len(missing)
        with directory.lock():
            for added, accuracy in accuracies.items():
                save_table(directory, keys[added], accuracy.table(), seconds=seconds)
    return {added: Accuracy.from_table(read_part(directory, key)) for added, key in keys.items()}
