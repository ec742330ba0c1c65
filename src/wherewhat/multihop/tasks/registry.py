"""The tasks by name."""

from __future__ import annotations

import difflib
from typing import Any

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
    near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(TASKS)}"
    raise ConfigError(f"there is no task '{name}': {hint}")
