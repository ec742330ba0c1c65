"""Brute force: the GPU kernels for all swaps against the same scores in float64.

Runs where there is Triton: on a GPU, or with ``TRITON_INTERPRET=1`` on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.kernels import kernel_device
from wherewhat.measures.swaps import dense
from wherewhat.measures.swaps.dense import score_all_swaps, score_block_sizes, score_softmax_swaps
from wherewhat.measures.swaps.logits import QueryLogits

DEVICE = kernel_device()
COUNTS = (70, 33, 1, 0, 64, 2)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}  # keys are float32; differences of weights are over τ


def draw(n=70, planes=5, *, groups=3, shared=True, seed=0, counts=COUNTS):
    """Queries from nearly uniform to sharp attention, whose keys are float32, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.complex128).to(torch.complex64)

    k, q = normal(groups, n, planes), normal(groups, len(counts), planes)
    q = q * torch.logspace(-2, 0.5, len(counts))[:, None]
    angles = torch.arange(n)[:, None] * torch.logspace(0, -3, planes)
    turns = torch.polar(torch.ones(()), angles)[None] if shared else torch.polar(torch.ones(()), normal(*k.shape).real)
    logits = (q.conj()[:, :, None] * (k * turns)[:, None]).sum(-1).real.double()
    hidden = torch.arange(n) >= torch.tensor(counts)[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
    query = QueryLogits(q, k, turns, counts, logits, weights, sink=3)
    single = {"q": q.to(DEVICE), "k": k.to(DEVICE), "turns": turns.to(DEVICE)}
    single |= {"logits": logits.to(DEVICE), "weights": weights.to(DEVICE)}
    double = {name: getattr(query, name).to(torch.complex128) for name in ("q", "k", "turns")}
    return replace(query, **single), replace(query, **double)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels for float32 on any device, as where there is a GPU."""
    monkeypatch.setattr(dense, "has_triton", lambda device: True)


@pytest.mark.parametrize(("width", "shared"), [(1, False), (5, True), (64, False), (96, True)])
@pytest.mark.parametrize("taus", [(1e-2,), (1e-2, 1e-3, 0.1)])
def test_scores_equal_those_in_float64(width, shared, taus):
    """One plane, and tiles of planes: some padded, some whole, some in two parts."""
    query, exact = draw(planes=width, shared=shared)
    for sink in (0, 3, 66):
        (found, without), (expected, expected_without) = (
            score_all_swaps(replace(x, sink=sink), taus=taus) for x in (query, exact)
        )
        for name, values in vars(expected).items():
            torch.testing.assert_close(
                getattr(found, name).cpu(), values, **TOLERANCE, msg=lambda x, n=name: f"{n} {x}"
            )
        torch.testing.assert_close(without.cpu(), expected_without, **TOLERANCE)


@pytest.mark.parametrize("width", [1, 40])
def test_scores_of_blocks_equal_those_in_float64(width):
    query, exact = draw(planes=width)
    sizes = (2, 5, 16, 32)
    found, expected = (score_block_sizes(x, 1e-2, sizes) for x in (query, exact))
    assert found.isnan().tolist() == expected.isnan().tolist()
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCE)
    (found, without), (expected, expected_without) = (score_all_swaps(x, block=5) for x in (query, exact))
    torch.testing.assert_close(found.s_pos.cpu(), expected.s_pos, **TOLERANCE)
    torch.testing.assert_close(without.cpu(), expected_without, **TOLERANCE)


def test_scores_of_many_keys_equal_those_in_float64():
    """In several parts of factors and many tiles."""
    counts = (300, 129)
    query, exact = draw(300, 3, groups=1, counts=counts)
    (found, _), (expected, _) = (score_all_swaps(x, taus=(1e-3, 1e-2)) for x in (query, exact))
    for name, values in vars(expected).items():
        torch.testing.assert_close(getattr(found, name).cpu(), values, **TOLERANCE)


def test_factors_in_parts_equal_those_at_once(monkeypatch):
    from wherewhat.measures.swaps import dense_cuda

    query, _ = draw()
    at_once, _ = score_all_swaps(query)
    monkeypatch.setattr(dense_cuda, "_PART", 16)
    in_parts, _ = score_all_swaps(query)
    for name, values in vars(at_once).items():
        torch.testing.assert_close(getattr(in_parts, name), values, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("width", [1, 20])
def test_swaps_without_weight_are_left_out(width):
    """Of keys that have neither a large nor a small weight nothing is read, not even NaN."""
    query, _ = draw(300, width, groups=1, counts=(300, 300))
    weights = torch.linspace(1e-5, 2e-5, 300, dtype=torch.float64)
    weights[150:] += 1e-2
    weights[-1] = 0.3
    query = replace(query, weights=weights.to(DEVICE).expand(1, 2, -1).contiguous(), sink=0)
    k = query.k.clone()
    k[:, 170:250] = torch.nan
    (found, _), (expected, _) = (score_all_swaps(x) for x in (replace(query, k=k), query))
    for name, values in vars(expected).items():
        assert bool(values.isfinite().all())
        assert torch.equal(getattr(found, name), values)


@pytest.mark.parametrize("largest", [1.0, 900.0])
def test_softmax_with_and_without_the_sink_equals_two_calls(largest):
    """Also where the sink has all the weight that float64 can tell."""
    query, exact = draw(planes=1, shared=False)
    logits = query.logits.clone()
    logits[..., 0] += largest
    found = score_softmax_swaps(replace(query, logits=logits), 1e-2).cpu()
    exact = replace(exact, logits=logits.cpu())
    for columns, part in ((slice(0, 2), replace(exact, sink=0)), (slice(2, 4), exact.without_sink())):
        hidden = torch.arange(part.logits.shape[-1]) >= torch.tensor(part.counts)[:, None]
        weights = part.logits.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
        expected, _ = score_all_swaps(replace(part, weights=weights), taus=(1e-2,))
        both = torch.cat([expected.s_pos, expected.s_sym], -1)
        torch.testing.assert_close(found[..., columns], both, **TOLERANCE)
