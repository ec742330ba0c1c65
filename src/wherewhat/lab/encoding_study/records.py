"""Scores by training step, and the recorder that collects them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.errors import StoreError
from wherewhat.lab.encoding_study.recipe import WatchConfig
from wherewhat.lab.encoding_study.scores import AXES, HeldOut, score
from wherewhat.lab.model import LabModel
from wherewhat.lab.steps import products
from wherewhat.lab.subject import LabSubject
from wherewhat.runs.profiles import Profile, ProfileFile, profile_name, write_profiles

Table = Mapping[str, Profile]
"""Tensors by name, with what their dimensions are."""

STEPS = "steps"


@dataclass(frozen=True)
class Records:
    """What was recorded of one model.

    Attributes:
        steps: Steps done at each record, ascending, ``(records,)`` int64.
        values: Numbers by name, ``(records, …)`` float32; NaN where something is not defined.
        axes: What the dimensions after the first are, by name.
    """

    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    values: Mapping[str, Tensor] = field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, step: int) -> bool:
        return bool((self.steps == step).any())

    def joined(self, step: int, record: Mapping[str, Tensor], axes: Mapping[str, tuple[str, ...]]) -> Records:
        """These and one more, in the order of steps."""
        steps = torch.cat([self.steps, torch.tensor([step])])
        order = steps.argsort()
        values = {
            name: (torch.cat([self.values[name], value[None]]) if len(self) else value[None])[order]
            for name, value in record.items()
        }
        return Records(steps[order], values, {name: axes[name] for name in record})

    def write(self, path: Path) -> None:
        """Write to a file, whole or not at all."""
        tables = {name: Profile(value, ("step", *self.axes[name])) for name, value in self.values.items()}
        write_table(path, {STEPS: Profile(self.steps, ("step",)), **tables})

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read what :meth:`write` wrote."""
        found = dict(read_table(path))
        if STEPS not in found:
            raise StoreError(f"cannot read {path}: it holds no records of a model that learns")
        steps = found.pop(STEPS).values
        return cls(
            steps,
            {name: table.values for name, table in found.items()},
            {name: table.axes[1:] for name, table in found.items()},
        )


def write_table(path: Path, table: Table) -> None:
    """Write named tensors to a file, whole or not at all."""
    write_profiles(path, {profile_name(None, None, name): profile for name, profile in table.items()})


def read_table(path: Path) -> Table:
    """Read what :func:`write_table` wrote."""
    file = ProfileFile(path)
    return {name.rsplit("/", 1)[1]: Profile(file[name], file.axes(name)) for name in file}


class Recorder:
    """Scores a model whenever it is called with a step; give it to the trainer as ``record``.

    The file is written whole after every record, before the trainer can keep a later state: a training that is resumed
    finds all records up to where it goes on. A step that is there already is not scored again.

    Args:
        held_out: What to look at the model on.
        config: How much of it.
        path: File to keep the records in; what it holds already is gone on with.
    """

    def __init__(self, held_out: HeldOut, config: WatchConfig, *, path: Path) -> None:
        self.records = Records.read(path) if path.exists() else Records()
        self.each: dict[int, float] = {}
        self._held_out, self._config, self._path = held_out, config, path

    def __call__(self, step: int, model: LabModel) -> None:
        """Record ``model`` after ``step`` steps, in full float32 whatever it is trained in."""
        if step in self.records:
            return
        wait_for(model)  # for what training has launched, which is not recording
        started = time.perf_counter()
        subject = LabSubject(model, trained_length=self._held_out.windows.shape[1])
        with torch.no_grad(), products("highest"):
            found = score(subject, self._held_out, self._config)
        self.records = self.records.joined(step, found, AXES)
        self.records.write(self._path)
        self.each[step] = time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """How long all records of this process took; the first pays for what is compiled and set up."""
        return sum(self.each.values())


def wait_for(model: LabModel) -> None:
    """Wait until a GPU has done all that it was given."""
    if model.embedding.is_cuda:
        torch.cuda.synchronize(model.embedding.device)
