"""What is trained on what and how, from names and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError
from wherewhat.measure.options import build_config, config_values
from wherewhat.multihop.config import LabConfig, TrainConfig
from wherewhat.multihop.tasks import Task
from wherewhat.multihop.tasks import find as find_task

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
        """A setup from the task's name and options of task, model and training by name, in one heap.

        Raises:
            ConfigError: On an unknown task or option (with the nearest known one), or a value that makes no sense.
        """
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
        """Undo :meth:`values`.

        Raises:
            ConfigError: If something does not fit.
        """
        return cls(
            values["task"],
            build_config(find_task(values["task"]), values["task_options"]),
            build_config(LabConfig, values["model"]),
            build_config(TrainConfig, values["training"]),
        )
