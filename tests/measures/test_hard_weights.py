"""Models with weights as trained ones have them: no number is lost, and brute force agrees."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.hard import harden
from helpers.capture import run, tiny, tokens
from measures.axes.dense import dense_fit
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.blocks import blocks
from wherewhat.captures.proof import Proof, prove
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.frequencies import FrequenciesConfig
from wherewhat.measures.heads import HeadsConfig
from wherewhat.measures.measurement import (
    DocumentsMeasurement,
    Spans,
    Text,
    find_measurement,
    measure_text,
    measurements,
)
from wherewhat.measures.perturb import PerturbConfig
from wherewhat.measures.swaps.layer import layer_swaps, reference_scores
from wherewhat.numerics import new_process_settings
from wherewhat.runs.subject import ModelSubject
from wherewhat.scores import Scores

FAMILIES = ("llama", "gemma3_text", "gpt2", "gpt_neox", "bloom", "qwen3", "gemma2")
ROTATED = ("llama", "gemma3_text", "gpt_neox", "qwen3", "gemma2")
N = 23
OPTIONS: dict[str, Any] = {
    "frequencies": FrequenciesConfig(bands=2),  # gpt_neox has two planes
    "heads": HeadsConfig(blocks=(2,)),
    "perturb": PerturbConfig(kinds=("words", "position_swap", "features"), rates=(0.0, 0.2), seeds=1),
}
ONLY_ROTATED = ("distance", "planes", "frequencies")
# Prompts and questions need a tokenizer, and texts beyond the trained length a model that was trained.
NAMES = [name for name in measurements() if name not in ("prompts", "choices", "extend")]


@functools.cache
def hard(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny(family)
    harden(model, prove(model))
    return model.to(dtype)


@functools.cache
def hard_proof(family: str, dtype: torch.dtype) -> Proof:
    return prove(hard(family, dtype))


@functools.cache
def undefined(family: str, dtype: torch.dtype) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer the heads whose queries and keys give no logits at all, and those of which no plane does."""
    with new_process_settings({dtype}):
        return {attention.layer: _undefined(attention) for attention in run(hard(family, dtype), tokens(N))}


def _undefined(attention: LayerAttention) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x[0].abs().amax(1).double() for x in (attention.rot_q, attention.rot_k))
    used = q * k.repeat_interleave(attention.heads // attention.kv_heads, 0)  # (heads, d)
    rotation = attention.rotation
    turning = used if rotation is None else used[:, rotation.pairs.flatten()]
    return (used == 0).all(-1), (turning == 0).all(-1)


def measured(name: str, family: str, dtype: torch.dtype) -> Scores:
    measurement = find_measurement(name)
    subject = ModelSubject(SimpleNamespace(model=hard(family, dtype)), hard_proof(family, dtype))
    options = OPTIONS.get(name, measurement.config())
    if isinstance(measurement, DocumentsMeasurement):
        return measurement.measure(subject, [Text(tokens(N, seed=seed)) for seed in range(3)], options)
    words = tuple((i, i + 1) for i in range(N))
    text = Text(tokens(N), find_spans=lambda: Spans(words, ((0, 10), (10, N))))
    return measure_text(measurement, subject, text, options)


def lost(scores: Scores, family: str, dtype: torch.dtype) -> Iterator[str]:
    """Numbers that are not finite though the head has logits."""
    for layer in scores.layers:
        constant, unused = undefined(family, dtype)[layer.layer]
        for name, values in layer.heads.items():
            if bool((~values.isfinite() & ~(unused if name.startswith("mean_frequency") else constant)).any()):
                yield f"{name} of layer {layer.layer}"
        for name, curve in layer.curves.items():
            heads = curve.values.movedim(curve.axes.index("head"), 0) if "head" in curve.axes else curve.values[None]
            if name in ("plane_q_direction", "plane_k_direction") and bool(heads[..., -1].isnan().all()):
                heads = heads[..., :-1]  # what does not turn, beside the planes, has no direction
            if name.endswith("_no_sink_by_query"):
                heads = heads[..., 1:]  # the first query has one key after the sink
            if not bool(heads[~constant if "head" in curve.axes else slice(None)].isfinite().all()):
                yield f"curve {name} of layer {layer.layer}"
        yield from (f"{name} of layer {layer.layer}" for name, x in layer.whole.items() if not abs(x) < torch.inf)
    yield from (name for name, x in scores.whole.items() if not abs(x) < torch.inf)
    yield from (name for name, curve in scores.curves.items() if not bool(curve.values.isfinite().all()))


ONE = pytest.param("llama", torch.float32, id="llama-float32")
BREADTH = [
    *((family, torch.float32) for family in FAMILIES if family != "llama"),
    *((family, torch.bfloat16) for family in ("gemma3_text", "gpt2")),
]
CASES = [ONE, *(pytest.param(*case, id=f"{case[0]}-{str(case[1])[6:]}", marks=pytest.mark.slow) for case in BREADTH)]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_numbers_are_finite_wherever_a_head_has_logits(family, dtype, subtests):
    constant = [x for x, _ in undefined(family, dtype).values()]
    assert all(bool(x.any()) and not bool(x.all()) for x in constant)
    for name in NAMES:
        if name in ONLY_ROTATED and family not in ROTATED:
            continue
        if name == "perturb" and (family, dtype) != ("llama", torch.float32):
            continue  # many passes, of which one family is enough; bloom takes no position_ids
        with subtests.test(measurement=name), new_process_settings({dtype}):
            assert list(lost(measured(name, family, dtype), family, dtype)) == []


SOME = [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]


@pytest.mark.parametrize("family", SOME)
def test_axes_equal_the_dense_fit(family):
    for attention in run(hard(family), tokens(N)):
        fit = fit_layer(attention)
        scores = attention.attn_scores()[0].double()
        visible = attention.visible()[0, 0].expand(attention.n, attention.m)
        for head in range(attention.heads):
            found = {subset: float(fit.r_subset[subset][head]) for subset in ("abc", "ac", "b")}
            if float(scores[head][visible].std()) == 0:
                assert all(r != r for r in found.values())
                continue
            expected = {subset: dense_fit(scores[head], visible, subset)[0] for subset in found}
            assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", SOME)
def test_swap_scores_equal_swaps_made_for_real(family):
    model = hard(family, torch.float64)
    queries = [6, 13]
    with blocks(model, tokens(14), hard_proof(family, torch.float64)) as again:
        for layer in again.layers[:2]:
            before = again.run(layer, again.hidden(layer))
            expected = reference_scores(before, lambda i, j, at=layer: again.swapped(at, i, j), queries, tau=1e-2)
            found = layer_swaps(before, queries, tau=1e-2)
            for ours, theirs in zip((found.s_pos, found.s_sym), expected[:2], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
