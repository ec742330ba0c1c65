"""The tasks by name."""

from __future__ import annotations

from typing import Any

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError
from wherewhat.multihop.tasks.letter import LetterTask
from wherewhat.multihop.tasks.number import NumberTask
from wherewhat.multihop.tasks.one_layer import IndexTask, PartialInductionTask, RetrievalTask

TASKS: dict[str, type[Any]] = {
    "number": NumberTask,
    "letter": LetterTask,
    "index": IndexTask,
    "retrieval": RetrievalTask,
    "partial-induction": PartialInductionTask,
}
"""Frozen dataclasses of options, each with a default and a ``help``; their instances are tasks."""


def find(name: str) -> type[Any]:
    """The task of that name.

    Raises:
        ConfigError: If there is none, with the nearest name.
    """
    if name in TASKS:
        return TASKS[name]
    raise ConfigError(f"there is no task '{name}': {nearest(name, TASKS)}")
