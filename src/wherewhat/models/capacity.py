"""Memory that a model needs, compared with what its files hold and with what is free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from wherewhat.boundary import MOST_LAYERS, size_in_words
from wherewhat.errors import LoadError

_LAYERS = re.compile(r"(num|n)_(\w+_)?layers?")


def check_layers(settings: Any, spec: str) -> None:
    """Refuse settings with more layers than any model has, since configs make lists of that length.

    Args:
        settings: Content of ``config.json``.
        spec: Model name for error messages.
    """
    waiting = [settings]
    while waiting:
        table = waiting.pop()
        if isinstance(table, list):
            waiting += table
        if not isinstance(table, dict):
            continue
        waiting += table.values()
        for name, value in table.items():
            if _LAYERS.fullmatch(name) and isinstance(value, int | float) and value > MOST_LAYERS:
                raise LoadError(f"the config of {spec!r} has {name} = {value}: at most {MOST_LAYERS:,} layers work")


def check_stored(parameters: int, files: list[Path], spec: str) -> None:
    """Refuse a model of which the files can hold only a small part, before it is allocated.

    Args:
        parameters: Number of parameters that the config describes.
        files: Files of weights.
        spec: Model name for error messages.
    """
    stored = sum(file.stat().st_size for file in files)
    if parameters > 8 * stored:  # every format of weights has at least one bit for each
        raise LoadError(
            f"config.json of {spec!r} describes {parameters:,} weights, of which {size_in_words(stored)} of files can "
            "hold only a part: the checkpoint does not fit its config"
        )


def check_memory(parameters: int, dtype: torch.dtype, device: torch.device | None, spec: str) -> None:
    """Refuse a model that is larger than the free memory.

    Args:
        parameters: Number of parameters.
        dtype: Their type in memory.
        device: The model's device; None for several, which is not checked.
        spec: Model name for error messages.
    """
    if device is None:
        return
    needed = parameters * dtype.itemsize
    found = {"main memory": free_memory()}
    if device.type == "cuda":
        found[f"the memory of {device}"] = torch.cuda.mem_get_info(device)[0]
    for place, free in found.items():
        if free is not None and needed > free:
            raise LoadError(
                f"{spec!r} needs {size_in_words(needed)} for its {parameters:,} weights, {size_in_words(free)} of "
                f"{place} are free: use a smaller dtype, or --device-map auto"
            )


def free_memory(*, root: Path = Path("/")) -> int | None:
    """Return the free bytes of main memory, also inside a container; None where the system does not report them.

    Args:
        root: Folder of ``proc`` and ``sys``.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    free = _free_pages() if available is None else available * 1024
    return None if free is None else max(0, min([free, *_left_to_groups(root)]))


def _free_pages() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


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
