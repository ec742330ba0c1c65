"""Identity: which calls are recorded as graphs, on a simulated GPU."""

from __future__ import annotations

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
        def __init__(self, function, tensors, kept):
            recorded.append(kept)
            self._function = function

        def __call__(self, tensors):
            return self._function(*tensors)

    monkeypatch.setattr(graphs, "_Graph", Graph)
    monkeypatch.setattr(graphs, "_entries", {})
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


def test_no_more_memory_is_held_than_allowed(gpu, monkeypatch):
    for name in ("one", "two", "one", "two", "two"):
        call(name)
    assert gpu == ["one"]  # 60 of 100 bytes
    for _ in range(2):
        call("large", held=101)
        call("small", held=40)
    assert gpu == ["one", "small"]
    monkeypatch.setattr(graphs, "_STALE", 5)  # graphs that are not used make way
    for _ in range(8):
        call("two")
    assert gpu == ["one", "small", "two"]
