"""End-to-end: the examples of CONTRIBUTING run and do what its text says."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import wherewhat
from conformance.tiny_models import build
from conformance.variants import VARIANTS
from helpers.pages import ROOT, run_page
from helpers.tolerance import rounding
from wherewhat import lengths
from wherewhat.lengths import registry as lengths_registry
from wherewhat.measures import measurement as registry

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """All examples, run one after the other as one module, with the measurements and variants that they add."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_known", dict(registry.measurements()))
        patch.setattr(lengths_registry, "_registered", {})
        before = dict(VARIANTS)
        yield run_page(ROOT / "CONTRIBUTING.md")
        VARIANTS.clear()
        VARIANTS.update(before)


def test_a_measurement(page):
    model, inputs = build("llama").model, build("llama").inputs()
    tokens = inputs["input_ids"].shape[1]
    found = registry.find_measurement("locality")
    assert isinstance(found, page.Locality)
    layers = []
    with torch.no_grad(), wherewhat.capture(model, lambda layer: layers.append(found.measure(layer, found.config(3)))):
        model(**inputs)
    for scores, layer in zip(layers, wherewhat.attention(model, inputs["input_ids"][:1]), strict=True):
        mass = scores.heads["local_mass"]
        near = torch.arange(tokens)[:, None] - torch.arange(tokens) <= 3
        expected = (layer.pattern()[0] * near).sum(-1).mean(-1)
        torch.testing.assert_close(mass, expected, atol=rounding(tokens), rtol=0)
        assert ((mass > 0) & (mass <= 1 + rounding(tokens))).all()
        assert 0 < scores.whole["local_mass_uniform"] < 1
    assert [scores.layer for scores in layers] == list(range(len(layers)))


def test_a_length_method(page):
    # The longest sum has 128 terms, in the MLP.
    atol = rounding(128) * float(page.original.abs().max())
    torch.testing.assert_close(page.same, page.original, atol=atol, rtol=0)
    torch.testing.assert_close(page.other[:, :16], page.original[:, :16], atol=atol, rtol=0)
    assert (page.other - page.original).abs().max() > 1e-3
    assert lengths.length_methods()[-1] == "leaky-rerope"
    summaries = {summary.metric.name for summary in page.result.summary()}
    assert {"loss_beyond_leaky-rerope", "loss_rise_leaky-rerope"} <= summaries


def test_a_model_family(page):
    assert page.row.status == "proved"


def test_a_length_method_by_loops(page):
    method = page.LeakyReRoPE(window=5, leak=3.0)
    tiny, layers = build("llama"), []

    def compare(layer: wherewhat.LayerAttention) -> None:
        layers.append(layer.layer)
        size = layer.q.norm(dim=-1).max() * layer.k.norm(dim=-1).max() * layer.scale  # of the sum's terms together
        atol = rounding(layer.q.shape[-1]) * float(size)
        torch.testing.assert_close(method.scores(layer, slice(0, 9)), by_loops(layer, 9), atol=atol, rtol=0)

    def by_loops(layer: wherewhat.LayerAttention, n: int) -> torch.Tensor:
        logits = torch.full((1, layer.heads, n, layer.m), -torch.inf)
        for i in range(n):
            for j in range(i + 1):
                far = i - j if i - j < 5 else 5 + (i - j - 5) / 3
                q = layer.rotation.rotate(layer.q[:, :, i : i + 1], torch.tensor([float(far)]))
                k = layer.rotation.rotate(layer.k[:, :, j : j + 1], torch.tensor([0.0]))
                k = k.repeat_interleave(layer.heads // layer.kv_heads, 1)
                logits[:, :, i, j] = (q * k).sum(-1)[..., 0] * layer.scale
        return logits

    with torch.no_grad(), wherewhat.capture(tiny.model, compare):
        tiny.model(**tiny.inputs(length=9))
    assert layers
