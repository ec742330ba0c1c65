"""A model's records by step, in memory and in one small file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.errors import StoreError
from wherewhat.store.profiles import Profile, ProfileFile, profile_name, write_profiles

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
        """Write to a file, whole or not at all.

        Raises:
            StoreError: If it cannot be written.
        """
        tables = {name: Profile(value, ("step", *self.axes[name])) for name, value in self.values.items()}
        write_table(path, {STEPS: Profile(self.steps, ("step",)), **tables})

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read what :meth:`write` wrote.

        Raises:
            StoreError: If there is no such file, or it is something else.
        """
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
    """Write named tensors to a file, whole or not at all.

    Raises:
        StoreError: If it cannot be written.
    """
    write_profiles(path, {profile_name(None, None, name): profile for name, profile in table.items()})


def read_table(path: Path) -> Table:
    """Read what :func:`write_table` wrote.

    Raises:
        StoreError: If there is no such file, or it is something else.
    """
    file = ProfileFile(path)
    return {name.rsplit("/", 1)[1]: Profile(file[name], file.axes(name)) for name in file}
