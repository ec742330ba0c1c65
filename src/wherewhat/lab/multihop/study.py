"""A multi-hop study: recipe, training, recording, and accuracy on longer inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import make_folder, write_file
from wherewhat.hashes import config_hash, parse_object, readable_json
from wherewhat.lab.checkpoints import load_model
from wherewhat.lab.config import LabConfig, TrainConfig
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import LENGTHS, Accuracy, LengthAccuracy, accuracy_by_length, measure_accuracy
from wherewhat.lab.multihop.dynamics import Dynamics, Recorder
from wherewhat.lab.multihop.scores import hold_out
from wherewhat.lab.tasks.registry import find_task
from wherewhat.lab.tasks.task import Sequences, Task
from wherewhat.lab.training import MODEL_FILE, STATE_FILE, Record, digest, find_device, identify, run_training
from wherewhat.numerics import new_process_settings
from wherewhat.options import build_config, config_values, nearest, read_recipe_file
from wherewhat.progress import Progress

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
    """Refuse sequences that are not ones of the model's vocabulary."""
    tokens, answers = sequences.tokens, sequences.answers
    low, high = int(min(tokens.min(), answers.min())), int(max(tokens.max(), answers.max()))
    if low < 0 or high >= model_config.vocabulary:
        raise ConfigError(f"sequences hold tokens {low} to {high}: the vocabulary has {model_config.vocabulary}")


_GIVEN = ("vocabulary", "seed")
"""Options that the task or the list of seeds says."""


@dataclass(frozen=True)
class Setup:
    """One task, one model and one way to train it.

    Attributes:
        name: Name of the task.
        task: The task.
        model: The model.
        training: How it is trained.
    """

    name: str
    task: Task
    model: LabConfig
    training: TrainConfig

    @classmethod
    def of(cls, task: str, options: Mapping[str, Any]) -> Setup:
        """A setup from the task's name and options of task, model and training by name, in one heap."""
        kinds = (find_task(task), LabConfig, TrainConfig)
        homes = {f.name: kind for kind in kinds for f in dataclasses.fields(kind) if f.name not in _GIVEN}
        found: dict[type[Any], dict[str, Any]] = {kind: {} for kind in kinds}
        for name, value in options.items():
            if name not in homes:
                hint = nearest(name, sorted(homes))
                raise ConfigError(f"there is no option '{name}' of task, model or training: {hint}")
            found[homes[name]][name] = value
        made = [build_config(kind, found[kind]) for kind in kinds]
        return cls(task, made[0], replace(made[1], vocabulary=made[0].vocabulary), made[2])

    def seeded(self, seed: int) -> Setup:
        """The same with other initial weights, order of sequences and dropout."""
        return replace(self, model=replace(self.model, seed=seed), training=replace(self.training, seed=seed))

    def values(self) -> dict[str, Any]:
        """Everything as plain values, for a file and for its hash."""
        return {
            "task": self.name,
            "task_options": config_values(self.task),
            "model": config_values(self.model),
            "training": config_values(self.training),
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Setup:
        """Undo :meth:`values`."""
        return cls(
            values["task"],
            build_config(find_task(values["task"]), values["task_options"]),
            build_config(LabConfig, values["model"]),
            build_config(TrainConfig, values["training"]),
        )


_KNOWN = ("tasks", "seeds", "lengths", "length_count", "options", "task_options")


@dataclass(frozen=True)
class Recipe:
    """What a study consists of.

    Attributes:
        setups: One per task.
        seeds: Seeds of each.
        lengths: Tokens at which the trained models are tested.
        length_count: Sequences of each length.
    """

    setups: tuple[Setup, ...]
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    length_count: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values."""
        for name in values:
            if name not in _KNOWN:
                raise ConfigError(f"a recipe has no '{name}': known: {', '.join(_KNOWN)}")
        tasks = values.get("tasks", ("number", "letter"))
        own = values.get("task_options", {})
        shared = values.get("options", {})
        tables = (
            isinstance(shared, Mapping)
            and isinstance(own, Mapping)
            and all(isinstance(x, Mapping) for x in own.values())
        )
        if not isinstance(tasks, list | tuple) or not tables:
            raise ConfigError("in a recipe, tasks is a list, options is a table and task_options a table of tables")
        seeds, lengths = values.get("seeds", (0, 1, 2)), values.get("lengths", LENGTHS)
        if not isinstance(seeds, list | tuple) or not isinstance(lengths, list | tuple):
            raise ConfigError(f"seeds={seeds!r} and lengths={lengths!r} must be lists of whole numbers, such as [0, 1]")
        seeds, lengths = tuple(seeds), tuple(lengths)
        count = values.get("length_count", 1000)
        if not seeds or any(isinstance(x, bool) or not isinstance(x, int) for x in (*seeds, *lengths, count)):
            raise ConfigError(f"seeds={seeds}, lengths={lengths} and length_count={count} must be whole numbers")
        setups = tuple(Setup.of(task, {**shared, **own.get(task, {})}) for task in tasks)
        return cls(setups, seeds, lengths, count)


def read_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file."""
    return Recipe.of(read_recipe_file(path))


CONFIG_FILE = "config.json"
DYNAMICS_FILE = "dynamics.safetensors"
TEST_FILE = "test.json"


@dataclass(frozen=True)
class StudyRun:
    """A directory with a trained model and what was seen of it while it learned.

    Attributes:
        path: The directory.
        setup: What was trained on what and how.
    """

    path: Path
    setup: Setup

    @property
    def seed(self) -> int:
        """Seed of the weights, the order of sequences and dropout."""
        return self.setup.model.seed

    def model(self, *, device: str = "cpu") -> LabModel:
        """The trained model."""
        return load_model(self.path / MODEL_FILE, device=device)

    def dynamics(self) -> Dynamics:
        """What was seen while it learned."""
        return Dynamics.read(self.path / DYNAMICS_FILE)

    def test(self) -> Accuracy:
        """Right answers on all test sequences, by number of hops."""
        try:
            values: dict[str, Any] = parse_object((self.path / TEST_FILE).read_bytes()) or {}
            hits, counts = (torch.tensor(values[name]) for name in ("hits", "counts"))
            return Accuracy(tuple(values["hops"]), hits, counts, torch.tensor(values["loss"]))
        except (OSError, KeyError) as error:
            raise StoreError(f"{self.path} holds no test of its model: finish its training first") from error

    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


@new_process_settings()
def train_and_watch(
    setup: Setup,
    *,
    out: Path,
    device: str = "cpu",
    progress: Progress | None = None,
    scored: int = 256,
    tested: int = 1024,
    along_path: bool = True,
) -> StudyRun:
    """Train a model and record its heads and its accuracy while it learns.

    Done before, it is read; begun before, it goes on where it stopped.

    Args:
        setup: What to train.
        out: Folder that holds the directories of all runs.
        device: cpu, cuda or cuda:N.
        progress: Who is told how far it is.
        scored: Held-out sequences that heads are scored on.
        tested: Held-out sequences that accuracy is known from.
        along_path: Also score the other tokens that hops leave from.
    """
    watching = {"scored": scored, "tested": tested, "along_path": along_path}
    values = {**setup.values(), **watching, "device": device.partition(":")[0]}
    digest = config_hash(values)[:12]
    path = out / f"multihop-{setup.name}-{setup.model.encoding}-seed{setup.model.seed}-{digest}"
    make_folder(path)
    write_file(path / CONFIG_FILE, readable_json(values))
    run = StudyRun(path, setup)
    if all((path / name).exists() for name in (MODEL_FILE, DYNAMICS_FILE, TEST_FILE)):
        return run
    training, validation, testing = setup.task.splits(setup.training.sequences, setup.training.data_seed)
    most = len(validation)
    held_out = hold_out(validation, scored=min(scored, most), tested=min(tested, most))
    recorder = Recorder(held_out, path=path / DYNAMICS_FILE, identity=digest, along_path=along_path)
    model = train(
        setup.task,
        setup.model,
        setup.training,
        record=recorder,
        directory=path,
        progress=progress,
        device=device,
        sequences=training,
    )
    found = measure_accuracy(model, testing)
    tested_on = {name: getattr(found, name).tolist() for name in ("hits", "counts", "loss")}
    write_file(path / TEST_FILE, readable_json({"hops": list(found.hops), **tested_on}))
    return run


def open_run(path: Path) -> StudyRun:
    """A directory that :func:`train_and_watch` made."""
    try:
        values: dict[str, Any] = parse_object((path / CONFIG_FILE).read_bytes()) or {}
        return StudyRun(path, Setup.from_values(values))
    except (OSError, KeyError) as error:
        raise StoreError(f"{path} is no directory of a multi-hop training: give one that 'train' made") from error


_SEED = 1_000_003
"""Seed of the longer sequences: one that no training uses."""


@new_process_settings()
def measure_lengths(run: StudyRun, lengths: Sequence[int], *, count: int, device: str = "cpu") -> LengthAccuracy:
    """Accuracy by length; what was measured before is read."""
    file = run.path / f"lengths-{count}.json"
    known: dict[str, Any] = (parse_object(file.read_bytes()) or {}) if file.exists() else {}
    missing = [length for length in lengths if str(length) not in known]
    if missing:
        model = run.model(device=device)
        found = accuracy_by_length(model, run.setup.task, lengths=missing, count=count, seed=_SEED)
        for length, hits, counts in zip(found.lengths, found.hits.tolist(), found.counts.tolist(), strict=True):
            known[str(length)] = {"hops": list(found.hops), "hits": hits, "counts": counts}
        write_file(file, readable_json(known))
    rows = [known[str(length)] for length in lengths]
    return LengthAccuracy(
        lengths=tuple(lengths),
        hops=tuple(rows[0]["hops"]),
        hits=torch.tensor([row["hits"] for row in rows]),
        counts=torch.tensor([row["counts"] for row in rows]),
    )
