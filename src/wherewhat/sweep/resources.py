"""What this machine offers to a sweep, and what a cell needs of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from wherewhat.errors import ConfigError
from wherewhat.models.source import EMBEDDED
from wherewhat.sweep.cells import Cell

_GIB = 1 << 30
_BASE = _GIB
"""A worker with torch, transformers and the activations of a small model."""


def local_slots(cells: Sequence[Cell], *, cpus: int, memory: int, workers: int | None) -> list[dict[str, str]]:
    """The environment of each local worker process.

    Args:
        cells: What will run.
        cpus: Threads of a cell.
        memory: Bytes that the largest cell needs.
        workers: How many to start; None for one per GPU, or as many as cores and memory have room for.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}: at least 1 is needed")
    base = {"OMP_NUM_THREADS": str(cpus), "TOKENIZERS_PARALLELISM": "false"}
    # A model that is spread over GPUs, or placed by hand, needs to see all of them.
    devices = {cell.request.model.device for cell in cells}
    placed = any(cell.request.model.device_map is not None for cell in cells) or any(":" in name for name in devices)
    gpus = [] if devices == {"cpu"} else visible_gpus()
    if gpus and placed:
        return [base] * (workers or 1)
    if gpus:
        count = workers or len(gpus)
        return [{**base, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
    room = max(1, int(0.8 * free_memory() // max(memory, 1)))
    return [base] * (workers or max(1, min(usable_cores() // cpus, room)))


def visible_gpus() -> list[str]:
    """Names of this machine's GPUs as ``CUDA_VISIBLE_DEVICES`` takes them."""
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [name.strip() for name in listed.split(",")] if listed else [str(i) for i in range(count)]
    return names[:count]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(*, root: Path = Path("/")) -> int:
    """Bytes of main memory that can still be taken here, in a container too; a guess where the system does not tell.

    Args:
        root: Where ``proc`` and ``sys`` are.
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
    """Bytes left to each control group around this process that has a limit, by version 2 and 1."""
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
        # Inside a container its own group is often the mount itself, whatever the name says.
        inner = PurePosixPath(name.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = root / mount / group
            limit, usage = _number(folder / limited), _number(folder / used)
            if limit is not None and usage is not None:
                # Files that were read count as used, but give way, as they do in MemAvailable.
                yield limit - usage + (_number(folder / "memory.stat", cached) or 0)


def _number(path: Path, name: str = "") -> int | None:
    """The number behind a name in one of the system's files, or the only one in it; None where there is none."""
    try:
        found = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def memory_needed(cell: Cell) -> int:
    """Bytes of main memory that a cell needs, roughly: its weights as they will be, and the rest of a worker.

    Files mostly hold two bytes a weight, GGUF files about one. Of a model that is not here, nothing is known.
    """
    model = cell.request.model
    name = os.fspath(model.model)
    size = {"float64": 8, "float32": 4}.get(model.dtype, 2)
    if name == EMBEDDED:
        return _BASE + 135_000_000 * size
    path = Path(name).expanduser()
    if path.is_file():
        return _BASE + path.stat().st_size * size
    return _BASE + sum(file.stat().st_size for file in path.glob("*.safetensors")) * size // 2
