"""Scores by training step, the recorder that collects them, and run directories with such records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.errors import ConfigError, StoreError
from wherewhat.hashes import JSON
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.layout import PartResult
from wherewhat.runs.schema import Profile, ProfileFile, profile_name, write_profiles

TensorTable = Mapping[str, Profile]
"""Tensors by name, with the names of their dimensions."""

Axes = Mapping[str, tuple[str, ...]]
"""Names of the dimensions of each tensor, by the tensor's name."""

RECORDS_FILE = "records.safetensors"
"""File of the records while a training is not finished."""

RECORDS = "records"
"""Part of a study's run directory that holds the records."""

_STEPS = "steps"


@dataclass(frozen=True)
class Records:
    """Scores of one model at several training steps.

    Attributes:
        steps: Number of training steps at each record, ascending, ``(records,)`` int64.
        values: Scores by name, ``(records, …)`` float32; NaN where a score is not defined.
        axes: Names of the dimensions after the first, by name.
        constants: Tensors that are the same at all steps, such as the numbers of test inputs.
    """

    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    values: Mapping[str, Tensor] = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)
    constants: TensorTable = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, step: int) -> bool:
        return bool((self.steps == step).any())

    def __getitem__(self, name: str) -> Tensor:
        """Return scores ``(records, …)`` or a constant by name."""
        return self.values[name] if name in self.values else self.constants[name].values

    def joined(self, step: int, scores: Mapping[str, Tensor], axes: Axes) -> Records:
        """Return these records and one more, in the order of steps; scores that a record does not have are NaN."""
        steps = torch.cat([self.steps, torch.tensor([step])])
        order = steps.argsort()
        values, known = {}, {**self.axes, **axes}
        for name in {**self.values, **scores}:
            value = scores[name] if name in scores else torch.full_like(self.values[name][0], torch.nan)
            before = self.values.get(name, torch.full((len(self), *value.shape), torch.nan, dtype=value.dtype))
            if before.shape[1:] != value.shape:
                raise ConfigError(
                    f"a record with {name} of shape {tuple(value.shape)} does not continue those of shape "
                    f"{tuple(before.shape[1:])}: record every model in its own file"
                )
            values[name] = torch.cat([before, value[None]])[order]
        return Records(steps[order], values, {name: known[name] for name in values}, self.constants)

    def until(self, step: int) -> Records:
        """Return the records up to a step, with it."""
        kept = self.steps <= step
        return replace(self, steps=self.steps[kept], values={name: value[kept] for name, value in self.values.items()})

    def table(self) -> TensorTable:
        """Return everything as one table; :meth:`from_table` is the inverse."""
        scores = {name: Profile(value, ("step", *self.axes[name])) for name, value in self.values.items()}
        return {_STEPS: Profile(self.steps, ("step",)), **scores, **self.constants}

    @classmethod
    def from_table(cls, table: TensorTable) -> Records:
        """Return the records in a table."""
        if _STEPS not in table:
            raise StoreError("the table holds no records of a training: it has no steps")
        scores = {name: one for name, one in table.items() if name != _STEPS and one.axes[:1] == ("step",)}
        return cls(
            table[_STEPS].values,
            {name: one.values for name, one in scores.items()},
            {name: one.axes[1:] for name, one in scores.items()},
            {name: one for name, one in table.items() if name not in scores and name != _STEPS},
        )

    def write(self, path: Path) -> None:
        """Write a file atomically."""
        write_profiles(path, {profile_name(None, None, name): one for name, one in self.table().items()})

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read what :meth:`write` wrote."""
        try:
            return cls.from_table(_named(ProfileFile(path), "-"))
        except StoreError as error:
            raise StoreError(f"cannot read {path}: {error}") from error


class Recorder:
    """Score a model at training steps; to be given to a training as its ``record``.

    The file is written after every record, before the training can save a later state: a resumed training finds all
    records up to the step it resumes from. A step that was recorded before is not scored again.

    Args:
        score: Function from a model to its scores by name, float32 on the CPU; called without gradients.
        axes: Names of the dimensions of each score.
        constants: Tensors that are the same at all steps. A file with other constants belongs to another training and
            is refused.
        path: File of the records, which is continued if it exists; None keeps them in memory only.

    Attributes:
        records: All records.
        seconds_by_step: Wall time of each record that this process made.
    """

    def __init__(
        self,
        score: Callable[[Any], Mapping[str, Tensor]],
        axes: Axes,
        *,
        constants: TensorTable | None = None,
        path: Path | None = None,
    ) -> None:
        self._score, self._axes, self._path = score, axes, path
        self.records = Records(constants=constants or {})
        self.seconds_by_step: dict[int, float] = {}
        if path is not None and path.exists():
            found = Records.read(path)
            if not _equal(found.constants, self.records.constants):
                raise ConfigError(
                    f"{path} holds records of another training or of other inputs: choose another file, or remove it"
                )
            self.records = found

    def __call__(self, step: int, model: nn.Module) -> None:
        """Record ``model`` after ``step`` steps."""
        if step in self.records:
            return
        synchronize(model)  # so that pending training kernels do not count as time for recording
        started = time.perf_counter()
        with torch.no_grad():
            found = self._score(model)
        self.records = self.records.joined(step, found, self._axes)
        if self._path is not None:
            self.records.write(self._path)
        self.seconds_by_step[step] = time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """Wall time of all records that this process made; the first includes compilation."""
        return sum(self.seconds_by_step.values())


def synchronize(model: nn.Module) -> None:
    """Wait for all kernels on the device of a model's first weight."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class StudyRun:
    """A finished run of a study."""

    directory: RunDirectory

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return self.directory.path

    @property
    def config(self) -> dict[str, Any]:
        """Configuration: everything that the results depend on."""
        return dict(self.directory.config)

    @property
    def details(self) -> dict[str, Any]:
        """Additional provenance: seconds, number of parameters, GPU."""
        extra: Any = self.directory.provenance()["extra"]
        return dict(extra)

    def records(self) -> Records:
        """Return the scores by training step."""
        return Records.from_table(self.table(RECORDS))

    def table(self, key: str) -> TensorTable:
        """Return the tensors of one part."""
        return _named(self.directory.profiles(), key)


def study_config(study: str, **values: JSON) -> dict[str, JSON]:
    """Return the configuration of a run: what ``values`` say, the study's name, and the version of its files."""
    return {"study": study, "study_version": 2, **values}


def open_study_run(path: Path, study: str) -> RunDirectory:
    """Open the finished run directory of a study."""
    run = RunDirectory.load(path)
    if run.config.get("study") != study:
        raise StoreError(f"{path} is not a run of the study '{study}': give a directory that it made")
    return run


def save_table(run: RunDirectory, key: str, table: TensorTable, *, seconds: float) -> None:
    """Save tensors as a part of a run, unless the part is there already."""
    if not run.has(key):
        profiles = {profile_name(key, None, name): one for name, one in table.items()}
        run.save(key, PartResult(scores=None, profiles=profiles), seconds=seconds)


def read_part(run: RunDirectory, key: str) -> TensorTable:
    """Return the tensors of one part, before or after the run is finished."""
    return _named(run.part_profiles(key), key)


def _named(file: ProfileFile, document: str) -> TensorTable:
    prefix = profile_name(document, None, "x")[:-1]
    return {name.removeprefix(prefix): Profile(file[name], file.axes(name)) for name in file if name.startswith(prefix)}


def _equal(one: TensorTable, other: TensorTable) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].values, other[name].values) for name in one)
