"""GPUs, cores and memory of this machine, and the memory of a cell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from wherewhat.models.source import EMBEDDED
from wherewhat.sweep.cells import Cell, model_path

_GIB = 1 << 30
_BASE = _GIB
"""A worker with torch, transformers and the activations of a small model."""


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
    by_memory = int(0.8 * free_memory() // max(memory, 1))
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


def free_memory(*, root: Path = Path("/")) -> int:
    """Return the free bytes of main memory, also inside a container; 8 GiB where the system does not report it.

    Args:
        root: Folder of ``proc`` and ``sys``.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    free = _free_pages() if available is None else available * 1024
    return max(0, min([free, *_left_to_groups(root)]))


def _free_pages() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * _GIB


def _left_to_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left to each limited control group of this process, in versions 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            mount, limited, used, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limited, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        # Inside a container the group of the process is often the mount itself, under another name.
        inner = PurePosixPath(name.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = root / mount / group
            limit, usage = _number(folder / limited), _number(folder / used)
            if limit is not None and usage is not None:
                # Cached files count as used but can be evicted, as in MemAvailable.
                yield limit - usage + (_number(folder / "memory.stat", cached) or 0)


def _number(path: Path, name: str = "") -> int | None:
    """Return the number after a name in a system file, or the only one in it; None where there is none."""
    try:
        found = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


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
