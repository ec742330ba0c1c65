"""What engines share: tasks, their resources, and the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from wherewhat.errors import ConfigError, WherewhatError

if TYPE_CHECKING:
    from wherewhat.sweep.records import Record


class EngineError(WherewhatError):
    """The workers of a sweep cannot be started or reached; what they finished is kept."""


@dataclass(frozen=True)
class Resources:
    """What each cell needs.

    Attributes:
        cpus: CPU cores, and threads that torch uses. The same number gives the same bytes on every engine.
        gpus: GPUs of a cell on a Ray cluster; None for one where the cluster has any. Fractions share one.
        memory_gib: Main memory of a cell; None for an estimate from the size of the model's files.
        retries: How often a cell is tried again when its worker process dies.
    """

    cpus: int = 1
    gpus: float | None = None
    memory_gib: float | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        for name, least in (("cpus", 1), ("gpus", 0), ("memory_gib", 0), ("retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: at least {least} is needed")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cell on its way to a worker: plain values only.

    Attributes:
        cell: Name of the cell.
        described: The cell in a few words.
        request: Its request, as plain values.
        model: What the model is loaded by; cells with the same one are given to the same worker where possible.
        store: Address of the store.
        sweep: Name of the sweep's folder in it.
        threads: Threads that torch uses.
        memory: Bytes of main memory it needs, roughly.
        attempts: How often it was started before.
    """

    cell: str
    described: str
    request: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    store: str
    sweep: str
    threads: int = 1
    memory: int = 0
    attempts: int = 0


class Watch(Protocol):
    """Somebody who is told what happens to cells."""

    def planned(self, *, left: int, done: int, failed: int) -> None:
        """So many cells will be run now; so many ended earlier."""

    def begin(self, *, workers: str, dashboard: str | None) -> None:
        """The engine is up: its workers in words, and the address of its dashboard if there is one."""

    def running(self, cells: Sequence[str]) -> None:
        """These cells are under way, in words; engines that cannot tell which give how many."""

    def finished(self, task: Task, record: Record) -> None:
        """A cell is done, or has failed."""


Work = Callable[[Task], "Record"]
"""What a worker does with a task: measure, write the record into the store, return it."""


def lost(task: Task, how: str) -> Record:
    """The record of a cell whose workers died too often."""
    from wherewhat.sweep.records import Record

    times = f"{task.attempts} times" if task.attempts > 1 else "once"
    reason = f"its worker process died {times} ({how}); often there is too little memory"
    return Record(state="failed", reason=reason, attempts=task.attempts)


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
