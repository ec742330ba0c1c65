"""End-to-end: the examples of CONTRIBUTING run and do what its text says."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import wherewhat
from conformance.tiny_models import build
from conformance.variants import VARIANTS
from wherewhat.measures import registry

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: ([\w-]+) -->\n\n```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def run_example(tmp_path, monkeypatch) -> Callable[..., ModuleType]:
    """Run examples, one after the other, as one module."""

    def run(*names: str) -> ModuleType:
        file = tmp_path / f"example_{names[0].replace('-', '_')}.py"
        file.write_text("\n\n".join(EXAMPLES[name] for name in names), "utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        spec.loader.exec_module(module)
        return module

    return run


def test_every_python_block_is_an_example():
    assert len(EXAMPLES) == TEXT.count("```python")


def test_a_measurement(run_example, monkeypatch):
    monkeypatch.setattr(registry, "_known", dict(registry.measurements()))
    module = run_example("measurement")
    model = build("llama").model
    found = registry.find_measurement("locality")
    assert isinstance(found, module.Locality)
    layers = []
    with torch.no_grad(), wherewhat.capture(model, lambda layer: layers.append(found.measure(layer, found.config(3)))):
        model(**build("llama").inputs())
    for scores in layers:
        mass = scores.heads["local_mass"]
        assert ((mass > 0) & (mass <= 1 + 1e-6)).all()
        assert 0 < scores.whole["local_mass_uniform"] < 1
    assert [scores.layer for scores in layers] == list(range(len(layers)))


def test_a_length_method(run_example):
    module = run_example("length-method", "length-method-use")
    torch.testing.assert_close(module.same, module.original, atol=2e-5, rtol=0)
    torch.testing.assert_close(module.other[:, :16], module.original[:, :16], atol=2e-5, rtol=0)
    assert (module.other - module.original).abs().max() > 1e-3


def test_a_length_method_by_loops(run_example):
    method = run_example("length-method").LeakyReRoPE(window=5, leak=3.0)
    tiny, layers = build("llama"), []

    def compare(layer: wherewhat.LayerAttention) -> None:
        layers.append(layer.layer)
        torch.testing.assert_close(method.scores(layer, slice(0, 9)), by_loops(layer, 9), atol=2e-5, rtol=0)

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


def test_a_model_family(run_example, capsys):
    before = dict(VARIANTS)
    try:
        row = run_example("model-family").row
    finally:
        VARIANTS.clear()
        VARIANTS.update(before)
    assert row.status == "proved"
    printed = re.search(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert printed is not None
    assert capsys.readouterr().out.split() == printed[1].split()
