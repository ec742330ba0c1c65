"""Identity: which calls are recorded as graphs, on a simulated GPU."""

from __future__ import annotations

import gc
from types import SimpleNamespace as Namespace
from weakref import WeakValueDictionary

import pytest
import torch

from wherewhat.measures import graphs
from wherewhat.measures.graphs import launched


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 1,600 bytes, so that graphs may hold 100, and the names of the functions that were recorded."""
    recorded = []

    class Properties:
        total_memory = 1600

    class Stream:
        cuda_stream = 0

    class Graph:
        held = 5

        def __init__(self, function, tensors, kept, pool):
            recorded.append(kept)
            self._function, self.pool = function, pool

        def __call__(self, tensors):
            return self._function(*tensors)

    class Pool:
        def __init__(self, device):
            pass

    monkeypatch.setattr(graphs, "_Graph", Graph)
    monkeypatch.setattr(graphs, "_Pool", Pool)
    monkeypatch.setattr(graphs, "_entries", {})
    monkeypatch.setattr(graphs, "_pools", WeakValueDictionary())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return recorded


def call(name, *, held=60, n=3):
    (found,) = launched(lambda x: (x + 1,), torch.zeros(n), key=name, held=held, kept=lambda: name)
    assert found.tolist() == [1.0] * n


def test_the_second_call_of_a_shape_is_recorded(gpu):
    for _ in range(3):
        call(None)  # without a key nothing is
        call("one", held=10)
        call("one", held=10, n=5)
    assert gpu == ["one", "one"]


def test_graphs_of_a_stream_share_memory(gpu):
    """That of intermediate results; arguments and results of 5 bytes are their own. The ninth has 60 + 8 · 5 = 100."""
    for name in range(10):
        for _ in range(3):
            call(name)
    assert gpu == list(range(9))
    pools = {id(entry.graph.pool) for entry in graphs._entries.values() if entry.graph is not None}
    assert len(pools) == len(graphs._pools) == 1


def test_streams_do_not_share_memory(gpu, monkeypatch):
    for stream in range(2):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: Namespace(cuda_stream=stream))
        for _ in range(2):
            call("one", held=40)
    assert gpu == ["one", "one"]  # 2 · (40 + 5) bytes
    assert len(graphs._pools) == 2


def test_a_pool_without_graphs_is_dropped(gpu, monkeypatch):
    for _ in range(2):
        call("one")
    assert len(graphs._pools) == 1
    monkeypatch.setattr(graphs, "_STALE", 0)
    call("two")
    gc.collect()
    assert len(graphs._pools) == 0


def test_no_more_memory_is_held_than_allowed(gpu, monkeypatch):
    for _ in range(2):
        call("large", held=101)
        call("one", held=98)
        call("two", held=10)
    assert gpu == ["one"]  # 98 + 5 bytes leave none for the next
    monkeypatch.setattr(graphs, "_STALE", 5)  # graphs that are not used make way
    for _ in range(8):
        call("two")
    assert gpu == ["one", "two"]
