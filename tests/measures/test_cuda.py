"""Brute force: measurements of layers on a GPU against the CPU. Runs where there is a GPU and Triton."""

from __future__ import annotations

import pytest
import torch

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.measures.distance import DistanceConfig, controlled
from wherewhat.measures.planes import PlanesConfig
from wherewhat.measures.planes import statistics as planes
from wherewhat.measures.split import SplitConfig
from wherewhat.measures.split.logits import joined, split_layer
from wherewhat.measures.tensors import centred_ranks
from wherewhat.scores import PendingCopies, Scores, on_cpu

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)


@pytest.mark.parametrize("length", [1, 7, 129, 512, 5000])
def test_ranks_equal_those_on_the_cpu(length):
    """Of different numbers and of ties, all visible or not."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(3, 4, length, generator=generator, dtype=torch.float64)
    visible = torch.rand(3, 1, length, generator=generator) < 0.7
    visible[0], visible[1, :, length // 2 :] = True, False
    for values in (x, (3 * x).round()):
        assert torch.equal(centred_ranks(values.cuda()).cpu(), centred_ranks(values))
        assert torch.equal(centred_ranks(values.cuda(), visible.cuda()).cpu(), centred_ranks(values, visible))


def layer(device):
    """Four texts of 300 tokens in a layer with four query heads and two key heads."""
    generator = torch.Generator().manual_seed(0)
    rot_q, rot_k = (torch.randn(4, heads, 300, 32, generator=generator).to(device) for heads in (4, 2))
    rotation = Rotation("half", 0, 1000.0 ** (-torch.arange(16) / 16), 1.0)
    return LayerAttention(
        layer=0,
        name="attention",
        rot_q=rot_q + rot_q[:1, :, :1],
        rot_k=rot_k + rot_k[:1, :, :1],
        value=rot_k,
        output=rot_q.transpose(1, 2),
        scale=0.2,
        mask=Mask(causal=True, device=torch.device(device)),
        rotation=rotation,
        positions=torch.arange(300, device=device),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: controlled.layer_scores(x, DistanceConfig(reference=2)),
        lambda x: planes.layer_scores(x, PlanesConfig()),
        lambda x: [split_layer(x, SplitConfig())],
    ],
    ids=["distance", "planes", "split"],
)
def test_layers_equal_those_on_the_cpu_without_synchronisation(function):
    """Queries and keys before rotation are float32, with its rounding; near ties may change places in ranks."""
    expected = [Scores(layers=[scores]) for scores in function(layer("cpu"))]
    on_gpu = layer("cuda")
    for _ in range(2):  # compiles kernels, keeps what is copied once, and records graphs
        function(on_gpu)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = on_cpu(
                [Scores(layers=[scores]) for scores in function(on_gpu)], pending=(pending := PendingCopies())
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    pending.wait()
    for ours, theirs in zip(found, expected, strict=True):
        (ours,), (theirs,) = ours.layers, theirs.layers
        for name, values in theirs.heads.items():
            torch.testing.assert_close(ours.heads[name], values, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
        for name, column in theirs.curves.items():
            torch.testing.assert_close(
                ours.curves[name].values, column.values, rtol=1e-3, atol=1e-4, equal_nan=True, msg=name
            )
    if "document" in next(iter(theirs.curves.values())).axes:
        assert joined([ours]).whole.keys() == joined([theirs]).whole.keys()
