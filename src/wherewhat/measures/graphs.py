"""Functions of tensors whose kernels are launched at once, as CUDA graphs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
"""A function of tensors without synchronisation and random numbers."""

_SHARE = 16
"""The graphs of all streams together hold at most 1/16 of GPU memory."""

_STALE = 1000
"""Calls after which a graph that was not used is dropped."""


class _Pool:
    """Memory for the intermediate results of all graphs of a stream, which are never replayed at the same time.

    Graphs may be replayed in any order, because each copies its results before the next one starts. They are recorded
    in one stream, since torch reuses the memory of a stream for that stream alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_pools: WeakValueDictionary[Hashable, _Pool] = WeakValueDictionary()
"""Pools by device and stream, kept by their graphs: torch does not accept the handle of a pool without graphs."""


class _Graph:
    """A function recorded for tensors of given shapes.

    Its tensors are of no inference mode, since they are reused in any mode.

    Attributes:
        held: Bytes of its arguments and results, which are its own.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, function: Function, tensors: tuple[Tensor, ...], kept: object, pool: _Pool) -> None:
        self._kept, self._pool = kept, pool
        self._tensors = tuple(torch.empty_like(x).copy_(x) for x in tensors)
        self._graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(tensors[0].device)
        pool.side.wait_stream(current)
        with torch.cuda.stream(pool.side):
            self._graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                self._results = function(*self._tensors)
            finally:
                self._graph.capture_end()
        current.wait_stream(pool.side)
        self.held = sum(x.nbytes for x in (*self._tensors, *self._results))

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the function returns, in new tensors."""
        for own, tensor in zip(self._tensors, tensors, strict=True):
            own.copy_(tensor)
        self._graph.replay()
        return tuple(x.clone() for x in self._results)


@dataclass
class _Entry:
    """What is known about a function.

    Attributes:
        stream: Device and stream that it was called on.
        used: Number of the last call.
        graph: The graph; None before the second call.
        held: Bytes of intermediate results of the graph, which it shares with those of the same stream.
    """

    stream: Hashable
    used: int
    graph: _Graph | None = None
    held: int = 0


_entries: dict[Hashable, _Entry] = {}
"""Entries by the shapes and options that functions were called with."""


def _memory(stream: Hashable, held: int) -> int:
    """Return the bytes of all graphs, with another one of a stream with ``held`` bytes of intermediate results."""
    largest: dict[Hashable, int] = {stream: held}
    own = 0
    for entry in _entries.values():
        if entry.graph is not None:
            largest[entry.stream] = max(entry.held, largest.get(entry.stream, 0))
            own += entry.graph.held
    return own + sum(largest.values())


_calls = itertools.count()
_lock = threading.Lock()


def has_graphs(device: torch.device) -> bool:
    """Return whether functions can be recorded on a device."""
    return device.type == "cuda"


def launched(
    function: Function, *tensors: Tensor, key: Hashable, held: int, kept: Callable[[], object] = tuple
) -> tuple[Tensor, ...]:
    """Return ``function(*tensors)``, with all its kernels launched at once from its second call on.

    Launches of a few hundred small kernels take longer than the kernels themselves in texts of a few thousand tokens.
    The first call with tensors of new shapes runs as usual, which compiles kernels and plans transforms; the second one
    is recorded as a CUDA graph, if there is memory for it beside other graphs.

    Args:
        function: Function without synchronisation, random numbers or other tensors than those of ``kept``.
        tensors: Tensors on one GPU.
        key: What else the kernels depend on; None to launch them one by one.
        held: Bytes of intermediate results. The graphs of a stream share the memory for them as long as one exists.
        kept: Returns the other tensors that the function reads, to be kept as long as the graph.
    """
    device = tensors[0].device
    if key is None or torch.cuda.is_current_stream_capturing():
        return function(*tensors)
    stream = device, torch.cuda.current_stream(device).cuda_stream
    precise = torch.backends.cuda.matmul.allow_tf32
    key = (key, tuple((x.shape, x.dtype) for x in tensors), stream, precise)
    with _lock:
        now = next(_calls)
        for other in [x for x, entry in _entries.items() if now - entry.used > _STALE]:
            del _entries[other]
        if key not in _entries:
            _entries[key] = _Entry(stream, now)
            return function(*tensors)
        entry = _entries[key]
        entry.used = now
        if entry.graph is None:
            if _memory(stream, held) > torch.cuda.get_device_properties(device).total_memory // _SHARE:
                return function(*tensors)
            pool = _pools.get(stream)
            if pool is None:
                pool = _pools[stream] = _Pool(device)
            entry.graph, entry.held = _Graph(function, tensors, kept(), pool), held
        return entry.graph(tensors)
