"""The Ray engine: actors with declared resources, each of which keeps its model; Ray places and queues them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from wherewhat.errors import ConfigError, StoreError, one_line
from wherewhat.imports import require
from wherewhat.progress import counted
from wherewhat.sweep.engine import CellTask, EngineError, Resources, Watch, record_failure
from wherewhat.sweep.records import Record
from wherewhat.sweep.schedule import Job, Schedule, Work

_SPARE = 8
"""Workers that may wait for resources, beside those that the cluster has room for: demand that lets a cluster grow."""
_STARTS = 3
_TICK = 0.5
_GREETING = 10.0
"""Seconds within which a cluster answers when a sweep begins."""
_SILENCE = 15.0
"""Seconds without an answer from the cluster's head after which it counts as lost. Ray ends this process after 60."""


def run_on_ray(
    tasks: Sequence[CellTask], *, address: str | None, resources: Resources, work: Work, watch: Watch
) -> None:
    """Run tasks on a Ray cluster; a worker that dies is replaced and its cells are tried again.

    Without an address it is the one at ``$RAY_ADDRESS``, or else a temporary cluster on this machine.
    """
    ray = require("ray", why="--engine ray", install="'wherewhat[ray]'")
    with _cluster(ray, address) as (ours, dashboard):
        pool = _Pool(ray, resources, gpus=_gpus(ray, resources, ours=ours), spare=0 if ours else _SPARE, work=work)
        schedule = Schedule(tasks, retries=resources.retries)
        watch.begin(workers=_described(ray), dashboard=dashboard)
        head = _Head(ray.get_runtime_context().gcs_address)
        try:
            while schedule:
                pool.assign(schedule)
                watch.running([worker.job.described for worker in pool.workers if worker.job])
                for task, record in pool.wait(schedule):
                    watch.finished(task, record)
                head.check()
        finally:
            pool.close()


class _Actor:
    """A worker process, which keeps the model it loaded last."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def ready(self) -> None:
        """Return when the process runs."""

    def run(self, job: Job) -> list[Record]:
        """Measure a job."""
        return self._work(job)


@dataclass(eq=False)
class _Worker:
    """An actor: where it is, what it has loaded or was started for, and the answer that is awaited.

    Attributes:
        actor: Ray's handle.
        memory: Bytes of main memory that it was given.
        model: Key of its model.
        answer: Reference of what it computes; None if it is free.
        job: What it measures; None if it is free, or has not started yet.
    """

    actor: Any
    memory: int
    model: str
    answer: Any
    job: Job | None = None


class _Pool:
    """The actors of a sweep."""

    def __init__(self, ray: Any, resources: Resources, *, gpus: float, spare: int, work: Work) -> None:
        self._ray = ray
        self._resources = resources
        self._gpus = gpus
        self._spare = spare
        self._work = work
        self._class = ray.remote(_Actor)
        self._failed_starts = 0
        self._known_places, self._counted = 0, -_TICK
        self.workers: list[_Worker] = []

    def assign(self, schedule: Schedule) -> None:
        """Give jobs to free workers, and start workers for the jobs that are left."""
        places = self._places()
        for worker in [worker for worker in self.workers if worker.answer is None]:
            others = [other.model for other in self.workers if other is not worker]
            job = schedule.next(worker.model, others, workers=places, memory=worker.memory)
            if job is not None:
                worker.job, worker.model, worker.answer = job, job.model, worker.actor.run.remote(job)
            elif schedule.useful(1):  # what waits needs more memory: leave this worker's to another one
                self._stop(worker)
        starting = sum(worker.job is None and worker.answer is not None for worker in self.workers)
        for _ in range(schedule.useful(starting + places + self._spare - len(self.workers)) - starting):
            self._start(schedule)

    def wait(self, schedule: Schedule) -> list[tuple[CellTask, Record]]:
        """Wait until a worker answers, or for a moment; return cells that ended, with their records."""
        answers = {worker.answer: worker for worker in self.workers if worker.answer is not None}
        if not self._ray.wait(list(answers), timeout=_TICK, fetch_local=False)[0]:
            return []
        ready, _ = self._ray.wait(list(answers), num_returns=len(answers), timeout=0, fetch_local=False)
        return [ended for answer in ready for ended in self._ended(answers[answer], schedule)]

    def close(self) -> None:
        """Stop all workers."""
        for worker in list(self.workers):
            self._stop(worker)

    def _ended(self, worker: _Worker, schedule: Schedule) -> list[tuple[CellTask, Record]]:
        """Return the cells that ended with a worker's answer."""
        errors = self._ray.exceptions
        job, answer = worker.job, worker.answer
        worker.job = worker.answer = None
        try:
            records: list[Record] = self._ray.get(answer)
        except errors.RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise StoreError(str(error.cause)) from None
            assert job is not None
            reason = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())[:500]
            tasks = job.tasks if job.share is None else ()
            records = [record_failure(task, reason, attempts=task.attempts + 1) for task in tasks]
        except (errors.LocalRayletDiedError, errors.RaySystemError, ConnectionError) as error:
            raise _gone(error) from error
        except errors.RayError as error:
            self._stop(worker)
            if job is not None:
                return schedule.died(job, type(error).__name__)
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise EngineError(f"workers on Ray end before they can start: {one_line(error)}") from error
            return []
        if job is None:
            self._failed_starts = 0
            return []
        schedule.ended(job)
        return list(zip(job.tasks, records, strict=False))  # shares have no records

    def _start(self, schedule: Schedule) -> None:
        """Start a worker with the memory of the model that it is needed for."""
        model = schedule.model("", [worker.model for worker in self.workers])
        assert model is not None, "workers are started for jobs that wait"
        memory = schedule.memory(model)
        options: dict[str, Any] = {"num_cpus": self._resources.cpus, "num_gpus": self._gpus, "memory": memory}
        actor = self._class.options(**options).remote(self._work)
        self.workers.append(_Worker(actor, memory, model, actor.ready.remote()))

    def _stop(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        with suppress(self._ray.exceptions.RayError, ConnectionError, RuntimeError):
            self._ray.kill(worker.actor)

    def _places(self) -> int:
        """Return the number of workers that the nodes have CPUs and GPUs for, counted again every moment."""
        if time.monotonic() - self._counted >= _TICK:
            wanted = {"CPU": self._resources.cpus, "GPU": self._gpus}
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            places = (min(int(node.get(name, 0) / x) for name, x in wanted.items() if x) for node in nodes)
            self._known_places, self._counted = max(1, sum(places)), time.monotonic()
        return self._known_places


@contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[tuple[bool, str | None]]:
    """Connect to a cluster, or start one on this machine; close the connection at the end if it was opened here.

    Yields whether the cluster was started here, and the address of its dashboard.
    """
    already = ray.is_initialized()
    # Ray would connect to a cluster that runs on this machine, or ran once, in place of starting one.
    target = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        if not already and target != "local":
            host, port = _location(ray, target)
            _greet(host, port, timeout=_GREETING)
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        context = ray.init(address=None if already else target, ignore_reinit_error=True, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        where = "Ray cannot be started" if target == "local" else f"the Ray cluster at {target} cannot be reached"
        raise EngineError(f"{where}: {one_line(error)}") from error
    try:
        url = getattr(context, "dashboard_url", None)
        yield target == "local" and not already, f"http://{url}" if url else None
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        raise _gone(error) from error
    finally:
        if not already:
            with suppress(ConnectionError, RuntimeError):
                ray.shutdown()


def _location(ray: Any, address: str) -> tuple[str, int]:
    """Return host and port that Ray connects to: it replaces ``localhost`` by the outer address of this machine."""
    if not address.startswith("ray://"):
        address = ray._private.services.canonicalize_bootstrap_address(address)
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not port.isdecimal():
        raise ValueError("give HOST:PORT")
    return host.strip("[]"), int(port)


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of gRPC begins: the preface of HTTP/2, and empty settings."""


def _greet(host: str, port: int, *, timeout: float) -> None:
    """Raise if no server of gRPC answers within seconds: Ray itself would try for minutes, and print warnings."""
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false", ""):
                connection.sendall(_PREFACE)
                if connection.makefile("rb").read(4)[3:] != b"\x04":  # the length and kind of its settings
                    raise ConnectionError("what answers there is not Ray")
    except TimeoutError:
        raise TimeoutError(f"no answer from {host}:{port} within {timeout:g} s") from None
    except OverflowError as error:
        raise ValueError(str(error)) from error


class _Head:
    """Checks that the head of the cluster answers: Ray waits a minute for it and then ends the process."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._answered = self._checked = time.monotonic()

    def check(self) -> None:
        """Ask every few seconds; raise if there was no answer for too long."""
        now = time.monotonic()
        if now - self._checked < _SILENCE / 5:
            return
        self._checked = now
        try:
            _greet(*self._address, timeout=_SILENCE / 5)
            self._answered = time.monotonic()
        except OSError as error:
            if time.monotonic() - self._answered > _SILENCE:
                raise _gone(error) from error


def _gpus(ray: Any, resources: Resources, *, ours: bool) -> float:
    """Return the GPUs of a task: as declared, or one where the cluster has any."""
    there = ray.cluster_resources()
    gpus = resources.gpus if resources.gpus is not None else float(there.get("GPU", 0) >= 1)
    for name, wanted in (("GPU", gpus), ("CPU", resources.cpus)):
        # Other clusters may grow, so a task may wait for a new node there.
        if ours and wanted > there.get(name, 0):
            raise ConfigError(f"a cell needs {wanted:g} {name}s, but this machine has {there.get(name, 0):g}")
    return gpus


def _described(ray: Any) -> str:
    nodes = sum(node["Alive"] for node in ray.nodes())
    there = ray.cluster_resources()
    parts = [counted(nodes, "node"), f"{there.get('CPU', 0):g} CPUs"]
    return "Ray: " + ", ".join([*parts, *([f"{there['GPU']:g} GPUs"] if there.get("GPU") else [])])


def _gone(error: BaseException) -> EngineError:
    return EngineError(f"the Ray cluster is lost ({one_line(error)}); finished cells are kept: start the sweep again")
