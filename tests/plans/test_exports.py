"""Exports: files by the schemas of engines; a rebuilt model equals a dense mask; what cannot be carried is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import yaml

from helpers.capture import dense_logits, proved, shared, tiny, tokens
from helpers.tolerance import rounding
from wherewhat.caches.limited_cache import LimitedLayer, planned
from wherewhat.caches.plan import Plan, fingerprint, plannable
from wherewhat.errors import ConfigError, MeasureError, StoreError
from wherewhat.plans import exports as module
from wherewhat.plans.exports import KINDS, compare_overrides, export_paths, export_plan
from wherewhat.plans.memory import cache_use, describe_use

WINDOW = 8  # that of the tiny models' own layers
HONOURING = ("qwen2", "gemma2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3", "smollm3", "ministral")))


def layer_plan(family, *, sinks=0, window=WINDOW, unit="layer"):
    model, proof = proved(family)
    layers = plannable(proof)
    full = {layer: (0,) * (number % 2) for number, layer in enumerate(layers)}
    return Plan(family, fingerprint(model), window, sinks, layers, full, unit)


def written(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("family", HONOURING)
def test_a_model_loaded_with_the_exported_fields_equals_a_dense_mask(family, tmp_path):
    """Brute force, through the files of a saved model; one more or less key of the window is seen."""
    model, plan, ids = shared(family), layer_plan(family), tokens(33)
    export = export_plan(plan, {"transformers": tmp_path / "fields.json"}, model=model).provenance["exports"]
    fields = json.loads((tmp_path / "fields.json").read_text())
    assert len(fields["layer_types"]) == model.config.num_hidden_layers
    assert set(fields["layer_types"]) == {"full_attention", "sliding_attention"}
    model.save_pretrained(tmp_path / "model")
    kept = {"attn_implementation": model.config._attn_implementation}
    other = type(model).from_pretrained(tmp_path / "model", **fields, **kept).eval()
    with torch.no_grad():
        logits = other(input_ids=ids, use_cache=False).logits
    expected = dense_logits(model, ids, plan)
    within = min(1e-5, rounding(256)) * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, atol=within, rtol=0)
    for window in (WINDOW - 1, WINDOW + 1):
        wrong = dense_logits(model, ids, dataclasses.replace(plan, window=window))
        assert (wrong - expected).abs().max() > 100 * within
    assert "gives the logits of the plan" in export[0]["check"]
    record = json.loads((tmp_path / "fields.json.check.json").read_text())
    assert record["check"] == export[0]["check"]
    assert record["fingerprint"] == plan.fingerprint


def test_models_that_ignore_the_fields_or_rotate_otherwise_are_refused(tmp_path):
    with pytest.raises(MeasureError, match="LlamaForCausalLM ignores layer_types in transformers") as error:
        export_plan(layer_plan("llama"), {"transformers": tmp_path / "x"}, model=shared("llama"))
    assert "\n" not in str(error.value)
    for kind in ("transformers", "vllm"):
        with pytest.raises(MeasureError, match="its sliding layers also have another rotation"):
            export_plan(layer_plan("gemma3_text"), {kind: tmp_path / "x"}, model=shared("gemma3_text"))
    assert not written(tmp_path)


def test_other_fields_than_those_of_the_plan_are_refused():
    model, proof = proved("qwen2")
    plan = layer_plan("qwen2")
    right = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    right |= {"use_sliding_window": True}
    assert not compare_overrides(model, proof, plan, right).ignored
    assert compare_overrides(model, proof, plan, right | {"layer_types": ["full_attention"] * 4}).ignored
    for wrong in ({"sliding_window": WINDOW + 1}, {"layer_types": right["layer_types"][::-1]}):
        with pytest.raises(MeasureError, match="differs from the plan by"):
            compare_overrides(model, proof, plan, right | wrong)
    with pytest.raises(MeasureError, match="cannot be built again with layer_types"):
        compare_overrides(model, proof, plan, right | {"layer_types": ["nonsense"] * 4})
    every = dataclasses.replace(plan, full=dict.fromkeys(plan.layers, (0,)))
    assert not compare_overrides(model, proof, every, {"layer_types": ["full_attention"] * 4}).ignored


def test_every_export_has_the_schema_of_its_engine(tmp_path):
    plan = layer_plan("llama")
    paths = {kind: tmp_path / kind for kind in KINDS if kind != "transformers"}
    plan = export_plan(plan, paths, model=shared("llama"))
    assert [row["export"] for row in plan.provenance["exports"]] == list(paths)
    types = ["sliding_attention", "full_attention"] * 2
    assert json.loads(paths["vllm"].read_text()) == {"layer_types": types, "sliding_window": WINDOW}
    windows = {"kv_cache_config": {"max_attention_window": [WINDOW, 128, WINDOW, 128]}}
    assert yaml.safe_load(paths["tensorrt-llm"].read_text()) == windows
    fields = {"sliding_window_size": WINDOW, "keep_first": 0, "force_fa_decode": False, "non_sliding_layers": [1, 3]}
    assert json.loads(paths["swaa"].read_text()) == fields
    for kind in ("duoattention", "kvpress"):
        assert written(paths[kind]) == ["check.json", "config.json", "full_attention_heads.tsv"]
        pattern = np.loadtxt(paths[kind] / "full_attention_heads.tsv", ndmin=2)
        assert (pattern > 0.5).tolist() == [[False] * 2, [True] * 2] * 2
        assert json.loads((paths[kind] / "config.json").read_text()) == {"sink_size": 0, "recent_size": WINDOW}


def test_fields_of_qwen2_and_own_windows(tmp_path):
    path = tmp_path / "vllm.json"
    export_plan(layer_plan("qwen2"), {"vllm": path}, model=shared("qwen2"))
    fields = json.loads(path.read_text())
    # Asserted by vLLM's Qwen2.
    assert (fields["max_window_layers"], fields["use_sliding_window"]) == (4, True)
    own = [layer.window for layer in proved("gemma2")[1].layers]
    export_plan(layer_plan("gemma2"), {"tensorrt-llm": path}, model=shared("gemma2"))
    listed = yaml.safe_load(path.read_text())["kv_cache_config"]["max_attention_window"]
    assert [x for x, window in zip(listed, own, strict=True) if window] == [x for x in own if x]
    with pytest.raises(ConfigError, match=rf"has one window for all layers.*make it with --window {WINDOW}"):
        export_plan(layer_plan("gemma2", window=5), {"vllm": path}, model=shared("gemma2"))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("vllm", {"unit": "group"}, "vllm limits whole layers, and this plan chooses groups: .*--unit layer"),
        ("swaa", {"unit": "head"}, "swaa limits whole layers, and this plan chooses heads"),
        ("duoattention", {"unit": "head"}, "duoattention limits key heads, and this plan chooses query heads"),
        ("transformers", {"sinks": 2}, "transformers has no sinks, and this plan keeps the first 2 keys: .*--sinks 0"),
        ("vllm", {"sinks": 2}, "vllm has no sinks"),
        ("tensorrt-llm", {"sinks": 2}, "tensorrt-llm has no sinks"),
    ],
)
def test_wrong_units_and_sinks_are_refused_before_loading(kind, changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    plan = layer_plan("llama", **changes)
    with pytest.raises(ConfigError, match=message):
        export_plan(plan, {kind: tmp_path / "x"}, model="smollm2")
    assert not written(tmp_path)


def test_other_models_and_wrong_names_are_refused(tmp_path):
    plan, other = layer_plan("llama"), tiny("llama", seed=1)
    other.config._name_or_path = "None"  # as in a GGUF file that transformers has read
    with pytest.raises(MeasureError, match="and LlamaForCausalLM has other weights: make a plan of this model"):
        export_plan(plan, {"vllm": tmp_path / "x"}, model=other)
    with pytest.raises(ConfigError, match=r"swaa runs llama, .* is of type gemma2"):
        export_plan(layer_plan("gemma2"), {"swaa": tmp_path / "x"}, model=shared("gemma2"))
    with pytest.raises(ConfigError, match="has no kind 'vlm': did you mean 'vllm'"):
        export_paths(["vlm=x"])
    with pytest.raises(ConfigError, match="give KIND=FILE"):
        export_paths(["vllm"])
    with pytest.raises(ConfigError, match="vllm is given twice"):
        export_paths(["vllm=x", "vllm=y"])
    with pytest.raises(ConfigError, match="the same path"):
        export_paths(["vllm=x", "swaa=x"])
    with pytest.raises(StoreError, match="--export vllm"):
        export_paths({"vllm": tmp_path})
    assert not written(tmp_path)


def test_no_export_is_written_over_another_file(tmp_path):
    """Neither over the plan, nor over a file or record of another export, however its path is spelled."""
    saved = layer_plan("llama").save(tmp_path / "plan.json")
    content = saved.read_bytes()
    for name in ("plan.json", "there/../plan.json"):
        with pytest.raises(ConfigError, match="the plan and --export vllm have the same path"):
            export_plan(saved, {"vllm": tmp_path / name}, model=shared("llama"))
    for first, second in (
        (("vllm", "x.json"), ("swaa", "y/../x.json")),
        (("vllm", "x.json"), ("swaa", "x.json.check.json")),
        (("vllm", "x/config.json"), ("kvpress", "x")),
        (("kvpress", "x"), ("duoattention", "x")),
    ):
        with pytest.raises(ConfigError, match="have the same path"):
            export_paths({kind: tmp_path / name for kind, name in (first, second)})
    with pytest.raises(ConfigError, match="--triattention and --export vllm have the same path"):
        export_paths({"vllm": tmp_path / "x"}, others={"--file": None, "--triattention": tmp_path / "x"})
    assert saved.read_bytes() == content
    assert written(tmp_path) == ["plan.json"]


def real_bytes(cache):
    """Bytes of a cache's keys and values, without those that are reserved ahead."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LimitedLayer):
            spare = sum(x[:, :, layer.count :].nbytes for x in layer._all.tensors)
            total += layer.nbytes - spare
        else:
            total += layer.keys.nbytes + layer.values.nbytes
    return total


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "gpt_oss"])
@pytest.mark.parametrize("unit", ["layer", "group"])
def test_bytes_are_those_of_the_real_cache(family, unit):
    """With shared key heads, one key head per query head, and layers with a window of their own."""
    model, proof = proved(family)
    layers = plannable(proof)
    full = {layer: (0,) * (number % 2) for number, layer in enumerate(layers)}
    plan = Plan(family, fingerprint(model), 20, 3, layers, full, unit)
    for length in (100, 101):
        ids = tokens(length)
        with torch.no_grad():
            whole = real_bytes(model(input_ids=ids, use_cache=True).past_key_values)
            with planned(model, plan):
                small = real_bytes(model(input_ids=ids, use_cache=True).past_key_values)
        use = cache_use(model, proof, plan, context=length)
        assert (use["full"]["bytes"], use["plan"]["bytes"]) == (whole, small)
        assert use["share_of_cache"] == pytest.approx(small / whole)
        assert use["share_of_units"] == plan.share
        if length == 100:
            earlier = whole, small
    assert use["full"]["per_token"] == whole - earlier[0]
    assert use["plan"]["per_token"] == small - earlier[1]


def test_texts_that_fit_and_the_sentence():
    model, proof = proved("llama")
    plan = layer_plan("llama")
    weights = sum(x.nbytes for x in model.parameters())
    one = cache_use(model, proof, plan, context=64)
    assert one["full"]["texts"] is None
    assert "hold the caches" not in describe_use(one, "layer")
    use = cache_use(model, proof, plan, context=64, memory=weights + 5 * one["full"]["bytes"] + 1)
    assert use["full"]["texts"] == 5
    assert use["plan"]["texts"] == (5 * one["full"]["bytes"] + 1) // one["plan"]["bytes"]
    assert cache_use(model, proof, plan, memory=weights - 1)["full"]["texts"] == 0
    sentence = describe_use(use, "layer")
    assert "50% of the layers" in sentence
    assert "5 such texts" in sentence
    assert cache_use(model, proof, plan)["context"] == model.config.max_position_embeddings
