"""Brute force: all-swap scores against swaps that are really made. Identity: hand-built heads, the exclusion bound."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.capture import tiny, tokens
from wherewhat.captures.blocks import blocks, key_mixing
from wherewhat.captures.proof import prove
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.measurement import KEYS_MIX
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps import scores as scores_module
from wherewhat.measures.swaps.layer import swap_scores
from wherewhat.measures.swaps.placement import choose_queries, place, query_logits, reference_scores
from wherewhat.measures.swaps.scores import QueryLogits, label, score_swaps

DOUBLE = (
    "gptj",  # interleaved
    "llama",  # half-split, grouped queries
    "gemma3_text",  # norms on queries and keys, sliding window
    "gemma2",  # soft-cap
    "gpt_neox",  # partial rotation
    "bloom",  # ALiBi
    "gpt2",  # learned positions
)
SINGLE = ("gpt_oss", "deepseek_v3")  # sinks, latent attention: their experts do not run in float64
QUERIES = (6, 11, 18)


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("family", [*DOUBLE, *SINGLE])
def test_scores_equal_swaps_made_for_real(family, block):
    exact = family in DOUBLE
    model = tiny(family, dtype=torch.float64 if exact else torch.float32)
    with blocks(model, tokens(19), prove(model)) as again:
        for layer in again.layers[:2]:
            before = again.run(layer, again.hidden(layer))
            queries = [q for q in QUERIES if int(before.visible(slice(q, q + 1))[0, 0, 0, :q].sum()) >= 2 * block]

            def swap(i, j, layer=layer):
                return again.swapped(layer, i, j, block=block)

            expected = reference_scores(before, swap, queries, tau=1e-2, block=block)
            for column, query in enumerate(queries):
                found = score_swaps(query_logits(before, query), taus=(1e-2,), block=block)
                for ours, theirs in zip((found.s_pos, found.s_sym), expected, strict=True):
                    torch.testing.assert_close(ours[:, 0], theirs[:, column], rtol=0, atol=1e-6 if exact else 2e-5)
                assert float(found.exclusion.min()) >= 1 - 1e-9


def test_scores_equal_swaps_at_the_papers_temperature():
    model = tiny("llama", dtype=torch.float64)
    with blocks(model, tokens(12), prove(model)) as again:
        before = again.run(0, again.hidden(0))
        expected = reference_scores(before, lambda i, j: again.swapped(0, i, j), [11])
        found = score_swaps(query_logits(before, 11))
    for ours, theirs in zip((found.s_pos, found.s_sym), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


ROTATION = Rotation("half", 0, torch.tensor([0.3, 0.01]), 1.0)


def test_positional_head():
    """Alike keys a quarter of a turn from the query, so that logits grow with distance: only the place counts."""
    n = 30
    k = torch.tensor([1.0, 0.0]).expand(1, n, 2)
    q = torch.tensor([0.0, 2e3]).expand(1, n, 2)
    found = swap_scores(q, k, rotation=Rotation("half", 0, torch.tensor([0.05]), 1.0), scale=1.0)
    torch.testing.assert_close(found.s_pos, torch.ones(1, 1).double(), rtol=0, atol=1e-6)
    assert float(found.s_sym) < 1e-6
    assert float(found.s_pos_logits) > 1 - 1e-5


def test_symbolic_head():
    """No rotation: only the content counts."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 30, 4, generator=generator)
    q = 20 * torch.randn(1, 30, 4, generator=generator)
    found = swap_scores(q, k, scale=1.0)
    torch.testing.assert_close(found.s_sym, torch.ones(1, 1).double(), rtol=0, atol=1e-6)
    assert float(found.s_pos) < 1e-6
    assert float(found.s_sym_logits) > 1 - 1e-5


def test_uniform_head():
    q, k = torch.zeros(1, 30, 4), torch.randn(1, 30, 4)
    found = swap_scores(q, k, rotation=ROTATION, queries="all")
    ones = torch.ones(1, 28).double()
    for values in (found.s_pos, found.s_sym, found.s_pos_logits, found.s_sym_logits):
        torch.testing.assert_close(values, ones, rtol=0, atol=1e-6)


def draw(heads=3, n=50, d=8, *, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    contents, placed = (torch.randn(heads, n, d, generator=generator).to(dtype) for _ in range(2))
    logits = (contents.double() * placed.double()).sum(-1)
    return QueryLogits(contents, placed, logits, logits.softmax(-1))


@pytest.mark.parametrize("block", [1, 4])
def test_tiles_and_groups_of_heads_do_not_matter(block, monkeypatch):
    query = draw()
    whole = score_swaps(query, taus=(1e-3, 1e-1), block=block)
    monkeypatch.setattr(scores_module, "_TILE", {"cpu": 7})
    monkeypatch.setattr(scores_module, "_ENTRIES", {"cpu": 1})
    cut = score_swaps(query, taus=(1e-3, 1e-1), block=block)
    for one, other in zip(vars(whole).values(), vars(cut).values(), strict=True):
        torch.testing.assert_close(one, other)


def test_deviations_are_means_over_contents_and_places():
    query = draw()
    found = score_swaps(query)
    m = query.contents @ query.placed.mT
    expected = (m - query.logits[:, None, :]).square().mean((-1, -2))
    torch.testing.assert_close(found.positional_deviation, expected)
    expected = (m - query.logits[:, :, None]).square().mean((-1, -2))
    torch.testing.assert_close(found.symbolic_deviation, expected)
    torch.testing.assert_close(found.variance, query.logits.var(-1, correction=0))


def test_float32_is_close_to_float64():
    exact, coarse = score_swaps(draw()), score_swaps(draw(dtype=torch.float32))
    torch.testing.assert_close(coarse.s_pos, exact.s_pos, rtol=0, atol=1e-6)


def test_huge_logits_do_not_overflow():
    query = draw(dtype=torch.float32)
    big = QueryLogits(1e3 * query.contents, query.placed, 1e3 * query.logits, (1e3 * query.logits).softmax(-1))
    found = score_swaps(big, taus=(1e-4,))
    assert bool(found.s_pos.isfinite().all())
    assert bool(found.s_sym.isfinite().all())


@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_placed_queries_see_rotated_keys(scaling):
    rotation = Rotation("interleaved", 2, torch.tensor([0.5, 0.1]), scaling)
    q, k = torch.randn(2, 8).double(), torch.randn(5, 8).double()
    positions = torch.arange(5)
    expected = torch.stack([q @ rotation.rotate(k[c].expand(5, 8), positions).T for c in range(5)], 1)
    torch.testing.assert_close(torch.einsum("hpd,cd->hcp", place(q, rotation, positions), k), expected)


def test_sensitivity_is_in_the_result():
    q, k = torch.randn(4, 40, 4), torch.randn(2, 40, 4)
    found = swap_scores(q, k, rotation=ROTATION, queries=[20, 39], taus=(0.1,), blocks=(1, 4, 30))
    assert found.taus == (1e-4, 0.1)
    torch.testing.assert_close(found.by_tau[0, :, 0], found.s_pos.mean(1))
    torch.testing.assert_close(found.by_block[1, :, 0], found.s_sym.mean(1))
    assert bool(found.by_block[..., 1].isfinite().all())
    assert bool(found.by_block[..., 2].isnan().all())  # no query sees two blocks of 30


def test_intervals_are_over_queries_and_within_the_scale():
    q, k = torch.randn(4, 40, 4), torch.randn(2, 40, 4)
    found = swap_scores(q, k, rotation=ROTATION, queries=[20, 30, 39])
    for scores, bounds in zip((found.s_pos, found.s_sym), found.intervals(), strict=True):
        mean = scores.mean(1)
        assert bool(((bounds[:, 0] <= mean) & (mean <= bounds[:, 1])).all())
        assert 0 <= float(bounds.min()) <= float(bounds.max()) <= 1
    alone = swap_scores(q, k, rotation=ROTATION, queries="last").intervals()
    assert all(bool(bounds.isnan().all()) for bounds in alone)


def test_labels():
    s_pos, s_sym = torch.tensor([0.95, 0.05, 0.95, 0.5, math.nan]), torch.tensor([0.05, 0.95, 0.95, 0.5, 0.0])
    names = [LABELS[code] if code >= 0 else None for code in label(s_pos, s_sym, 0.1).tolist()]
    assert names == ["positional", "symbolic", "uniform", "mixed", None]
    assert label(s_pos, s_sym, 0.04).tolist()[:2] == [0, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queries": [0]}, "position 0 of 12 tokens"),
        ({"queries": [1]}, "position 1 of 12 tokens"),
        ({"queries": [12]}, "2 to 11 can"),
        ({"queries": "middle"}, "'last', 'all' or positions"),
        ({"tau": 0.0}, "tau=0.0 must be positive"),
        ({"tau": 1e-4, "taus": (-1.0,)}, "tau=-1.0 must be positive"),
        ({"block": 6}, "block=6 is too long"),
        ({"block": 0}, "block=0"),
        ({"window": 2}, "sees 1 keys before it"),
        ({"skip": 10}, "after the first 10"),
    ],
)
def test_bad_input_is_one_clear_line(options, words):
    with pytest.raises(MeasureError, match=words) as error:
        swap_scores(torch.randn(2, 12, 4), torch.randn(1, 12, 4), **options)
    assert "\n" not in str(error.value)


def test_bad_tensors():
    with pytest.raises(MeasureError, match="multiple of kv_heads"):
        swap_scores(torch.randn(3, 12, 4), torch.randn(2, 12, 4))
    with pytest.raises(MeasureError, match="NaN or Inf"):
        swap_scores(torch.full((1, 12, 4), math.inf), torch.randn(1, 12, 4))
    with pytest.raises(MeasureError, match="leave no query"):
        swap_scores(torch.randn(1, 2, 4), torch.randn(1, 2, 4))


def test_queries_are_spread_and_end_with_the_last():
    assert choose_queries(256, count=16)[-1] == 255
    assert len(choose_queries(256, count=16)) == 16
    assert choose_queries(10, count=1) == [9]
    assert choose_queries(6, count=0) == [2, 3, 4, 5]
    assert choose_queries(6, count=1, positions=(-1, 3)) == [3, 5]


@pytest.mark.parametrize(("family", "mixes"), [("llama", False), ("ctrl", False), ("zaya", True), ("gpt2", False)])
def test_key_mixing_tells_layers_that_must_be_run_again(family, mixes):
    model = tiny(family)
    for value in key_mixing(model, prove(model)).values():
        assert (value > KEYS_MIX) == mixes
