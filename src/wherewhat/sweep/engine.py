"""What engines share: resources of a cell and of this machine, and tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wherewhat.boundary import check_at_most
from wherewhat.errors import ConfigError, WherewhatError
from wherewhat.models.source import EMBEDDED
from wherewhat.models.suitability import free_memory
from wherewhat.runs.storage import open_place
from wherewhat.sweep.cells import Cell, model_path
from wherewhat.sweep.file import SweepFile, check_keys, names_of, typed
from wherewhat.sweep.records import Record, SweepFolder


class EngineError(WherewhatError):
    """The workers of a sweep cannot be started or reached; finished cells are kept."""


MOST_PROCESSES = 1024
"""Largest number of worker processes, threads, GPUs or attempts."""

_MOST_GIB = 1 << 20


@dataclass(frozen=True)
class Resources:
    """Resources of each cell.

    Attributes:
        cpus: CPU cores, and threads of torch. The same number gives the same bytes on every engine.
        gpus: GPUs of a cell on a Ray cluster, or a fraction of one; None for one where the cluster has any.
        memory_gib: Main memory of a cell; None for an estimate from the size of the model's files.
        retries: Number of further attempts when the worker process of a cell dies.
    """

    cpus: int = 1
    gpus: float | None = None
    memory_gib: float | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        """Check the values."""
        for name, least in (("cpus", 1), ("gpus", 0), ("memory_gib", 0), ("retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: at least {least} is needed")
        check_at_most(MOST_PROCESSES, cpus=self.cpus, gpus=self.gpus, retries=self.retries)
        check_at_most(_MOST_GIB, memory_gib=self.memory_gib)


def resources_of(file: SweepFile) -> Resources:
    """Return the ``resources`` of the file."""
    table = file.values.get("resources", {})
    where = f"{file.path}: resources"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, with {', '.join(names_of(Resources))}")
    check_keys(table, names_of(Resources), where)
    return Resources(**typed(Resources, table, where))


@dataclass(frozen=True, kw_only=True)
class CellTask:
    """A cell as it is sent to a worker: plain values only.

    Attributes:
        cell: Name of the cell.
        described: The cell in a few words.
        request: Its request, as plain values.
        model: Key of the model; tasks with the same key go to the same worker where possible.
        texts: Key of the texts and of how they are run; tasks of one model with the same key are measured together.
        documents: Number of documents that different workers can measure.
        store: Address of the store.
        sweep: Name of the sweep's folder in it.
        threads: Threads of torch.
        memory: Approximate bytes of main memory.
        attempts: Number of earlier attempts.
        again: Measure anew what is finished.
    """

    cell: str
    described: str
    request: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    texts: str = ""
    documents: int = 1
    store: str
    sweep: str
    threads: int = 1
    memory: int = 0
    attempts: int = 0
    again: bool = False


class Watch(Protocol):
    """Receiver of the events of a sweep."""

    def planned(self, *, left: int, done: int, failed: int) -> None:
        """Show the number of cells to run, and of cells that ended earlier."""

    def begin(self, *, workers: str, dashboard: str | None) -> None:
        """Show the workers of the engine, and the address of its dashboard if there is one."""

    def running(self, cells: Sequence[str]) -> None:
        """Show what workers measure."""

    def finished(self, task: CellTask, record: Record) -> None:
        """Show that a cell is done or has failed."""


def record_failure(task: CellTask, reason: str, *, attempts: int) -> Record:
    """Write and return the record of a failed cell."""
    record = Record(state="failed", reason=reason, attempts=attempts)
    SweepFolder(open_place(task.store), task.sweep).write(task.cell, record)
    return record


def record_death(task: CellTask, how: str, *, attempts: int) -> Record:
    """Write and return the record of a cell whose workers died too often."""
    times = f"{attempts} times" if attempts > 1 else "once"
    reason = f"its worker process died {times} ({how}); often there is too little memory"
    return record_failure(task, reason, attempts=attempts)


_GIB = 1 << 30
_BASE = _GIB
"""A worker with torch, transformers and the activations of a small model."""
_UNKNOWN = 8 * _GIB
"""Free memory that is assumed where the system does not report it."""


def local_slots(cells: Sequence[Cell], *, cpus: int, memory: int, workers: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each local worker process.

    There are ``workers`` of them, by default one per GPU, or as many as cores and memory allow for cells of ``cpus``
    threads, of which the largest needs ``memory`` bytes.
    """
    base = {"OMP_NUM_THREADS": str(cpus), "TOKENIZERS_PARALLELISM": "false"}
    # A model distributed over GPUs, or on a chosen device, needs all of them visible.
    devices = {cell.model.device for cell in cells}
    placed = any(cell.model.device_map is not None for cell in cells) or any(":" in name for name in devices)
    gpus = [] if devices == {"cpu"} else visible_gpus()
    if gpus and placed:
        return [base] * (workers or 1)
    if gpus:
        count = workers or len(gpus)
        return [{**base, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
    free = free_memory()
    by_memory = int(0.8 * (_UNKNOWN if free is None else free) // max(memory, 1))
    return [base] * (workers or max(1, min(usable_cores() // cpus, by_memory)))


def visible_gpus() -> list[str]:
    """Return the names of this machine's GPUs for ``CUDA_VISIBLE_DEVICES``."""
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [name.strip() for name in listed.split(",")] if listed else [str(i) for i in range(count)]
    return names[:count]


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_needed(cell: Cell) -> int:
    """Return the approximate bytes of main memory of a cell: its weights in their dtype, and the rest of a worker.

    Files mostly hold two bytes per weight, GGUF files about one. A model that is not local counts as nothing.
    """
    model = cell.model
    name = os.fspath(model.model)
    size = {"float64": 8, "float32": 4}.get(model.dtype, 2)
    if name == EMBEDDED:
        return _BASE + 135_000_000 * size
    path = model_path(name)
    if path.is_file():
        return _BASE + path.stat().st_size * size
    return _BASE + sum(file.stat().st_size for file in path.glob("*.safetensors")) * size // 2
