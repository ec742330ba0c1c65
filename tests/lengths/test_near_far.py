"""The method near-far. Brute force: its rule by loops. Identity: generation equals scoring, kernels equal blocks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from helpers.capture import proved, run, shared, tokens
from lengths.loops import best, dot, turned
from wherewhat.caches.plan import Plan, fingerprint, plannable
from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lengths.far_cache import far_on_cpu
from wherewhat.lengths.method import extended, generate
from wherewhat.lengths.near_far import NearFar, judged_queries, largest
from wherewhat.lengths.windows import ReRoPE

N, SINKS, WINDOW = 29, 2, 7
# No token twice: in the first layer both would have the same key, and either could be chosen.
DISTINCT = 16 + torch.randperm(144, generator=torch.Generator().manual_seed(0))[None, :N]
CLOSE = {"atol": 2e-5, "rtol": 0}


def by_loops(attention: LayerAttention, method: NearFar, looking: tuple[bool, ...]) -> torch.Tensor:
    """Output ``(1, n, heads, d_v)``, one pair of a query and a key after the other."""
    n, m, heads = attention.n, attention.m, attention.heads
    q, k, v = attention.q[0].tolist(), attention.k[0].tolist(), attention.value[0].double()
    pairs, speeds = attention.rotation.pairs.tolist(), attention.rotation.inv_freq.tolist()
    visible = attention.visible().expand(1, heads, n, m)[0].tolist()
    out = torch.zeros(1, n, heads, v.shape[-1], dtype=torch.float64)
    far_distance = method.distance or WINDOW

    def first_distance(i: int, j: int) -> int:
        return far_distance if method.sink_distance is None else min(i, method.sink_distance) - j

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
            logits |= {j: logit(h, i, j, first_distance(i, j)) for j in beyond if j < SINKS}
            if looking[h]:
                largest_near = max(logits.values())
                others = [j for j in beyond if j >= SINKS]
                chosen = best(others, functools.partial(judged, method.chosen, h, i), method.top)
                seen = {j: judged(method.seen, h, i, j) for j in chosen}
                low = -math.inf if method.margin is None else largest_near - method.margin
                assert all(abs(x - low) > 1e-5 for x in seen.values()), "a key is too near the margin for a test"
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
    {"sink_distance": 12},
    {"sink_distance": 3, "distance": 9},
    {"margin": 0.0},
    {"margin": 0.2, "chosen": "capped", "seen": "averaged"},
]


@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox", "qwen3"])
def test_rule_by_loops(family):
    attention = run(shared(family), tokens(N))[-1]
    for options in OPTIONS:
        method = NearFar(sinks=SINKS, window=WINDOW, **{"top": 3} | options)
        expected = by_loops(attention, method, (True,) * attention.heads)
        found = method.attend(attention).double()
        torch.testing.assert_close(found, expected, **CLOSE, msg=lambda message, x=options: f"{x}: {message}")


def head_plan(family) -> Plan:
    """Every second head of each layer looks far."""
    model, proof = proved(family)
    layers = plannable(proof)
    full = {layer: tuple(range(0, count.heads, 2)) for layer, count in layers.items()}
    return Plan("tiny", fingerprint(model), 4, 2, layers, full, "head")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_only_heads_of_the_plan_look_far(family):
    plan = head_plan(family)
    for attention in run(shared(family), DISTINCT):
        method = NearFar(sinks=SINKS, window=WINDOW, top=3, plan=plan)
        looking = plan.full_heads(attention.layer) or (False,) * attention.heads
        expected = by_loops(attention, method, looking)
        torch.testing.assert_close(method.attend(attention).double(), expected, **CLOSE)


def test_kernels_agree_with_blocks(monkeypatch):
    attention = run(shared("llama"), tokens(200, batch=2))[0]
    for method in (NearFar(window=5, top=4), NearFar(window=40, top=70, seen="averaged")):
        fast = method.attend(attention, block_mib=1)
        with monkeypatch.context() as patch:
            patch.setattr("wherewhat.lengths.near_far.kernel_available", lambda *_: False)
            torch.testing.assert_close(fast, method.attend(attention), **CLOSE)


def test_all_far_keys_at_the_window_are_rerope():
    attention = run(shared("llama"), tokens(60))[0]
    found = NearFar(window=8, top=60).attend(attention)
    torch.testing.assert_close(found, ReRoPE(window=8).attend(attention), **CLOSE)


def test_average_over_distances_is_a_mean_of_rotations():
    attention = run(shared("gpt_neox"), tokens(5))[0]
    q, rotation = attention.q, attention.rotation
    each = [replace(rotation, scaling=1.0).rotate(q, torch.full((5,), d)) for d in range(12)]
    found = judged_queries(attention, NearFar(window=11), "averaged", attention.rot_q, torch.arange(5))
    torch.testing.assert_close(found, torch.stack(each).mean(0), **CLOSE)


def test_largest_equals_topk():
    for width in (3, 31, 32, 33, 500, 1000):
        scores = torch.randn(2, 3, 7, width, generator=torch.Generator().manual_seed(0))
        scores[:, :, 0] = -torch.inf
        scores[:, :, 1, : width // 2] = -torch.inf
        for count in (1, 3):
            values, index = largest(scores, count)
            assert torch.equal(values.sort(-1).values, scores.topk(count).values.sort(-1).values), (width, count)
            assert torch.equal(scores.gather(-1, index), values)


@pytest.mark.parametrize("context", [extended, far_on_cpu])
def test_generation_equals_scoring(context):
    model, ids = shared("llama"), tokens(40, batch=2)
    plan = head_plan("llama")
    for options in (
        {},
        {"chosen": "capped", "seen": "averaged", "plan": plan},
        {"distance": 4, "top": 1},
        {"sink_distance": 12},
    ):
        method = NearFar(sinks=SINKS, window=WINDOW, **{"top": 3} | options)
        written = generate(model, ids, method, 5, proof=proved("llama")[1])
        with torch.no_grad(), extended(model, method):
            whole = model(input_ids=written, use_cache=False).logits
        with torch.no_grad(), context(model, method):
            cache, parts = None, []
            for start, stop in ((0, 30), (30, 31), (31, 36), (36, 45)):
                given = {} if cache is None else {"past_key_values": cache}
                output = model(input_ids=written[:, start:stop], use_cache=True, **given)
                cache = output.past_key_values
                parts.append(output.logits)
        own = whole[:, 39:-1].gather(-1, written[:, 40:, None])[..., 0]
        torch.testing.assert_close(own, whole[:, 39:-1].amax(-1), **CLOSE)
        torch.testing.assert_close(
            torch.cat(parts, 1), whole, **CLOSE, msg=lambda message, x=options: f"{x}: {message}"
        )


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


def test_wrong_models_and_plans_are_refused():
    model, plan = shared("llama"), head_plan("llama")
    windows, method = shared("gemma3_text"), NearFar(window=WINDOW, plan=replace(plan, fingerprint="other"))
    with pytest.raises(MeasureError, match="far keys cannot be on the CPU"), far_on_cpu(windows, NearFar()):
        pass
    with pytest.raises(ConfigError, match="the only method"), far_on_cpu(model, ReRoPE(window=8)):
        pass
    for context in (extended, far_on_cpu):
        with pytest.raises(MeasureError, match="has other weights: make a plan of this model"), context(model, method):
            pass
    more_heads = replace(plan, layers={0: replace(plan.layers[0], heads=64)}, full={})
    with pytest.raises(ConfigError, match="make a plan of this model"):
        NearFar(window=WINDOW, plan=more_heads).attend(run(model, tokens(N))[0])


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused():
    model, ids = shared("llama"), tokens(60)
    hidden = torch.ones(1, 41, dtype=torch.long)
    hidden[:, :3] = 0
    with far_on_cpu(model, NearFar(sinks=SINKS, window=WINDOW, top=3)):

        def filled():
            return {"past_key_values": model(input_ids=ids[:, :40], use_cache=True).past_key_values, "use_cache": True}

        with pytest.raises(MeasureError, match="positions do not go up one by one"):
            model(input_ids=ids[:, 40:], position_ids=torch.arange(50, 70)[None], **filled())
        with pytest.raises(MeasureError, match="the cache is of 1 texts, and 2 are given"):
            model(input_ids=ids[:, 40:].repeat(2, 1), **filled())
        cache = filled()
        with pytest.raises(MeasureError):
            model(input_ids=ids[:, 40:41], attention_mask=hidden, **cache)
        with pytest.raises(MeasureError, match="a pass with this cache has failed"):
            model(input_ids=ids[:, 40:], **cache)
