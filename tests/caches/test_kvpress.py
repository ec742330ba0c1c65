"""Parity: ``DuoAttentionPress`` of kvpress, if it is installed, keeps the groups of a plan in full."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.models import llama_config
from helpers.pages import ROOT, blocks
from wherewhat.caches.plan import LayerHeads, Plan, fingerprint
from wherewhat.plans.exports import export_plan

N, WINDOW, SINKS = 26, 5, 2
IDS = torch.arange(N)[None] % 11


@pytest.fixture(scope="module", autouse=True)
def kvpress():
    """The package, whose import replaces the attention functions of transformers: they are restored at the end."""
    functions = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    yield pytest.importorskip("kvpress", reason="kvpress is not installed")
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(functions)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(num_hidden_layers=4)).eval()


@pytest.fixture
def plan(model):
    config = model.config
    layers = {i: LayerHeads(config.num_attention_heads, 2) for i in range(config.num_hidden_layers)}
    full = {0: (0,), 1: (1,), 2: (), 3: (0, 1)}
    scores = {layer: (0.3 - layer, 0.7 * layer) for layer in layers}
    return Plan("llama", "", WINDOW, SINKS, layers, full, scores=scores)


def check(press, model, plan):
    """Prefill under a press, and compare the keys that it masks and that later tokens do not read with the plan."""
    cache = DynamicCache()
    limited = torch.tensor([[group not in plan.full[layer] for group in (0, 1)] for layer in plan.layers])
    with torch.no_grad(), press(model):
        model(input_ids=IDS[:, :-1], past_key_values=cache)
        assert torch.equal(press.streaming_mask, limited)
        for layer, block in enumerate(model.model.layers):
            masked = torch.zeros(1, 2, N - 1, dtype=torch.bool)
            masked[block.self_attn.masked_key_indices] = True
            expected = torch.zeros(1, 2, N - 1, dtype=torch.bool)
            expected[:, limited[layer], SINKS : N - 1 - WINDOW] = True
            assert torch.equal(masked, expected)
        found = []
        for change in (None, True, False):  # nothing, values of masked keys, values of the other keys of those heads
            changed = DynamicCache()
            for layer, own in enumerate(cache.layers):
                values, rows = own.values.clone(), torch.zeros(N - 1, dtype=torch.bool)
                rows[SINKS : N - 1 - WINDOW] = True
                if change is not None:
                    values[:, limited[layer][:, None] & (rows == change)] += 1.0
                changed.update(own.keys.clone(), values, layer)
            found.append(model(input_ids=IDS[:, -1:], past_key_values=changed).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)
    assert (found[2] - found[0]).abs().max() > 1e-3


def test_press_keeps_the_groups_of_a_plan(model, plan):
    check(plan.to_kvpress(), model, plan)


def test_documented_lines_give_the_same_press_from_the_files(model, plan, tmp_path, monkeypatch):
    """Without wherewhat: the lines of docs/plan.md read the files of an export."""
    own = dataclasses.replace(plan, fingerprint=fingerprint(model))
    export_plan(own, {"kvpress": tmp_path / "pattern"}, model=model)
    monkeypatch.chdir(tmp_path)
    code = next(block.code for block in blocks(ROOT / "docs" / "plan.md") if "load_attention_pattern" in block.code)
    names = {}
    exec(code, names)
    press = names["press"]
    assert press.head_compression_ratio == pytest.approx(1 - plan.share)
    press.post_init_from_model(model)
    own = plan.to_kvpress()
    own.post_init_from_model(model)
    assert torch.equal(press.streaming_mask, own.streaming_mask)
    assert (press.sink_size, press.recent_size) == (own.sink_size, own.recent_size) == (SINKS, WINDOW)


def test_no_group_and_all_groups(model, plan):
    for groups in ((), (0, 1)):
        press = dataclasses.replace(plan, full=dict.fromkeys(plan.layers, groups)).to_kvpress()
        press.post_init_from_model(model)
        assert np.unique(press.streaming_mask).tolist() == [not groups]


def test_generation(model, plan):
    with torch.no_grad(), plan.to_kvpress()(model):
        written = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert written.shape == (1, N + 4)
