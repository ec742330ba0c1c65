"""Which cells a worker measures next: jobs of one model each, split where workers would be idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from wherewhat.sweep.engine import CellTask, record_death
from wherewhat.sweep.records import Record

if TYPE_CHECKING:
    from wherewhat.runs.jobs import Share  # imports torch

_LEAST = 2
"""Least number of documents of a share."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker gets at a time: cells of one model on one set of texts, or a share of their documents.

    Attributes:
        tasks: The cells; at least one.
        share: The documents to measure, without finishing the cells; None to finish them.
        measured: Whether shares of it have been measured, so that it only finishes the cells.
        attempts: Number of workers that died with this share.
    """

    tasks: tuple[CellTask, ...]
    share: Share | None = None
    measured: bool = False
    attempts: int = 0

    @property
    def model(self) -> str:
        """Key of the model."""
        return self.tasks[0].model

    @property
    def memory(self) -> int:
        """Approximate bytes of main memory."""
        return max(task.memory for task in self.tasks)

    @property
    def described(self) -> str:
        """The job in a few words."""
        more = len(self.tasks) - 1
        words = self.tasks[0].described + (f" and {more} more" if more else "")
        return words if self.share is None else f"{words}, part {self.share[0] + 1} of {self.share[1]}"

    @property
    def apart(self) -> tuple[CellTask, ...]:
        """The cells whose documents different workers can measure."""
        return tuple(task for task in self.tasks if task.documents >= 2 * _LEAST)

    @property
    def shares(self) -> int:
        """Largest number of shares of the documents of :attr:`apart`."""
        return min((task.documents // _LEAST for task in self.apart), default=0)

    @property
    def workers(self) -> int:
        """Largest number of workers that can measure parts of it at the same time."""
        whole = self.share is not None or self.measured
        return 1 if whole else self.shares + len(self.tasks) - len(self.apart)


Work = Callable[[Job], list[Record]]
"""Function of a worker: measure a job, and write and return the records of its cells; none of a share."""


class Schedule:
    """Jobs that wait, in the order of the file, except that a worker continues with the model it has loaded.

    Cells of one model on one set of texts are one job. When fewer jobs wait than there are workers, a job is split:
    shares of the documents are measured first, by any workers, and then the job itself finishes the cells with what
    is in the store. A share that fails or is lost therefore costs time only.
    """

    def __init__(self, tasks: Iterable[CellTask], *, retries: int) -> None:
        self._retries = retries
        self._waiting: dict[str, deque[Job]] = {}
        self._split: dict[str, tuple[Job, int]] = {}  # a job and the number of its shares that have not ended
        self._running = 0
        groups: dict[tuple[str, str], list[CellTask]] = {}
        for task in tasks:
            groups.setdefault((task.model, task.texts), []).append(task)
        for group in groups.values():
            self._put(Job(tasks=tuple(group)))

    def __bool__(self) -> bool:
        """Whether jobs wait or run."""
        return bool(self._waiting) or self._running > 0

    def useful(self, most: int) -> int:
        """Return how many workers, up to ``most``, could measure what waits at the same time."""
        count = 0
        for job in chain.from_iterable(self._waiting.values()):
            count += job.workers
            if count >= most:
                return most
        return count

    def model(self, held: str, others: Sequence[str], *, memory: int | None = None) -> str | None:
        """Return the model whose cells a worker should measure next; None if nothing that waits fits.

        Args:
            held: The model that the worker has loaded.
            others: Models that other workers have loaded; their cells are left to them while there are others.
            memory: Bytes of main memory of the worker; None if it has enough for every cell.
        """
        fitting = [name for name in self._waiting if memory is None or self.memory(name) <= memory]
        if held in fitting:
            return held
        # The fewest workers, then the most jobs; min keeps the order of the file among equals.
        return min(fitting, key=lambda name: (others.count(name), -len(self._waiting[name])), default=None)

    def memory(self, model: str) -> int:
        """Return the bytes of main memory of the next job of a model."""
        return self._waiting[model][0].memory

    def next(self, held: str, others: Sequence[str], *, workers: int, memory: int | None = None) -> Job | None:
        """Return the next job for a worker, one of ``workers``; see :meth:`model` for the rest."""
        model = self.model(held, others, memory=memory)
        if model is None:
            return None
        job = self._waiting[model].popleft()
        count = sum(map(len, self._waiting.values())) + 1
        first, *rest = self._parts(job, -(-workers // count))
        self._waiting[model].extendleft(reversed(rest))
        if not self._waiting[model]:
            del self._waiting[model]
        self._running += 1
        return first

    def ended(self, job: Job) -> None:
        """Note that a worker measured a job."""
        self._running -= 1
        if job.share is not None:
            self._end_share(job)

    def died(self, job: Job, how: str) -> list[tuple[CellTask, Record]]:
        """Note that the worker of a job died; return the cells that are given up, with their records.

        Cells that died together are tried again one by one, which shows the one that is the reason.
        """
        self._running -= 1
        if job.share is not None and job.attempts < self._retries:
            self._put(replace(job, attempts=job.attempts + 1))
        elif job.share is not None:
            self._end_share(job)
        elif len(job.tasks) > 1:
            for task in job.tasks:
                self._put(Job(tasks=(task,)))
        elif job.tasks[0].attempts < self._retries:
            self._put(Job(tasks=(replace(job.tasks[0], attempts=job.tasks[0].attempts + 1),)))
        else:
            return [(job.tasks[0], record_death(job.tasks[0], how, attempts=job.tasks[0].attempts + 1))]
        return []

    def _put(self, job: Job) -> None:
        self._waiting.setdefault(job.model, deque()).append(job)

    def _parts(self, job: Job, count: int) -> list[Job]:
        """Return a job as up to ``count`` jobs: shares of documents, and cells without shares separately."""
        if count == 1 or job.share is not None or job.measured:
            return [job]
        apart, shares = job.apart, min(count, job.shares)
        rest = [task for task in job.tasks if task not in apart]
        jobs = [Job(tasks=tuple(rest[i::count])) for i in range(min(count, len(rest)))]
        if not apart:
            return jobs
        self._split[apart[0].cell] = Job(tasks=apart, measured=True), shares
        return [*(Job(tasks=apart, share=(i, shares)) for i in range(shares)), *jobs]

    def _end_share(self, job: Job) -> None:
        whole, left = self._split.pop(job.tasks[0].cell)
        if left > 1:
            self._split[job.tasks[0].cell] = whole, left - 1
        else:
            self._waiting.setdefault(whole.model, deque()).appendleft(whole)
