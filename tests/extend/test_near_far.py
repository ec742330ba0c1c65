"""The method near-far: its rule by loops, its choice of keys, its heads, and its kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from extend.loops import dot, turned
from helpers.capture import run, shared, tokens
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import prove
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.extend.far_cache import far_on_cpu
from wherewhat.extend.method import extended, generate
from wherewhat.extend.near_far import NearFar, averaged_over_distances, largest
from wherewhat.extend.plan import Plan, fingerprint, plannable
from wherewhat.extend.windows import ReRoPE

N, SINKS, WINDOW = 29, 2, 7


def by_loops(attention: LayerAttention, method: NearFar, looking: tuple[bool, ...]) -> torch.Tensor:
    """Output ``(1, n, heads, d_v)``, one pair of a query and a key after the other."""
    n, m, heads = attention.n, attention.m, attention.heads
    q, k, v = attention.q[0].tolist(), attention.k[0].tolist(), attention.value[0].double()
    pairs, speeds = attention.rotation.pairs.tolist(), attention.rotation.inv_freq.tolist()
    visible = attention.visible().expand(1, heads, n, m)[0].tolist()
    out = torch.zeros(1, n, heads, v.shape[-1], dtype=torch.float64)
    far_distance = method.distance or WINDOW

    def logit(h: int, i: int, j: int, distance: float) -> float:
        scaling = attention.rotation.scaling
        query = turned(pairs, q[h][i], [distance * f for f in speeds], scaling)
        key = turned(pairs, k[h // (heads // attention.kv_heads)][j], [0.0] * len(speeds), scaling)
        found = dot(query, key) * attention.scale
        cap = attention.softcap
        return found if cap is None else cap * math.tanh(found / cap)

    def judged(kind: str, h: int, i: int, j: int) -> float:
        if kind == "capped":
            return logit(h, i, j, far_distance)
        return sum(logit(h, i, j, d) for d in range(WINDOW + 1)) / (WINDOW + 1)

    for i in range(n):
        for h in range(heads):
            near = [j for j in range(i + 1) if i - j < WINDOW and visible[h][i][j]]
            logits = {j: logit(h, i, j, i - j) for j in near}
            beyond = [j for j in range(i + 1) if i - j >= WINDOW and visible[h][i][j]]
            logits |= {j: logit(h, i, j, far_distance) for j in beyond if j < SINKS}
            if looking[h]:
                best = max(logits.values())
                others = [j for j in beyond if j >= SINKS]
                chosen = sorted(others, key=lambda j: judged(method.chosen, h, i, j), reverse=True)[: method.top]
                seen = {j: judged(method.seen, h, i, j) for j in chosen}
                low = -math.inf if method.margin is None else best - method.margin
                logits |= {j: x for j, x in seen.items() if x >= low}
            weights = torch.tensor(list(logits.values()), dtype=torch.float64).softmax(0)
            out[0, i, h] = weights @ v[h // (heads // attention.kv_heads)][list(logits)]
    return out


OPTIONS = [
    {},
    {"top": 1},
    {"top": 40},
    {"chosen": "capped"},
    {"seen": "averaged"},
    {"distance": 4},
    {"margin": 0.0},
    {"margin": 0.2, "chosen": "capped", "seen": "averaged"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox", "qwen3"])
def test_rule_by_loops(family, options):
    attention = run(shared(family), tokens(N))[-1]
    method = NearFar(sinks=SINKS, window=WINDOW, **{"top": 3} | options)
    expected = by_loops(attention, method, (True,) * attention.heads)
    torch.testing.assert_close(method.attend(attention).double(), expected, atol=2e-5, rtol=0)


def head_plan(model, *, share=0.5) -> Plan:
    layers = plannable(prove(model))
    full = {layer: tuple(range(0, count.heads, round(1 / share))) for layer, count in layers.items()}
    return Plan("tiny", fingerprint(model), 4, 2, layers, full, "head")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_only_heads_of_the_plan_look_far(family):
    model = shared(family)
    plan = head_plan(model)
    for attention in run(model, tokens(N)):
        method = NearFar(sinks=SINKS, window=WINDOW, top=3, plan=plan)
        looking = plan.full_heads(attention.layer) or (False,) * attention.heads
        expected = by_loops(attention, method, looking)
        torch.testing.assert_close(method.attend(attention).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", [NearFar(window=5, top=4), NearFar(window=40, top=70, seen="averaged")], ids=str)
def test_kernels_agree_with_blocks(method, monkeypatch):
    attention = run(shared("llama"), tokens(200, batch=2))[0]
    fast = method.attend(attention, block_mib=1)
    monkeypatch.setattr("wherewhat.extend.near_far.kernel_available", lambda *_: False)
    torch.testing.assert_close(fast, method.attend(attention), atol=2e-6, rtol=0)


def test_all_far_keys_at_the_window_are_rerope():
    attention = run(shared("llama"), tokens(60))[0]
    found = NearFar(window=8, top=60).attend(attention)
    torch.testing.assert_close(found, ReRoPE(window=8).attend(attention), atol=2e-6, rtol=0)


def test_average_over_distances_is_a_mean_of_rotations():
    attention = run(shared("gpt_neox"), tokens(5))[0]
    q, rotation = attention.q, attention.rotation
    each = [replace(rotation, scaling=1.0).rotate(q, torch.full((5,), d)) for d in range(12)]
    torch.testing.assert_close(averaged_over_distances(q, rotation, 11), torch.stack(each).mean(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [3, 31, 32, 33, 500, 1000])
@pytest.mark.parametrize("count", [1, 3])
def test_largest_equals_topk(width, count):
    scores = torch.randn(2, 3, 7, width, generator=torch.Generator().manual_seed(0))
    scores[:, :, 0] = -torch.inf
    scores[:, :, 1, : width // 2] = -torch.inf
    values, index = largest(scores, count)
    torch.testing.assert_close(values.sort(-1).values, scores.topk(count).values.sort(-1).values)
    torch.testing.assert_close(scores.gather(-1, index), values)


@pytest.mark.slow
@pytest.mark.parametrize("context", [extended, far_on_cpu])
@pytest.mark.parametrize("options", [{}, {"chosen": "capped", "seen": "averaged"}, {"distance": 4, "top": 1}], ids=str)
@pytest.mark.parametrize("planned", [False, True])
def test_generation_equals_scoring(context, options, planned):
    model, ids = shared("llama"), tokens(40, batch=2)
    plan = head_plan(model) if planned else None
    method = NearFar(sinks=SINKS, window=WINDOW, **{"top": 3, "plan": plan} | options)
    written = generate(model, ids, method, 5)
    with torch.no_grad(), extended(model, method):
        whole = model(input_ids=written, use_cache=False).logits
    with torch.no_grad(), context(model, method):
        cache, parts = None, []
        for start, stop in ((0, 30), (30, 31), (31, 36), (36, 45)):
            given = {} if cache is None else {"past_key_values": cache}
            output = model(input_ids=written[:, start:stop], use_cache=True, **given)
            cache = output.past_key_values
            parts.append(output.logits)
    assert torch.equal(whole[:, 39:-1].argmax(-1), written[:, 40:])
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=0)


def test_far_keys_on_the_cpu_of_a_model_with_windows():
    with (
        pytest.raises(MeasureError, match="far keys cannot be on the CPU"),
        far_on_cpu(shared("gemma3_text"), NearFar()),
    ):
        pass


def test_memory_on_the_device_is_that_of_the_window():
    model, ids = shared("llama"), tokens(300)
    with torch.no_grad(), far_on_cpu(model, NearFar(sinks=SINKS, window=WINDOW, top=3)):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        written = model.generate(ids, max_new_tokens=3, do_sample=False, num_beams=2)
    layer = cache.layers[0]
    assert layer.get_seq_length() == 300
    assert written.shape == (1, 303)
    config = model.config
    heads, d = config.num_key_value_heads, config.head_dim
    assert layer.nbytes == 2 * 4 * heads * d * (WINDOW + SINKS)


@pytest.mark.parametrize("options", [{"top": 0}, {"window": 0}, {"sinks": 0}, {"distance": 0}, {"chosen": "nearest"}])
def test_wrong_options(options):
    with pytest.raises(ConfigError, match="near-far with"):
        NearFar(**options)


@pytest.mark.parametrize("context", [extended, far_on_cpu])
def test_plan_of_other_weights(context):
    model = shared("llama")
    method = NearFar(window=WINDOW, plan=replace(head_plan(model), fingerprint="other"))
    with pytest.raises(MeasureError, match="has other weights: make a plan of this model"), context(model, method):
        pass


def test_plan_of_another_model():
    attention = run(shared("llama"), tokens(N))[0]
    plan = head_plan(shared("gpt_neox"))
    with pytest.raises(ConfigError, match="make a plan of this model"):
        NearFar(window=WINDOW, plan=replace(plan, layers={0: replace(plan.layers[0], heads=64)}, full={})).attend(
            attention
        )


@pytest.mark.parametrize(
    "options",
    [{"top": 2.5}, {"window": 16.0}, {"top": True}, {"margin": math.nan}, {"margin": -1.0}, {"plan": "a.json"}],
)
def test_wrong_types(options):
    with pytest.raises(ConfigError, match="near-far with"):
        NearFar(**options)


def test_far_keys_on_the_cpu_of_another_method():
    with pytest.raises(ConfigError, match="the only method"), far_on_cpu(shared("llama"), ReRoPE(window=8)):
        pass


@torch.no_grad()
def test_positions_with_a_gap_are_refused():
    model, ids = shared("llama"), tokens(60)
    with far_on_cpu(model, NearFar(sinks=SINKS, window=WINDOW, top=3)):
        cache = model(input_ids=ids[:, :40], use_cache=True).past_key_values
        with pytest.raises(MeasureError, match="positions do not go up one by one"):
            model(input_ids=ids[:, 40:], past_key_values=cache, use_cache=True, position_ids=torch.arange(50, 70)[None])


@torch.no_grad()
def test_a_cache_of_a_failed_pass_is_refused():
    model, ids = shared("llama"), tokens(60)
    hidden = torch.ones(1, 41, dtype=torch.long)
    hidden[:, :3] = 0
    with far_on_cpu(model, NearFar(sinks=SINKS, window=WINDOW, top=3)):
        cache = model(input_ids=ids[:, :40], use_cache=True).past_key_values
        with pytest.raises(MeasureError):
            model(input_ids=ids[:, 40:41], past_key_values=cache, use_cache=True, attention_mask=hidden)
        with pytest.raises(MeasureError, match="a pass with this cache has failed"):
            model(input_ids=ids[:, 40:], past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_a_cache_of_other_texts_is_refused():
    model, ids = shared("llama"), tokens(60)
    with far_on_cpu(model, NearFar(sinks=SINKS, window=WINDOW, top=3)):
        cache = model(input_ids=ids[:, :40], use_cache=True).past_key_values
        with pytest.raises(MeasureError, match="the cache is of 1 texts, and 2 are given"):
            model(input_ids=ids[:, 40:].repeat(2, 1), past_key_values=cache, use_cache=True)
