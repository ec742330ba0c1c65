"""The local engine: one worker process per GPU, or as many as cores and memory allow."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from wherewhat.errors import StoreError
from wherewhat.sweep.engine import CellTask, EngineError, Watch
from wherewhat.sweep.records import Record
from wherewhat.sweep.schedule import Job, Schedule, Work

_STARTS = 3
_READY, _STOPPED = "ready", "stopped"


def run_locally(
    tasks: Sequence[CellTask], *, slots: Sequence[Mapping[str, str]], work: Work, watch: Watch, retries: int
) -> None:
    """Run tasks in worker processes of this machine; a worker that dies is replaced and its cells are tried again.

    Args:
        tasks: The tasks; those of one model go to the same worker while other workers have other models.
        slots: Environment variables of each worker, such as its GPU.
        work: Function that a worker applies to a job; it must be importable.
        watch: Receiver of events.
        retries: Number of further attempts when the worker of a task dies.
    """
    schedule = Schedule(tasks, retries=retries)
    workers = [_Worker(slot, work) for slot in slots[: schedule.useful(len(slots))]]
    watch.begin(workers=f"{len(workers)} local process{'es' if len(workers) != 1 else ''}", dashboard=None)
    try:
        while schedule:
            for worker in workers:
                others = [other.model for other in workers if other is not worker]
                if worker.free and (job := schedule.next(worker.model, others, workers=len(workers))) is not None:
                    worker.give(job)
            watch.running([worker.job.described for worker in workers if worker.job])
            for worker in _changed(workers):
                job, answer = worker.job, worker.answer()
                if isinstance(answer, StoreError):
                    raise answer
                if job is not None and isinstance(answer, list):
                    schedule.ended(job)
                    for task, record in zip(job.tasks, answer, strict=False):  # shares have no records
                        watch.finished(task, record)
                elif answer == _STOPPED:
                    how = worker.restart()
                    for task, record in schedule.died(job, how) if job is not None else ():
                        watch.finished(task, record)
    finally:
        for worker in workers:
            worker.stop()


def _changed(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait for and return workers that sent a message or died."""
    ready = set(wait([x for worker in workers for x in (worker.connection, worker.process.sentinel)]))
    return [w for w in workers if w.connection in ready or w.process.sentinel in ready]


@dataclass
class _Worker:
    """A slot and its current process."""

    slot: Mapping[str, str]
    work: Work

    def __post_init__(self) -> None:
        self.job: Job | None = None
        self.model = ""
        self._failed_starts = 0
        self._start()

    @property
    def free(self) -> bool:
        return self.job is None and self._ready

    def give(self, job: Job) -> None:
        self.job, self.model = job, job.model
        with suppress(OSError):  # it just died, which is noticed when its answer is awaited
            self.connection.send(job)

    def answer(self) -> Any:
        """Return the message of the process: ready, records or an error of the store; or that it has stopped."""
        try:
            # A message that was sent before the process died can still be read.
            message = self.connection.recv() if self.connection.poll() else _STOPPED
        except (EOFError, OSError):
            message = _STOPPED
        if message == _READY:
            self._ready, self._failed_starts = True, 0
        elif isinstance(message, list):
            self.job = None
        return message

    def restart(self) -> str:
        """Replace a process that died, and return how it died."""
        self.process.join()
        code = self.process.exitcode or 0
        if not self._ready:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise EngineError(f"worker processes end before they can start (exit code {code}): see the lines above")
        self.connection.close()
        self.job = None
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
    """Run a worker process: receive jobs and send records until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    connection.send(_READY)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: list[Record] | StoreError = work(job)
        except StoreError as error:
            answer = StoreError(str(error))
        with suppress(OSError):
            connection.send(answer)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while a process is started; torch reads its GPUs once, on import."""
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
