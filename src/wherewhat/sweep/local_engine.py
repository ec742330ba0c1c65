"""The local engine: one worker process per GPU, or as many as the CPU and its memory have room for."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from wherewhat.errors import StoreError
from wherewhat.runs.storage import open_place
from wherewhat.sweep.engine import EngineError, Task, TaskQueue, Watch, Work, lost
from wherewhat.sweep.records import Record, SweepFolder

_STARTS = 3
_READY, _STOPPED = "ready", "stopped"


def run_locally(
    tasks: Sequence[Task], *, slots: Sequence[Mapping[str, str]], work: Work, watch: Watch, retries: int
) -> None:
    """Run tasks in worker processes of this machine; a worker that dies is replaced and its task tried again.

    Args:
        tasks: What to run; tasks of one model go to the same worker while there are others for the rest.
        slots: The environment of each worker, such as the GPU that it sees.
        work: What a worker does with a task; a function that can be imported.
        watch: Who is told.
        retries: How often a task is tried again when its worker dies.
    """
    queue = TaskQueue(tasks)
    workers = [_Worker(slot, work) for slot in slots[: len(tasks)]]
    watch.begin(workers=f"{len(workers)} local process{'es' if len(workers) != 1 else ''}", dashboard=None)
    try:
        while queue or any(worker.task for worker in workers):
            for worker in workers:
                if worker.free and queue:
                    worker.give(queue.next(worker.model, [w.model for w in workers if w is not worker]))
            watch.running([worker.task.described for worker in workers if worker.task])
            for worker in _changed(workers):
                task, answer = worker.task, worker.answer()
                if answer == _READY:
                    continue
                if task is not None and isinstance(answer, Record):
                    watch.finished(task, answer)
                elif isinstance(answer, StoreError):
                    raise answer
                elif answer == _STOPPED:
                    how = worker.restart()
                    if task is not None:
                        _again(replace(task, attempts=task.attempts + 1), how, queue, watch, retries)
    finally:
        for worker in workers:
            worker.stop()


def _again(task: Task, how: str, queue: TaskQueue, watch: Watch, retries: int) -> None:
    if task.attempts <= retries:
        queue.put(task)
        return
    record = lost(task, how)
    SweepFolder(open_place(task.store), task.sweep).write(task.cell, record)
    watch.finished(task, record)


def _changed(workers: Sequence[_Worker]) -> list[_Worker]:
    """Workers that said something or died; waits until there is one."""
    ready = set(wait([x for worker in workers for x in (worker.connection, worker.process.sentinel)]))
    return [w for w in workers if w.connection in ready or w.process.sentinel in ready]


@dataclass
class _Worker:
    """A slot and the process that is in it now."""

    slot: Mapping[str, str]
    work: Work

    def __post_init__(self) -> None:
        self.task: Task | None = None
        self.model = ""
        self._failed_starts = 0
        self._start()

    @property
    def free(self) -> bool:
        return self.task is None and self._ready

    def give(self, task: Task) -> None:
        self.task, self.model = task, task.model
        with suppress(OSError):  # it died just now, which is noticed when its answer is awaited
            self.connection.send(task)

    def answer(self) -> Any:
        """What the process said: that it is ready, a record, an error of the store; or that it is no more."""
        try:
            # What a process said before it died is still there to be read.
            said = self.connection.recv() if self.connection.poll() else _STOPPED
        except (EOFError, OSError):
            said = _STOPPED
        if said == _READY:
            self._ready, self._failed_starts = True, 0
        elif isinstance(said, Record):
            self.task = None
        return said

    def restart(self) -> str:
        """Replace a process that died; how it died, in words."""
        self.process.join()
        code = self.process.exitcode or 0
        if not self._ready:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise EngineError(f"worker processes end before they can start (exit code {code}): see the lines above")
        self.connection.close()
        self.task = None
        self._start()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._ready, self.model = False, ""
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, self.work), daemon=True)
        with _environment(self.slot):
            self.process.start()
        theirs.close()


def _serve(connection: Connection, work: Work) -> None:
    """A worker process: tasks in, records out, until nobody is at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    connection.send(_READY)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Record | StoreError = work(task)
        except StoreError as error:
            answer = StoreError(str(error))
        with suppress(OSError):
            connection.send(answer)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while a process is started: which GPUs it sees is read once, when it imports torch."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
