"""GPUs, cores and memory of this machine, and the memory of a cell."""

from __future__ import annotations

import os
from collections.abc import Sequence

from wherewhat.models.source import EMBEDDED
from wherewhat.models.suitability import free_memory
from wherewhat.sweep.cells import Cell, model_path

_GIB = 1 << 30
_BASE = _GIB
"""A worker with torch, transformers and the activations of a small model."""
_UNKNOWN = 8 * _GIB
"""Free memory that is assumed where the system does not report it."""


def local_slots(cells: Sequence[Cell], *, cpus: int, memory: int, workers: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each local worker process.

    Args:
        cells: The cells to run.
        cpus: Threads of a cell.
        memory: Bytes of the largest cell.
        workers: Number of workers; None for one per GPU, or as many as cores and memory allow.
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
