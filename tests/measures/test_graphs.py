"""Identity: which calls are recorded as graphs, on a simulated GPU, and that they never wait for it."""

from __future__ import annotations

import gc
from types import SimpleNamespace as Namespace
from weakref import WeakValueDictionary

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.measures import graphs
from wherewhat.measures.axes.margins import bilinear_margins, blocked_margins
from wherewhat.measures.axes.solver import Band
from wherewhat.measures.graphs import launched
from wherewhat.measures.planes import PlanesConfig, statistics
from wherewhat.measures.swaps import dense, layer


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


META = torch.device("meta")
"""Tensors without numbers stand for those of a GPU."""


class NoWait(TorchDispatchMode):
    """Refuses what waits for a GPU: numbers that are read from it, sizes that depend on them, and copies."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if META in devices:
            indices = [x for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor)]
            by_mask = name in ("index", "index_put_") and any(x.dtype == torch.bool for x in indices)
            reads = name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
            waits = reads or by_mask
            assert not waits, f"{function} waits for the GPU"
        if name in ("_to_copy", "copy_"):
            assert len(devices | {kwargs.get("device") or args[0].device}) == 1, f"{function} waits for a copy"
        return function(*args, **kwargs)


def meta_layer(n, *, heads=4, kv_heads=2, d=8):
    q, k = (torch.empty(1, h, n, d, dtype=torch.bfloat16, device=META) for h in (heads, kv_heads))
    return LayerAttention(
        layer=0,
        name="meta",
        rot_q=q,
        rot_k=k,
        value=k,
        output=q,
        scale=0.5,
        mask=Mask(causal=True, device=META),
        rotation=Rotation("half", 0, torch.empty(d // 2, device=META), 1.0),
        positions=torch.empty(n, dtype=torch.int64, device=META),
    )


class Recorded(Exception):
    """A function was recorded."""


@pytest.mark.parametrize("taus", [(1e-3,), (1e-3, 1e-2, 0.1)])
@pytest.mark.parametrize("n", [512, 8192])
def test_recorded_swaps_do_not_wait(n, taus, monkeypatch):
    """In the second call, which is the one that is recorded: the first one keeps constants."""

    def record(function, *tensors, **_):
        function(*tensors)
        with NoWait():
            function(*tensors)
        raise Recorded

    def takes_all(counts, taus, device):
        return dense.takes_all(counts, taus, torch.device("cuda"))

    for limits, limit in ((dense._PANEL, 4096), (dense._SIDE, 1024)):  # few parts: tensors without numbers have no size
        monkeypatch.setitem(limits, "meta", limit)
    monkeypatch.setattr(layer, "launched", record)
    monkeypatch.setattr(layer, "has_graphs", lambda device: True)
    monkeypatch.setattr(layer, "takes_all", takes_all)
    queries = [n // 3, n // 2, n - 1]
    for sink_tokens in (0, 1):
        with pytest.raises(Recorded):
            layer.layer_swaps(meta_layer(n), queries, sink_tokens=sink_tokens, taus=taus, blocks=(2, 8, 32))


@pytest.mark.parametrize("n", [512, 8192])
def test_recorded_axes_do_not_wait(n):
    """The sums of a fit; the solve has kernels of its own."""
    attention = meta_layer(n)
    q, k = attention.rot_q[0], attention.rot_k[0].repeat_interleave(2, 0)
    with NoWait():
        bilinear_margins(q, k, n, dtype=torch.float32)
        blocked_margins(lambda i0, i1, j0, j1: (q[:, i0:i1] @ k[:, j0:j1].mT).float(), 4, Band(n, n, META), block=512)


@pytest.mark.parametrize("n", [512, 8192])
def test_recorded_planes_do_not_wait(n, monkeypatch):
    """The fit of what is left has kernels of its own."""

    def record(function, *tensors, **_):
        function(*tensors)
        with NoWait():
            assert len(function(*tensors)) == 5 + 9
        raise Recorded

    monkeypatch.setattr(statistics, "launched", record)
    monkeypatch.setattr(statistics, "on_host", lambda positions: torch.arange(n))
    monkeypatch.setattr(statistics, "fit_margins", lambda rest, terms, **_: Namespace(r=rest.squares))
    with pytest.raises(Recorded):
        statistics.layer_scores(meta_layer(n), PlanesConfig())


def test_what_waits_is_refused():
    x = torch.empty(3, device=META)
    waits = [lambda: int(x.amax()), lambda: bool(x.any()), x.cpu, x.nonzero, lambda: x[x > 0], x.tolist]
    waits += [
        lambda: x.index_put_((x > 0,), x[0]),
        lambda: torch.tensor([1.0]).to(META),
        lambda: x.copy_(torch.ones(3)),
    ]
    for wait in waits:
        with NoWait(), pytest.raises(AssertionError, match="waits"):
            wait()
