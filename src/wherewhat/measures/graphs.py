"""Functions of tensors whose kernels are launched at once, as CUDA graphs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
"""A function of tensors without synchronisation and random numbers."""

_SHARE = 16
"""All graphs together hold at most 1/16 of GPU memory."""

_STALE = 1000
"""Calls after which a graph that was not used is dropped."""


class _Graph:
    """A function recorded for tensors of given shapes.

    Its tensors are of no inference mode, since they are reused in any mode.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, function: Function, tensors: tuple[Tensor, ...], kept: object) -> None:
        self._kept = kept
        self._tensors = tuple(torch.empty_like(x).copy_(x) for x in tensors)
        self._graph = torch.cuda.CUDAGraph()
        device = tensors[0].device
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._found = function(*self._tensors)
            finally:
                self._graph.capture_end()
        current.wait_stream(side)

    def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the function returns, in new tensors."""
        for own, tensor in zip(self._tensors, tensors, strict=True):
            own.copy_(tensor)
        self._graph.replay()
        return tuple(x.clone() for x in self._found)


@dataclass
class _Entry:
    """What is known about a function: the graph, None before the second call, its bytes, and the last call."""

    graph: _Graph | None
    held: int
    used: int


_entries: dict[Hashable, _Entry] = {}
"""Entries by the shapes and options that functions were called with."""

_calls = itertools.count()
_lock = threading.Lock()


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
        held: Bytes of intermediate results, which a graph holds as long as it exists.
        kept: Returns the other tensors that the function reads, to be kept as long as the graph.
    """
    device = tensors[0].device
    if key is None or torch.cuda.is_current_stream_capturing():
        return function(*tensors)
    stream = torch.cuda.current_stream(device).cuda_stream
    precise = torch.backends.cuda.matmul.allow_tf32
    key = (key, tuple((x.shape, x.dtype) for x in tensors), device, stream, precise)
    with _lock:
        now = next(_calls)
        for other in [x for x, entry in _entries.items() if now - entry.used > _STALE]:
            del _entries[other]
        if key not in _entries:
            _entries[key] = _Entry(None, 0, now)
            return function(*tensors)
        entry = _entries[key]
        entry.used = now
        if entry.graph is None:
            limit = torch.cuda.get_device_properties(device).total_memory // _SHARE
            if held + sum(other.held for other in _entries.values()) > limit:
                return function(*tensors)
            entry.graph, entry.held = _Graph(function, tensors, kept()), held
        return entry.graph(tensors)
