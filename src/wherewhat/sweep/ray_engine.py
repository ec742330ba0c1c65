"""The Ray engine: one Ray task per cell with declared resources; Ray places, retries and queues tasks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from wherewhat.errors import ConfigError, StoreError, one_line
from wherewhat.imports import require
from wherewhat.progress import counted
from wherewhat.sweep.engine import CellTask, EngineError, Resources, Watch, Work, record_death, record_failure
from wherewhat.sweep.records import Record

_AT_ONCE = 1000
"""Tasks submitted to Ray at a time: enough for any cluster, few enough to wait for quickly."""
_TICK = 0.5
_SILENCE = 15.0
"""Seconds without an answer from the cluster's head after which it counts as lost. Ray ends this process after 60."""


def run_on_ray(
    tasks: Sequence[CellTask], *, address: str | None, resources: Resources, work: Work, watch: Watch
) -> None:
    """Run tasks on a Ray cluster, in their order.

    Without an address it is the one at ``$RAY_ADDRESS``, or else a temporary cluster on this machine.
    """
    ray = require("ray", why="--engine ray", install="'wherewhat[ray]'")
    with _cluster(ray, address) as (ours, dashboard):
        gpus = _gpus(ray, resources, ours=ours)
        remote = ray.remote(_call)
        watch.begin(workers=_described(ray), dashboard=dashboard)
        waiting = list(reversed(tasks))
        under_way: dict[Any, CellTask] = {}
        head = _Head(ray.get_runtime_context().gcs_address)
        while waiting or under_way:
            while waiting and len(under_way) < _AT_ONCE:
                task = waiting.pop()
                options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": gpus, "name": task.described}
                options |= {"memory": task.memory, "max_retries": resources.retries}
                under_way[remote.options(**options).remote(work, task)] = task
            ready, _ = ray.wait(list(under_way), num_returns=min(64, len(under_way)), timeout=_TICK, fetch_local=False)
            for reference in ready:
                task = under_way.pop(reference)
                watch.finished(task, _outcome(ray, reference, task, resources))
            head.check()
            watch.running(_running(ray, len(under_way), resources.cpus))


def _call(work: Work, task: CellTask) -> Record:
    """Run a Ray task. The worker process persists, and with it the model it loaded last."""
    return work(task)


def _outcome(ray: Any, reference: Any, task: CellTask, resources: Resources) -> Record:
    """Return the record of a finished task."""
    errors = ray.exceptions
    try:
        record: Record = ray.get(reference)
    except errors.RayTaskError as error:
        if isinstance(error.cause, StoreError):
            raise StoreError(str(error.cause)) from None
        reason = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())[:500]
        record = record_failure(task, reason, attempts=task.attempts + 1)
    except (errors.LocalRayletDiedError, errors.RaySystemError, ConnectionError) as error:
        raise _gone(error) from error
    except errors.RayError as error:
        record = record_death(task, type(error).__name__, attempts=task.attempts + 1 + resources.retries)
    return record


@contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[tuple[bool, str | None]]:
    """Connect to a cluster, or start one on this machine; close the connection at the end if it was opened here.

    Yields whether the cluster was started here, and the address of its dashboard.
    """
    already = ray.is_initialized()
    if not already:
        _knock(address or os.environ.get("RAY_ADDRESS"))
    try:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        context = ray.init(address=address, ignore_reinit_error=True, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        where = f"the Ray cluster at {address} cannot be reached" if address else "Ray cannot be started"
        raise EngineError(f"{where}: {one_line(error)}") from error
    try:
        url = getattr(context, "dashboard_url", None)
        yield address is None and not already, f"http://{url}" if url else None
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        raise _gone(error) from error
    finally:
        if not already:
            with suppress(ConnectionError, RuntimeError):
                ray.shutdown()


def _knock(address: str | None) -> None:
    """Raise if an address does not answer: Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").partition("/")[0].rpartition(":")
    if not colon or not port.isdecimal():
        return  # none, or a name such as auto, which Ray resolves itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SILENCE).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"the Ray cluster at {address} cannot be reached: {one_line(error)}") from error


class _Head:
    """Checks that the head of the cluster answers: Ray waits a minute for it and then ends the process."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._answered = self._checked = time.monotonic()

    def check(self) -> None:
        """Connect every few seconds; raise if there was no answer for too long."""
        now = time.monotonic()
        if now - self._checked < _SILENCE / 5:
            return
        self._checked = now
        try:
            socket.create_connection(self._address, timeout=_SILENCE / 5).close()
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


def _running(ray: Any, under_way: int, cpus: int) -> list[str]:
    """Return one empty description per running task, from the cores in use; Ray lists tasks only in its dashboard."""
    taken = ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)
    return [""] * min(under_way, round(taken / cpus))


def _gone(error: BaseException) -> EngineError:
    return EngineError(f"the Ray cluster is lost ({one_line(error)}); finished cells are kept: start the sweep again")
