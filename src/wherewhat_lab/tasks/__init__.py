"""Tasks with known answers: number, letter, and three one-hop tasks."""

from __future__ import annotations

from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.options import nearest
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask

TASKS: dict[str, type[Any]] = {
    "number": NumberTask,
    "letter": LetterTask,
    "index": IndexTask,
    "retrieval": RetrievalTask,
    "partial-induction": PartialInductionTask,
}
"""Frozen dataclasses of options, each with a default and a ``help``; their instances are tasks."""


def find_task(name: str) -> type[Any]:
    """Return the task of that name."""
    if name in TASKS:
        return TASKS[name]
    raise ConfigError(f"there is no task '{name}': {nearest(name, TASKS)}")
