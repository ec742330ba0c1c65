"""Far keys with the largest content. Identity: rotations and bounds. Brute force: kernels, where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from helpers.layers import random_layer
from wherewhat.caches.attention import rotated_to
from wherewhat.captures.attention import LayerAttention
from wherewhat.lengths import near_far
from wherewhat.lengths.near_far import NearFar, judged_queries
from wherewhat.lengths.selection import add_far_keys, plane_factors, sketch_plan, turns
from wherewhat.numerics import has_triton

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(torch.device("cuda")), reason="there is no GPU with Triton here"
)
DATA = ["random", "low-rank", "clustered"]


def layer(data: str, n: int, *, seed: int = 1, **options) -> LayerAttention:
    """A layer in bfloat16, whose queries and keys have the given structure and a mean."""
    attention = random_layer(n, dtype=torch.bfloat16, **options)
    generator = torch.Generator().manual_seed(seed)
    d = attention.rot_q.shape[-1]
    basis = torch.randn(6, d, generator=generator)

    def changed(x: torch.Tensor) -> torch.Tensor:
        if data == "random":
            return x
        if data == "low-rank":
            some = torch.randn(*x.shape[:-1], 6, generator=generator) @ basis + 2
        else:
            some = basis[torch.randint(6, x.shape[:-1], generator=generator)]
        return (some.to(x.device) + 0.2 * x.float()).to(x.dtype)

    return replace(attention, rot_q=changed(attention.rot_q), rot_k=changed(attention.rot_k))


def test_turns_equal_rotations():
    """A turn by complex factors and two rotations by cosines have errors of ``40 ε`` from angles up to 40."""
    close = {"atol": 1e-4, "rtol": 0}
    for layout in ("half", "interleaved", None):
        attention = random_layer(40, d=16, heads=3, kv_heads=1, layout=layout)
        i = torch.arange(40)
        capped = turns(attention).apply(
            attention.rot_q, slice(0, 40), plane_factors(attention.rotation, torch.tensor([9]), 16)
        )
        torch.testing.assert_close(capped, rotated_to(attention, attention.rot_q, i, torch.full_like(i, 9)), **close)
        averaged = turns(attention).apply(
            attention.rot_q[:, :, 3::5], slice(3, 40, 5), plane_factors(attention.rotation, torch.arange(10), 16)
        )
        expected = judged_queries(attention, NearFar(window=9), "averaged", attention.rot_q, i)
        torch.testing.assert_close(averaged, expected[:, :, 3::5], **close)


def sketched(x: torch.Tensor, order: torch.Tensor, width: int) -> torch.Tensor:
    """Sketches of queries or keys ``(rows, d)`` that were shifted and scaled, as the kernel rounds them."""
    x = x[:, order.long()]
    rest = x[:, width - 1 :].square().sum(-1)
    bound = (rest + 1.25 * 2**-10 * (x.square().sum(-1) + 2**-8)).sqrt() * (1 + 2**-10)
    return torch.cat([x[:, : width - 1], bound[:, None]], -1).half()


def test_products_of_sketches_are_upper_bounds():
    for data, width in product(DATA, (16, 32)):
        attention = layer(data, 300, d=32, heads=4, kv_heads=2)
        q, k = attention.rot_q.float(), attention.rot_k.float()
        plan = sketch_plan(q[:, [1, 2]], k, torch.tensor([0, 1]), width=width)
        for kv, head in ((0, 1), (1, 2)):
            queries = q[0, head] * plan.of_queries[kv]
            unit = 8 / queries.norm(dim=-1, keepdim=True)
            keys = k[0, kv] - plan.mean[kv]
            exact = (unit * plan.key_units[kv] * q[0, head]).double() @ keys.double().T
            parts = (sketched(x, plan.order[kv], width).double() for x in (queries * unit, keys * plan.of_keys[kv]))
            bounds = next(parts) @ next(parts).T
            assert bool((bounds >= exact).all()), (data, width)
            assert float((bounds - exact).mean()) < (3.0 if width == 32 else 40.0), (data, width)


def test_width_follows_the_energy():
    generator = torch.Generator().manual_seed(0)
    few = torch.cat([torch.ones(20), torch.full((108,), 1e-4)])
    for energy, width in ((few, 32), (torch.ones(128), 128)):
        q, k = (torch.randn(1, 2, 50, 128, generator=generator) * energy.sqrt() for _ in range(2))
        assert sketch_plan(q, k, torch.tensor([0, 1])).width == width


def by_all_logits(attention, output, lse, *, heads, first, window, top, chosen, seen):
    """Output after adding far keys, from all logits."""
    output, n, d = output.float().clone(), attention.n, attention.rot_q.shape[-1]
    group, back, device = attention.heads // attention.kv_heads, turns(attention), output.device
    still = plane_factors(None, torch.zeros(1, device=device), d)
    keys = back.apply(attention.rot_k, slice(0, n), still).double()
    judged, looked = (back.apply(attention.rot_q, slice(0, n), factors).double() for factors in (chosen, seen))
    i = torch.arange(n, device=device)
    allowed = (i[:, None] - i >= window) & (i >= first)
    for head in heads:
        k, v = keys[:, head // group], attention.value[:, head // group].double()
        contents = (judged[:, head] @ k.mT).masked_fill(~allowed, -torch.inf)
        best = contents.topk(min(top, n)).indices
        scores = (looked[:, head] @ k.mT * attention.scale).masked_fill(~allowed, -torch.inf).gather(-1, best)
        weights = torch.cat([lse[:, head, :, None].double(), scores], -1).softmax(-1)
        values = v[torch.arange(len(v), device=device)[:, None, None], best]
        output[:, head] = weights[..., :1] * output[:, head] + (weights[..., 1:, None] * values).sum(-2)
    return output


@needs_gpu
@pytest.mark.parametrize(
    ("n", "window", "first", "top", "shape", "layout"),
    [
        (1500, 200, 4, 8, {"d": 128, "heads": 8, "kv_heads": 2}, "half"),
        (777, 50, 1, 16, {"d": 64, "heads": 3, "kv_heads": 3, "batch": 2}, "interleaved"),
        (600, 64, 7, 5, {"d": 80, "heads": 4, "kv_heads": 1}, None),
        (300, 290, 2, 16, {"d": 32, "heads": 2, "kv_heads": 1}, "half"),
    ],
)
def test_search_finds_the_largest(n, window, first, top, shape, layout, monkeypatch):
    monkeypatch.setattr("wherewhat.lengths.selection._CHUNK", 512)
    for data in DATA:
        attention = layer(data, n, layout=layout, device="cuda", **shape)
        batch, heads, _, d = attention.rot_q.shape
        generator = torch.Generator("cuda").manual_seed(3)
        output = torch.randn(batch, heads, n, d, device="cuda", generator=generator)
        options = {
            "heads": tuple(range(0, heads, 2)), "first": first, "window": window, "top": top,
            "chosen": plane_factors(attention.rotation, torch.arange(window + 1, device="cuda"), d),
            "seen": plane_factors(attention.rotation, torch.tensor([window], device="cuda"), d),
        }  # fmt: skip
        lse = torch.randn(batch, heads, n, device="cuda", generator=generator)
        expected = by_all_logits(attention, output, lse, **options)
        add_far_keys(attention, output, lse, **options)
        wrong = (output - expected).abs().amax(-1) > 1e-3
        # Where two contents differ by less than float32 resolves, either key may be chosen.
        assert float(wrong.double().mean()) < 2e-3, data


@needs_gpu
def test_method_agrees_with_blocks(monkeypatch):
    attention = layer("random", 900, d=64, heads=4, kv_heads=2, device="cuda")
    for options in ({}, {"chosen": "capped"}, {"seen": "averaged"}, {"distance": 30}):
        method = NearFar(window=100, **options)
        fast = method.attend(attention)
        with monkeypatch.context() as patch:
            patch.setattr(near_far, "can_search", lambda *_: False)
            difference = (fast.float() - method.attend(attention).float()).abs()
        # In half precision, a few queries choose another key of almost the same content.
        assert float((difference.amax(-1) > 0.05).double().mean()) < 0.01, options
