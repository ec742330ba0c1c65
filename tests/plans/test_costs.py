"""Brute force: costs of heads in batches that share layers equal those of one head at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.capture import TinySubject, proved, tokens
from wherewhat.caches.plan import plannable
from wherewhat.errors import MeasureError
from wherewhat.measures import variants
from wherewhat.measures.batches import batch_mib
from wherewhat.measures.extend.retrieval import plant, planted_gain
from wherewhat.measures.tensors import next_token_loss
from wherewhat.measures.variants import DEPTHS, RUN
from wherewhat.plans.costs import (
    OPERATIONS,
    fit_head_statistics,
    measure_additions,
    measure_head_costs,
    measure_plan,
    outcome_areas,
    replaced_output,
)

N, WINDOW, SINKS = 200, 20, 3


@pytest.fixture(scope="module")
def texts():
    return torch.cat([tokens(N, seed=seed) for seed in (1, 2)])


def statistics_of(subject):
    return fit_head_statistics(subject, [tokens(N, seed=seed) for seed in (3, 4)])


@pytest.mark.parametrize(("family", "memory_mib"), [("llama", 1024), ("gpt_oss", 1)])
def test_costs_equal_those_of_one_head_at_a_time(family, memory_mib, texts):
    model, proof = proved(family)
    subject = TinySubject(family)
    statistics = statistics_of(subject)
    found = measure_head_costs(model, proof, texts, statistics, window=WINDOW, sinks=SINKS, memory_mib=memory_mib)
    layers = sorted(found.rise["window"])
    assert layers == ([0, 1, 2, 3] if family == "llama" else [1, 3])
    layer, text = layers[1], 1
    planting = plant(texts[text : text + 1], DEPTHS, run=RUN)

    def scores(edit):
        control, planted = (subject.edited(ids, edit) for ids in (planting.control, planting.planted))
        return next_token_loss(control, planting.control), float(planted_gain(planting, planted, control).gain.mean())

    intact = scores(lambda _: None)
    assert found.loss[text] == pytest.approx(intact[0], abs=1e-5)
    assert found.found[text] == pytest.approx(intact[1], abs=1e-5)
    for operation in OPERATIONS:

        def edit(attention, operation=operation):
            if attention.layer != layer:
                return None
            output = attention.output.clone()
            other = replaced_output(attention, operation, statistics[layer], window=WINDOW, sinks=SINKS)
            output[:, :, 1] = other[:, :, 1]
            return output

        loss, gain = scores(edit)
        assert found.rise[operation][layer].shape == (2, 4)
        assert float(found.rise[operation][layer][text, 1]) == pytest.approx(loss - intact[0], abs=1e-5)
        assert float(found.lost[operation][layer][text, 1]) == pytest.approx(intact[1] - gain, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bloom", "gemma2"])
def test_replaced_outputs_equal_the_dense_formulas(family, texts):
    subject = TinySubject(family)
    statistics = statistics_of(subject)
    assert all(own.key_weights.isfinite().all() for own in statistics.values())
    i, j = torch.arange(N)[:, None], torch.arange(N)

    def check(attention):
        if attention.declared_window is not None:  # not part of plans
            return
        own = statistics[attention.layer]
        size = attention.heads // attention.kv_heads
        value = attention.value[0].double().repeat_interleave(size, 0)
        a = own.distance[:, (i - j).clamp_min(0)]
        centred = (attention.k[0].double() - own.key_offset[:, None]).repeat_interleave(size, 0)
        c = (centred @ own.key_weights[..., None])[..., 0]
        visible = attention.visible()[0]
        seen = (i - j < WINDOW) | (j < SINKS)
        limited = attention.attn_scores()[0].double().masked_fill(~seen, -torch.inf)
        logits = {"additive": a + c[:, None], "distance": a, "window": limited}
        for operation, one in logits.items():
            weights = torch.softmax(one.masked_fill(~visible, -torch.inf), -1)
            ours = replaced_output(attention, operation, own, window=WINDOW, sinks=SINKS)
            torch.testing.assert_close(ours[0].double(), (weights @ value).transpose(0, 1), rtol=1e-4, atol=1e-5)
        assert not replaced_output(attention, "removed", own, window=WINDOW, sinks=SINKS).any()

    subject.run(texts[:1], check)


def test_mean_query_of_equal_queries_is_the_layer_itself():
    subject = TinySubject("llama")
    ids = torch.full((1, 40), 50)
    statistics = fit_head_statistics(subject, [ids])

    def check(attention):
        if attention.layer == 0:  # where queries depend on their token only
            found = replaced_output(attention, "mean_query", statistics[0], window=4, sinks=0)
            torch.testing.assert_close(found, attention.output, atol=1e-5, rtol=0)

    subject.run(ids, check)


def test_a_text_within_the_window_is_refused(texts):
    model, proof = proved("llama")
    with pytest.raises(MeasureError, match="covers the texts of 200 tokens"):
        measure_head_costs(model, proof, texts, {}, window=198, sinks=4)


@pytest.mark.parametrize(
    ("family", "unit", "memory_mib"), [("llama", "group", 1024), ("llama", "head", 1), ("gpt_oss", "group", 1024)]
)
def test_additions_to_a_plan_equal_whole_passes(family, unit, memory_mib, texts, monkeypatch):
    monkeypatch.setattr(variants, "batch_mib", lambda _: memory_mib)
    model, proof = proved(family)
    options = {"window": WINDOW, "sinks": SINKS}
    layers = plannable(proof)
    size = 2 if unit == "group" else 1
    # Some layers have a unit that sees everything, others none.
    full = {layer: tuple(layer % 3 == 0 and head < size for head in range(x.heads)) for layer, x in layers.items()}
    found = measure_additions(model, proof, texts[:1], full, unit=unit, **options)
    before = measure_plan(model, proof, texts[:1], full, **options)
    for layer, x in layers.items():
        for start in range(0, x.heads, size):
            own = tuple(seen or start <= head < start + size for head, seen in enumerate(full[layer]))
            after = measure_plan(model, proof, texts[:1], full | {layer: own}, **options)
            expected = [before.loss - after.loss, after.found - before.found]
            assert found[layer][:, start].tolist() == pytest.approx(expected, abs=1e-5)
            assert torch.equal(found[layer][:, start], found[layer][:, start + size - 1])


def test_areas_are_integrals_of_the_curves_paired_by_document():
    cells = {"ranks": {0.25: (0.3, 0.5), 0.5: (0.1, 0.8), 0.75: (0.0, 0.9)}, "costs": {0.25: (0.1, 0.9), 0.5: (0.1, 1)}}
    outcomes = []
    for document in (1, 2, 3):
        one = {"loss": 2.0, "found": 4.0, "loss_none_0": 2.0 + document, "found_none_0": 0.0, "loss_mass_0.25": 9.0}
        for selector, curve in cells.items():
            for share, (rise, part) in curve.items():
                one[f"loss_{selector}_{share!r}"] = 2.0 + rise * document
                one[f"found_{selector}_{share!r}"] = 4.0 * part
        outcomes.append(one)
    found = outcome_areas(outcomes)
    assert (found["shares"], found["reference"]) == ([0.25, 0.5], "costs")
    best, other = found["rows"]
    assert (best["selector"], other["selector"]) == ("costs", "ranks")
    assert best["more_rise"] is best["more_cost"] is best["more_part"] is None
    x, rise, part = [0, 0.25, 0.5, 1], [1, 0.3, 0.1, 0], [0, 0.5, 0.8, 1]
    assert other["rise"]["mean"] == pytest.approx(2 * np.trapezoid(rise, x))
    assert other["part"]["mean"] == pytest.approx(np.trapezoid(part, x))
    lost = [4 * (1 - y) for y in part]
    assert other["cost"]["mean"] == pytest.approx(2 * np.trapezoid(rise, x) + np.trapezoid(lost, x))
    # The difference is 0.05 times the number of the document: mean 0.1, standard error 0.05 / sqrt(3).
    assert other["more_rise"]["mean"] == pytest.approx(0.1)
    assert other["more_rise"]["high"] == pytest.approx(0.1 + 4.30265 * 0.05 / 3**0.5, abs=1e-5)
    reverse, _ = outcome_areas(outcomes, reference="ranks")["rows"]
    assert reverse["more_rise"]["high"] == pytest.approx(-other["more_rise"]["low"])
    assert reverse["more_part"]["mean"] == pytest.approx(-other["more_part"]["mean"])
    assert outcome_areas([one | {"found": 0.0} for one in outcomes])["rows"][0]["part"] is None
    assert outcome_areas([{"loss": 1.0, "found": 1.0, "loss_none_0": 2.0, "loss_ranks_0.25": 1.0}])["rows"] == []


def test_memory_of_a_batch_depends_on_the_device(monkeypatch):
    for free, expected in ((80, 10 * 1024), (139, 16 * 1024), (4, 512)):
        for name, gib in (("mem_get_info", (free - 2, 140)), ("memory_reserved", 3), ("memory_allocated", 1)):
            found = tuple(x * 2**30 for x in gib) if isinstance(gib, tuple) else gib * 2**30
            monkeypatch.setattr(torch.cuda, name, lambda _, found=found: found)
        assert batch_mib(torch.device("cuda", 0)) == expected
    assert batch_mib(torch.device("cpu")) == 1024
