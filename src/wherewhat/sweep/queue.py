"""Tasks that wait, by the model that they need, so that each worker loads as few models as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from wherewhat.sweep.engine import Task


class TaskQueue:
    """Tasks in the order they were given, except that a worker goes on with the model that it has."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._groups: dict[str, deque[Task]] = {}
        for task in tasks:
            self.put(task)

    def put(self, task: Task) -> None:
        """Add a task at the end of its model's."""
        self._groups.setdefault(task.model, deque()).append(task)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def next(self, model: str, others: Sequence[str]) -> Task:
        """The next task for a worker.

        Args:
            model: The model that the worker has loaded.
            others: Models that other workers have: they are left to them while there is something else.
        """
        if model not in self._groups:
            # The fewest workers first, then the most tasks; max and min keep the order of the file among equals.
            fewest = min(others.count(name) for name in self._groups)
            model = max((name for name in self._groups if others.count(name) == fewest), key=self._size)
        group = self._groups[model]
        task = group.popleft()
        if not group:
            del self._groups[model]
        return task

    def _size(self, model: str) -> int:
        return len(self._groups[model])
