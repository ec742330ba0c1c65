"""One trained and watched model in one directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wherewhat.errors import StoreError
from wherewhat.multihop.checkpoint import load_model
from wherewhat.multihop.dynamics import Accuracy, Dynamics, Recorder, hold_out, measure_accuracy
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.study.setup import Setup
from wherewhat.multihop.trainer import MODEL_FILE, train
from wherewhat.numerics import new_process_settings
from wherewhat.pipeline.progress import Progress
from wherewhat.store.atomic import make_folder, write_file
from wherewhat.store.hashing import config_hash, parse_object, readable_json

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
        """The trained model.

        Raises:
            LoadError: If training is not finished, or the file is damaged.
        """
        return load_model(self.path / MODEL_FILE, device=device)

    def dynamics(self) -> Dynamics:
        """What was seen while it learned.

        Raises:
            StoreError: If there is none.
        """
        return Dynamics.read(self.path / DYNAMICS_FILE)

    def test(self) -> Accuracy:
        """Right answers on all test sequences, by number of hops.

        Raises:
            StoreError: If they were not counted, because training is not finished.
        """
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

    Raises:
        WherewhatError: If options, the device or the disk are wrong, or the loss is not finite any more.
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
    """A directory that :func:`train_and_watch` made.

    Raises:
        StoreError: If it is not one.
    """
    try:
        values: dict[str, Any] = parse_object((path / CONFIG_FILE).read_bytes()) or {}
        return StudyRun(path, Setup.from_values(values))
    except (OSError, KeyError) as error:
        raise StoreError(f"{path} is no directory of a multi-hop training: give one that 'train' made") from error
