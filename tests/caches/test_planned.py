"""Brute force: a plan, with and without its cache, equals attention under a dense mask; wrong plans are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from random import Random

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from fuzz.mutations import changed
from helpers.capture import dense_logits, proved, shared, tiny, tokens
from helpers.tolerance import rounding
from wherewhat.caches.limited_cache import LimitedLayer, planned
from wherewhat.caches.plan import LayerHeads, Plan, fingerprint, plannable
from wherewhat.errors import ConfigError, LoadError, MeasureError
from wherewhat.plans.exports import export_plan

# MHA, GQA, soft-cap with windows, sink columns with windows, windows, and two families with their own attention code.
FAMILIES = ("gpt_neox", "llama", "gemma2", "gpt_oss", "gemma3_text", "bloom", "gptj")
N = 33


def plan_of(family, *, unit="group", window=5, sinks=2):
    model, proof = proved(family)
    layers = plannable(proof)
    full = {layer: tuple(range(i % 2, count.units(unit), 2 + i)) for i, (layer, count) in enumerate(layers.items())}
    full[max(layers)] = ()
    return Plan(family, fingerprint(model), window, sinks, layers, full, unit)


def in_pieces(model, ids, pieces):
    """Logits of pieces of texts through the cache, and the cache."""
    cache, found, start = None, [], 0
    for count in pieces:
        given = {} if cache is None else {"past_key_values": cache}
        output = model(input_ids=ids[:, start : start + count], use_cache=True, **given)
        cache, start = output.past_key_values, start + count
        found.append(output.logits)
    assert start == ids.shape[1]
    return torch.cat(found, 1), cache


def close_to(expected, dtype=torch.float32):
    """Tolerance of logits after four layers of products of up to 64 terms, in units of the largest logit."""
    return {"atol": rounding(256, dtype) * float(expected.detach().abs().max()), "rtol": 0}


def cache_bytes(cache):
    """Memory of a cache of transformers, or of a plan, in bytes."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LimitedLayer):
            total += layer.nbytes
        else:
            total += sum(x.nbytes for x in (layer.keys, layer.values) if x is not None)
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_and_its_cache_equal_a_dense_mask(family):
    model, ids = shared(family), tokens(N, batch=2)
    for unit in ("group", "head"):
        plan = plan_of(family, unit=unit)
        expected = dense_logits(model, ids, plan)
        close = close_to(expected)
        with torch.no_grad(), planned(model, plan):
            torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, **close)
            pieces = [1] * N if unit == "group" else [3, 1, 11, 1, 17]
            decoded, cache = in_pieces(model, ids, pieces)
            torch.testing.assert_close(decoded, expected, **close)
        assert any(isinstance(layer, LimitedLayer) for layer in cache.layers) == (family not in ("bloom", "gptj"))


def test_any_window_number_of_sinks_and_share_of_groups():
    model, ids = shared("llama"), tokens(N)
    plans = [plan_of("llama", window=w, sinks=s) for w, s in ((1, 0), (1, 3), (40, 2), (8, 0), (16, 16))]
    every = {layer: tuple(range(count.groups)) for layer, count in plans[0].layers.items()}
    none, full = (dataclasses.replace(plan_of("llama"), full=x) for x in (dict.fromkeys(every, ()), every))
    for plan in (*plans, none, full):
        with torch.no_grad(), planned(model, plan):
            found = in_pieces(model, ids, [10, *[1] * (N - 10)])[0]
        expected = model(input_ids=ids).logits if plan is full else dense_logits(model, ids, plan)
        torch.testing.assert_close(found, expected, **close_to(expected), msg=lambda m, p=plan: f"{p}: {m}")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generation_equals_passes_without_a_cache(family):
    """In float64, where no two beams are as alike as rounding."""
    model, ids, plan = tiny(family, dtype=torch.float64), tokens(20), plan_of(family)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad(), planned(model, plan, other_weights=True):
        written = model.generate(ids, **options)
        beams = model.generate(ids, num_beams=3, **options)
        slow = model.generate(ids, num_beams=3, use_cache=False, **options)
    assert written.shape == (1, 32)
    assert torch.equal(written[0, 20:], dense_logits(model, written, plan)[0, 19:-1].argmax(-1))
    assert torch.equal(beams, slow)


def test_half_precision_and_eager_attention():
    ids, plan = tokens(N), plan_of("llama")
    for model in (tiny("llama", attn_implementation="eager"), tiny("llama", dtype=torch.bfloat16)):
        with torch.no_grad(), planned(model, plan):
            found = in_pieces(model, ids, [10, *[1] * (N - 10)])[0]
        expected = dense_logits(model, ids, plan)
        if model.dtype == torch.float32:
            torch.testing.assert_close(found, expected, **close_to(expected))
        else:  # each of some dozen operations rounds by half of ε
            torch.testing.assert_close(
                found, expected, atol=rounding(12, torch.bfloat16) * float(expected.abs().max()), rtol=0
            )


@torch.no_grad()
def test_a_cache_is_copied_and_continued_under_the_same_plan_only():
    model, ids, plan = shared("llama"), tokens(N), plan_of("llama")
    with planned(model, plan):
        expected = model(input_ids=ids, use_cache=False).logits[:, 20:]
        cache = model(input_ids=ids[:, :20]).past_key_values
        copied = copy.deepcopy(cache)
        found = model(input_ids=ids[:, 20:], past_key_values=copied).logits
    torch.testing.assert_close(found, expected, **close_to(expected))
    with planned(model, plan):
        first = model(input_ids=ids[:, 20:21], past_key_values=cache).logits
    torch.testing.assert_close(first, expected[:, :1], **close_to(expected))
    with pytest.raises(MeasureError, match="outside of the context"):
        model(input_ids=ids[:, 21:], past_key_values=cache)
    other_window = dataclasses.replace(plan, window=6)
    fewer_limits = dataclasses.replace(plan, full=plan.full | {0: tuple(range(plan.layers[0].groups))})
    for filled, read in ((plan, other_window), (fewer_limits, plan)):
        with planned(model, filled):
            cache = model(input_ids=ids[:, :20]).past_key_values
        with planned(model, read), pytest.raises(MeasureError, match="filled under another plan"):
            model(input_ids=ids[:, 20:], past_key_values=cache)


def test_cache_is_smaller_and_the_model_is_as_before():
    model, ids = shared("llama"), tokens(600)
    _, proof = proved("llama")
    layers = plannable(proof)
    plan = Plan("llama", fingerprint(model), 16, 4, layers, dict.fromkeys(layers, (0,)))
    before = model(input_ids=ids).logits
    with torch.no_grad(), planned(model, plan):
        small = model(input_ids=ids).past_key_values
    after = model(input_ids=ids)
    assert torch.equal(after.logits, before)
    assert type(after.past_key_values.layers[0]).__name__ == "DynamicLayer"
    whole = cache_bytes(after.past_key_values)
    # Half of the groups with 256 keys reserved ahead, and 20 keys of each other one.
    assert cache_bytes(small) == whole * (600 + 256 + 20) // (2 * 600)
    assert plan.cache_share(600) == pytest.approx((600 + 20) / (2 * 600))


def test_plan_file(tmp_path):
    plan = dataclasses.replace(plan_of("llama"), scores={0: (0.5, 1.0)}, provenance={"documents": ["a"]})
    plan = dataclasses.replace(plan, scores={layer: plan.scores.get(layer, ()) for layer in plan.layers})
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert repr(plan).startswith("Plan('llama', ")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a plan"):
        Plan.load(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"the plan .* cannot be read"):
        Plan.load(tmp_path / "missing.json")


def test_pattern_of_duo_attention(tmp_path):
    """The rules by which DuoAttention (at commit fe93c31) and kvpress (0.5.5) read the numbers give the plan."""
    plan = plan_of("llama")
    plan = dataclasses.replace(plan, scores=dict.fromkeys(plan.layers, (0.1, 0.2)))
    export_plan(plan, {"duoattention": tmp_path / "pattern"}, model=shared("llama"))
    folder = tmp_path / "pattern"
    pattern = np.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    assert pattern.shape == (4, 2)
    assert pattern.min() >= 0
    assert pattern.max() <= 1
    sparsity = 1 - plan.share
    # duo_attn/utils.py, sparsify_attention_heads: a quantile after adding noise
    noisy = pattern + np.random.default_rng(0).uniform(0, 1e-6, pattern.shape)
    by_quantile = noisy >= np.quantile(noisy, sparsity)
    # duo_attn/patch/llama.py, enable_llama_duo_attention_eval: numbers in the dtype of the model, above 0.5
    by_threshold = (torch.tensor(pattern, dtype=torch.bfloat16) > 0.5).numpy()
    by_order = np.ones(8, dtype=bool)  # kvpress/presses/duo_attention_press.py, post_init_from_model
    by_order[np.argsort(pattern, axis=None)[: round(8 * sparsity)]] = False
    for full in (by_quantile, by_threshold, by_order.reshape(4, 2)):
        assert {layer: tuple(np.flatnonzero(row)) for layer, row in enumerate(full)} == plan.full
    full = np.array([plan.full_heads(layer)[::2] for layer in plan.layers])  # two query heads per key head
    order = [*sorted(zip(full.ravel(), np.tile((0.1, 0.2), 4), range(8), strict=True))]
    assert np.argsort(pattern, axis=None).tolist() == [unit for _, _, unit in order]
    assert json.loads((folder / "config.json").read_text()) == {"sink_size": 2, "recent_size": 5}
    with pytest.raises(ConfigError, match="this plan lists query heads"):
        plan_of("llama", unit="head").pattern()
    with pytest.raises(ConfigError, match="layers with a window"):
        plan_of("gemma3_text").pattern()


def test_missing_kvpress_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(LoadError, match="needs the package 'kvpress', which is not installed: pip install --no-deps"):
        plan_of("llama").to_kvpress()


def test_plan_of_another_model_is_refused():
    plan, other, half = plan_of("llama"), tiny("llama", seed=1), tiny("llama", dtype=torch.bfloat16)
    assert fingerprint(shared("llama")) != fingerprint(other)
    assert fingerprint(half) == fingerprint(half.float())
    with (
        pytest.raises(MeasureError, match=r"2 layers of 4 heads|has .* with full attention: make a plan of this model"),
        planned(shared("gemma3_text"), plan),
    ):
        pass
    with pytest.raises(MeasureError, match="has other weights: make a plan of this model"), planned(other, plan):
        pass
    with torch.no_grad(), planned(other, plan, other_weights=True):
        other(input_ids=tokens(N))


def test_damaged_plan_files_are_refused_in_one_line_or_can_be_written_again(tmp_path):
    """Every change of a plan's file gives one line that names it, or a plan that can be used and saved."""
    layers = {0: LayerHeads(4, 2), 3: LayerHeads(2, 2)}
    scores = {0: (0.5, 0.25), 3: (1.0, 0.0)}
    provenance = {"sentence": "a", "share": 0.5, "rows": [{"rise": 0.1}]}
    plan = Plan("m", "f", 8, 2, layers, {0: (1,), 3: ()}, scores=scores, provenance=provenance)
    original = json.loads(plan.save(tmp_path / "plan.json").read_text())
    path, refused = tmp_path / "changed.json", 0
    for seed in range(150):
        tree, change = changed(original, Random(seed))
        path.write_text(json.dumps(tree))
        message = ""
        try:
            Plan.load(path).save(tmp_path / "again.json")
        except ConfigError as error:
            message = str(error)
        refused += bool(message)
        assert "\n" not in message, change
        assert len(message) < 400, change
    assert 60 < refused < 150


@pytest.mark.parametrize(
    ("name", "value"),
    [("scores", ["a", "b"]), ("scores", [1.0]), ("scores", [1.0, float("nan")]), ("full", ["0"]), ("heads", 3)],
)
def test_the_field_of_a_damaged_layer_is_named(tmp_path, name, value):
    plan = Plan("m", "f", 8, 2, {0: LayerHeads(4, 2)}, {0: (1,)}, scores={0: (0.5, 0.25)})
    tree = json.loads(plan.save(tmp_path / "plan.json").read_text())
    tree["layers"]["0"][name] = value
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=rf"{name}.*"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(("name", "value"), [("provenance", 3), ("model", 3), ("fingerprint", None), ("layers", [1])])
def test_the_damaged_field_of_a_plan_is_named(tmp_path, name, value):
    plan = Plan("m", "f", 8, 2, {0: LayerHeads(4, 2)}, {0: (1,)})
    tree = json.loads(plan.save(tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(tree | {name: value}))
    with pytest.raises(ConfigError, match=name):
        Plan.load(tmp_path / "plan.json")


def test_plans_that_make_no_sense_are_refused():
    layers = {0: LayerHeads(4, 2)}
    with pytest.raises(ConfigError, match="window=0 and sinks=2"):
        Plan("m", "", 0, 2, layers, {})
    with pytest.raises(ConfigError, match="layer 0 of the plan lists"):
        Plan("m", "", 8, 2, layers, {0: (2,)})
    with pytest.raises(ConfigError, match="layer 3 of the plan lists"):
        Plan("m", "", 8, 2, layers, {3: (0,)})
    with pytest.raises(ConfigError, match="a plan chooses group, head or layer"):
        Plan("m", "", 8, 2, layers, {}, unit="block")


def test_other_caches_and_padding_are_refused():
    model, ids, plan = shared("llama"), tokens(N), plan_of("llama")
    cache = model(input_ids=ids[:, :5]).past_key_values
    with torch.no_grad(), planned(model, plan):
        with pytest.raises(MeasureError, match="not a DynamicCache with 5 tokens"):
            model(input_ids=ids[:, 5:], past_key_values=cache)
        empty = DynamicCache()
        model(input_ids=ids, past_key_values=empty)
        assert empty.get_seq_length() == N
        with pytest.raises(MeasureError, match="cannot be cropped"):
            empty.crop(-1)
        with pytest.raises(MeasureError, match="without padding"):
            model(input_ids=ids, attention_mask=(torch.arange(N) > 2).long()[None])
        for use_cache in (True, False):
            with pytest.raises(MeasureError, match="positions do not go up one by one"):
                model(input_ids=ids, position_ids=torch.arange(N)[None] % 9, use_cache=use_cache)
    wide = dataclasses.replace(plan, window=12, sinks=3)
    for size in (10, 40):  # within the window, and beyond it
        mask = (torch.arange(size) >= 4).long()[None]
        with torch.no_grad(), planned(model, wide), pytest.raises(MeasureError, match="without padding"):
            model.generate(tokens(size), attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
