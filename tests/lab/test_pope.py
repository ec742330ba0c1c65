"""Brute force: PoPE's logits against its formula; identity: what its planes mean."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from helpers.lab import draw, spread
from helpers.tolerance import rounding, worst
from wherewhat_lab.block import MaskDrawer
from wherewhat_lab.config import LabConfig
from wherewhat_lab.model import LabModel

POPE = LabConfig(vocabulary=40, layers=2, heads=2, width=16, encoding="pope", dropout=0.0)


def with_phases(low=-2 * math.pi, high=0.0):
    model = spread(LabModel(POPE))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for block in model.blocks:
            block.phase.uniform_(low, high, generator=generator)
    return model


@torch.no_grad()
def by_formula(model, tokens):
    """Logits of the first layer, entry by entry."""
    config, block = model.config, model.blocks[0]
    d, n = config.head_width, tokens.shape[1]
    normed = block.norm(model.embed(tokens)).double()
    q, k, _ = functional.linear(normed, block.qkv.weight.double()).view(*tokens.shape, 3, config.heads, d).unbind(2)
    q, k = functional.softplus(q), functional.softplus(k)
    logits = torch.zeros(len(tokens), config.heads, n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            for f in range(d):
                angle = (j - i) * config.base ** (-f / d) + block.phase[:, f].double().clamp(-2 * math.pi, 0)
                logits[:, :, i, j] += q[:, i, :, f] * k[:, j, :, f] * angle.cos()
    return logits * d**-0.5


@torch.no_grad()
def test_equals_its_formula():
    """Phases outside their range are held at its ends."""
    for low, high in ((-2 * math.pi, 0.0), (-9.0, 3.0)):
        model, tokens = with_phases(low, high).double(), draw(n=9, batch=2)
        layer = model.attention(tokens)[0]
        assert layer.rot_q.shape == (2, 2, 9, 16)
        assert layer.value.shape == (2, 2, 9, 8)
        # Angles are float32: products with positions up to 8, and phases up to 2π.
        assert worst(layer.attn_scores(), by_formula(model, tokens)) < rounding(8 * 16)


def test_planes_hold_no_content_in_their_angles():
    layer = LabModel(POPE).attention(draw())[0]
    assert layer.rotation.planes == POPE.head_width
    torch.testing.assert_close(layer.rotation.inv_freq, 10_000 ** (-torch.arange(8) / 8), atol=0, rtol=1e-5)
    for x in (layer.q, layer.k):  # phases start at 0: before rotation, planes lie along their first dimension
        assert float(x[..., 0::2].min()) > 0
        assert float(x[..., 1::2].abs().max()) < 1e-5


def test_phases_are_learned():
    model = LabModel(POPE)
    assert all(not block.phase.any() for block in model.blocks)
    model(draw()).square().mean().backward()
    assert all(bool(block.phase.grad.any()) for block in model.blocks)


@torch.no_grad()
def test_last_token_alone_equals_all():
    model, tokens = with_phases().double(), draw()
    masks = MaskDrawer(model.config, batch=4, n=17).draw(torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), model(tokens, all_tokens=True)[:, -1], atol=1e-9, rtol=0)
    torch.testing.assert_close(model(tokens, masks=masks), model(tokens), atol=1e-9, rtol=0)
