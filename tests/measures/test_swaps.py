"""Brute force: scores against all swaps, and against swaps that are really made. Identity: hand-built heads."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.capture import proved, swapped_logits, tiny, tokens
from helpers.heads import LABELS_OF, constructed_heads
from helpers.layers import random_causal_layer
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.blocks import blocks, key_mixing
from wherewhat.captures.proof import prove
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures import graphs
from wherewhat.measures.heads import PatternConfig
from wherewhat.measures.heads.patterns import pattern_statistics
from wherewhat.measures.measurement import KEYS_MIX
from wherewhat.measures.swaps import LABELS, deviations, layer, logits, scores
from wherewhat.measures.swaps import dense as all_swaps
from wherewhat.measures.swaps.deviations import logit_deviations
from wherewhat.measures.swaps.layer import layer_swaps, reference_scores, swap_scores
from wherewhat.measures.swaps.logits import QueryLogits, choose_queries, query_logits
from wherewhat.measures.swaps.scores import Pivots, label, score_swaps, sink_heads

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


@pytest.mark.parametrize("family", [*DOUBLE, *SINGLE])
def test_scores_equal_swaps_made_for_real(family):
    exact = family in DOUBLE
    # Differences of weights are divided by τ = 1e-2. Weights in float32 are within 2e-6; those of models in float64,
    # whose angles and softmax stay in float32, within 1e-7.
    close, effective = (1e-5, 1e-4) if exact else (2e-4, 1e-2)
    model, proof = proved(family, dtype=torch.float64 if exact else torch.float32)
    with blocks(model, tokens(19), proof) as again:
        for layer, block in itertools.product(again.layers[:2], (1, 3)):
            before = again.run(layer, again.hidden(layer))
            queries = [q for q in QUERIES if int(before.visible(slice(q, q + 1))[0, 0, 0, :q].sum()) >= 2 * block]

            def swap(i, j, layer=layer, block=block):
                return again.swapped(layer, i, j, block=block)

            expected = reference_scores(before, swap, queries, tau=1e-2, block=block, sink_tokens=2)
            found = layer_swaps(before, queries, tau=1e-2, block=block, sink_tokens=2)
            for ours, theirs in zip((found.s_pos, found.s_sym), expected[:2], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=close)
            for ours, theirs in zip((found.s_pos_no_sink, found.s_sym_no_sink), expected[3:], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=close, equal_nan=True)
            torch.testing.assert_close(found.effective, expected[2], rtol=effective, atol=0)
            assert float(found.exclusion.min()) >= 1 - 1e-9


def test_scores_equal_swaps_at_the_papers_temperature():
    model = tiny("llama", dtype=torch.float64)
    with blocks(model, tokens(12), prove(model)) as again:
        before = again.run(0, again.hidden(0))
        expected = reference_scores(before, lambda i, j: again.swapped(0, i, j), [11], sink_tokens=1)
        found = layer_swaps(before, [11], sink_tokens=1)
        made: list[tuple[int, int]] = []
        later = reference_scores(before, lambda i, j: made.append((i, j)) or again.swapped(0, i, j), [11], skip=1)
    without = found.s_pos_no_sink, found.s_sym_no_sink
    for ours, theirs in zip((found.s_pos, found.s_sym, found.effective, *without), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert made == [(i, j) for i in range(1, 11) for j in range(i + 1, 11)]  # every swap but those of the first key
    for ours, theirs in zip(without, later[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


ROTATION = Rotation("half", 0, torch.tensor([0.3, 0.01]), 1.0)


def test_positional_head():
    """Alike keys a quarter of a turn from the query, so that logits grow with distance: only the place counts."""
    n = 30
    k = torch.tensor([1.0, 0.0]).double().expand(1, n, 2)
    q = torch.tensor([0.0, 2e3]).double().expand(1, n, 2)
    found = swap_scores(q, k, rotation=Rotation("half", 0, torch.tensor([0.05]), 1.0), scale=1.0)
    torch.testing.assert_close(found.s_pos, torch.ones(1, 1).double(), rtol=0, atol=1e-6)
    assert float(found.s_sym) < 1e-6
    assert float(found.s_pos_logits) > 1 - 1e-5


def test_symbolic_head():
    """No rotation: only the content counts."""
    generator = torch.Generator().manual_seed(0)
    q, k = (x * torch.randn(1, 30, 4, generator=generator, dtype=torch.float64) for x in (20, 1))
    found = swap_scores(q, k, scale=1.0)
    torch.testing.assert_close(found.s_sym, torch.ones(1, 1).double(), rtol=0, atol=1e-6)
    assert float(found.s_pos) < 1e-6
    assert float(found.s_sym_logits) > 1 - 1e-5


def test_uniform_head():
    q, k = torch.zeros(1, 30, 4), draw(30, 4, heads=1, kv_heads=1)[1]
    found = swap_scores(q, k, rotation=ROTATION, queries="all")
    ones = torch.ones(1, 28).double()
    for values in (found.s_pos, found.s_sym, found.s_pos_logits, found.s_sym_logits):
        torch.testing.assert_close(values, ones, rtol=0, atol=1e-6)


@dataclass(frozen=True)
class Everything:
    """Logits of all keys at all positions, of one query of some heads, by definition."""

    matrix: torch.Tensor  # (heads, contents, places)
    weights: torch.Tensor  # (heads, places)

    @classmethod
    def of(cls, q, k, query, *, rotation=None, scale=1.0, softcap=None, bias=None, sinks=None, window=None, skip=0):
        heads, n, _ = q.shape
        seen = torch.tensor([query - j < (window or n) for j in range(query + 1)]).nonzero()[:, 0]
        contents, where = k.repeat_interleave(heads // len(k), 0), torch.arange(n)
        rotated_q = q[:, query]
        if rotation is not None:
            rotated_q = rotation.rotate(rotated_q[:, None], where[query, None])[:, 0]
        columns = []
        for p in seen.tolist():
            at = contents if rotation is None else rotation.rotate(contents, torch.full((n,), p))
            logits = torch.einsum("hd,hcd->hc", rotated_q, at) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            columns.append(logits if bias is None else logits + bias.expand(heads, n, n)[:, query, p, None])
        matrix = torch.stack(columns, -1)[:, seen]
        logits = matrix.diagonal(dim1=1, dim2=2)
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None].double()], -1)
        used = (seen >= skip) & (seen < query)
        return cls(matrix[:, used][..., used], logits.softmax(-1)[:, : len(seen)][:, used])

    def scores(self, tau, block=1):
        """Both scores of every head, from all swaps."""
        count = self.matrix.shape[1] // block
        parts = self.matrix[:, : count * block, : count * block].unflatten(1, (count, block))
        m = parts.unflatten(3, (count, block)).diagonal(dim1=2, dim2=4).logsumexp(-1)
        d = self.weights[:, : count * block].unflatten(1, (count, block)).mean(-1)
        i, j = torch.triu_indices(count, count, 1)
        alpha = ((d[:, i] - d[:, j]).abs() / tau).softmax(-1)
        before = torch.stack([m[:, i, i], m[:, j, j]]).softmax(0)
        after = torch.stack([m[:, j, i], m[:, i, j]]).softmax(0)
        both = (torch.cosine_similarity(after, x, dim=0, eps=0) for x in (before, before.flip(0)))
        return *((alpha * cosine).sum(-1) for cosine in both), torch.special.entr(alpha).sum(-1).exp()

    def deviations(self):
        """Variance, positional and symbolic deviation of every head."""
        logits = self.matrix.diagonal(dim1=1, dim2=2)
        apart = [(self.matrix - x).square().mean((-1, -2)) for x in (logits[:, None, :], logits[:, :, None])]
        return logits.var(-1, correction=0), *apart


def draw(n=70, d=8, *, heads=6, kv_heads=3, dtype=torch.float64, seed=1):
    """Queries and keys of heads from nearly uniform to very sharp attention, the last of them with a sink."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(h, n, d, generator=generator, dtype=torch.float64) for h in (heads, kv_heads))
    q *= torch.tensor([1e-3, 0.05, 0.3, 1.0, 4.0, 1.0])[:heads, None, None]
    q[-1, :, -1], k[-1, 0, -1] = 3.0, 4.0
    return q.to(dtype), k.to(dtype)


N = 70
ENCODINGS = {
    "rotary": {"rotation": Rotation("half", 0, torch.tensor([1.0, 0.3, 0.05, 0.001]), 1.0)},
    "interleaved": {"rotation": Rotation("interleaved", 0, torch.tensor([1.0, 0.3, 0.05, 0.001]), 1.0)},
    "partial": {"rotation": Rotation("half", 2, torch.tensor([0.5, 0.01]), 1.0)},
    "scaled": {"rotation": Rotation("interleaved", 0, torch.tensor([0.5, 0.1, 0.0]), 1.3)},
    "alibi": {"bias": -0.05 * (torch.arange(N)[:, None] - torch.arange(N)) * torch.arange(1.0, 7.0)[:, None, None]},
    "none": {},
    "window": {"rotation": Rotation("half", 0, torch.tensor([1.0, 0.3, 0.05, 0.001]), 1.0), "window": 40},
    "softcap": {"rotation": Rotation("half", 0, torch.tensor([1.0, 0.3, 0.05, 0.001]), 1.0), "softcap": 3.0},
    "sinks": {"rotation": Rotation("half", 0, torch.tensor([0.5, 0.01]), 1.0), "sinks": torch.linspace(-3, 3, 6)},
    "everything": {
        "rotation": Rotation("half", 0, torch.tensor([0.5, 0.01]), 1.0),
        "bias": torch.randn(N, N, generator=torch.Generator().manual_seed(2)),
        "sinks": torch.linspace(-3, 3, 6),
        "softcap": 5.0,
        "window": 50,
        "skip": 3,
    },
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scores_equal_all_swaps(encoding):
    q, k = draw(N)
    options = {"scale": 0.4, **ENCODINGS[encoding]}
    queries = [36, 50, N - 1]
    expected = [Everything.of(q, k, query, **options) for query in queries]
    for tau, block in ((1e-5, 1), (1e-4, 5), (1e-3, 2), (1e-2, 1), (0.1, 16), (1.0, 5)):
        found = swap_scores(q, k, queries=queries, tau=tau, block=block, **options)
        assert float(found.bound.max()) <= 1.01e-7
        assert bool(((found.kept > 0) & (found.kept <= 1)).all())
        for column, each in enumerate(expected):
            *scores, effective = each.scores(tau, block)
            for ours, theirs in zip((found.s_pos, found.s_sym), scores, strict=True):
                apart = (ours[:, column] - theirs).abs()
                assert bool((apart <= found.bound[:, column] + 1e-9).all())  # clamped ratios: 1e-9
            torch.testing.assert_close(found.effective[:, column], effective, rtol=1e-9, atol=0)  # of all swaps
    # Deviations are means over contents and places.
    found = swap_scores(q, k, queries=queries, **options)
    for column, each in enumerate(expected):
        variance, positional, symbolic = each.deviations()
        for score, deviation in ((found.s_pos_logits, positional), (found.s_sym_logits, symbolic)):
            closed = (1 - deviation / (2 * variance)).clamp(0, 1)
            torch.testing.assert_close(score[:, column], closed, rtol=1e-7, atol=1e-7)
        ratio = (positional + symbolic) / variance
        torch.testing.assert_close(found.exclusion[:, column], ratio, rtol=1e-7, atol=0)


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scores_without_the_sink_leave_its_keys_in_place(encoding, block):
    """Brute force: equal to the swaps of all keys but the first ones, also where a window hides some of these."""
    q, k = draw(N)
    options = {"scale": 0.4, "block": block, **ENCODINGS[encoding]}
    queries = [13, 41, N - 1]
    first = max(4, options.get("skip", 0))
    found = swap_scores(q, k, queries=queries, sink_tokens=4, **options)
    plain = swap_scores(q, k, queries=queries, **options)
    torch.testing.assert_close(found.s_pos, plain.s_pos, rtol=0, atol=0)
    torch.testing.assert_close(plain.s_pos_no_sink, plain.s_pos, rtol=0, atol=0)  # no sink: nothing is left out
    for column, query in enumerate(queries):
        both = found.s_pos_no_sink[:, column], found.s_sym_no_sink[:, column]
        if query - first < 2 * block:
            assert all(bool(values.isnan().all()) for values in both)
            continue
        given = {name: value for name, value in options.items() if name != "block"} | {"skip": first}
        expected = Everything.of(q, k, query, **given).scores(1e-4, block)[:2]
        for ours, theirs in zip(both, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1.1e-7)  # the weight of swaps that are left out


def test_constructed_heads_have_their_labels():
    """A sink head counts as symbolic if its first key is swapped, and is a sink head otherwise."""
    attention = constructed_heads()
    found = layer_swaps(attention, choose_queries(attention.n, count=8), sink_tokens=1)
    spread = pattern_statistics(attention, torch.arange(attention.n)[None], PatternConfig()).spread.result()
    sink = sink_heads((spread.sink_mass - spread.uniform_sink_mass)[:, None])
    all_keys = label(found.s_pos.mean(1), found.s_sym.mean(1), 0.1)
    no_sink = label(found.s_pos_no_sink.mean(1), found.s_sym_no_sink.mean(1), 0.1, sink=sink)
    names = [(LABELS[one], LABELS[other]) for one, other in zip(all_keys.tolist(), no_sink.tolist(), strict=True)]
    assert dict(zip(LABELS_OF, names, strict=True)) == LABELS_OF


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_all_swaps_without_a_look_at_weights_equal_chosen_ones(encoding, monkeypatch):
    """Brute force: what a GPU computes in short texts, in one piece and in small ones, against tiles and pivots."""
    q, k = draw(N)
    options = {"queries": [13, 40, 41, 66, N - 1], "taus": (1e-2, 0.1), "sink_tokens": 4, "scale": 0.4}
    options |= ENCODINGS[encoding]
    sizes = (1, 2, 3, 4, 12, 40)
    for block in (1, 5):
        results = []
        for dense, panel, side in ((False, 0, 0), (True, 512, 128), (True, 16, 5)):
            monkeypatch.setattr(layer, "takes_all", lambda *_, dense=dense: dense)
            monkeypatch.setattr(all_swaps, "_PANEL", {"cpu": panel})
            monkeypatch.setattr(all_swaps, "_SIDE", {"cpu": side})
            results.append(swap_scores(q, k, block=block, blocks=sizes, **options))
        chosen, *every = results
        for found in every:
            assert found.bound.tolist() == torch.zeros_like(found.bound).tolist()
            assert found.kept.tolist() == torch.ones_like(found.kept).tolist()
            # The chosen swaps leave out a weight of up to 1e-7, of two versions of scores in a mean.
            assert_alike(found, chosen, rtol=1e-6, atol=2.1e-7, equal_nan=True)


def test_queries_with_similar_numbers_of_keys_are_computed_together():
    counts = [*range(2, 200), 3, 0, 1]
    together = list(all_swaps._alike(counts))
    assert sorted(index for chosen, _ in together for index in chosen) == list(range(199))
    assert all(min(counts[x] for x in chosen) >= 0.9 * most for chosen, most in together)
    assert len(together) < 40


def test_scores_from_logits_are_left_out_if_they_are_not_wanted():
    attention = random_causal_layer()
    wanted, without = (layer_swaps(attention, QUERIES, sink_tokens=2, from_logits=x) for x in (True, False))
    for name, values in vars(wanted).items():
        if name in ("exclusion", "s_pos_logits", "s_sym_logits"):
            assert not values.isnan().any()
            assert getattr(without, name).isnan().all()
        elif isinstance(values, torch.Tensor):
            torch.testing.assert_close(getattr(without, name), values, rtol=0, atol=0)


def test_swaps_of_equal_keys_count_once():
    """Keys that share the largest weight, or the smallest: their swap has two pivots of the same weight."""
    q, k = draw(N)
    k[:, 20] = k[:, 11] = k[:, 5]
    for sign in (1, -1):
        q[:] = 3 * sign * k.repeat_interleave(2, 0)[:, 5:6]
        expected = Everything.of(q, k, N - 1, scale=0.4)
        for tau in (1e-3, 0.1, 1.0):
            found = swap_scores(q, k, queries=[N - 1], tau=tau, scale=0.4)
            for ours, theirs in zip((found.s_pos, found.s_sym), expected.scores(tau)[:2], strict=True):
                assert bool(((ours[:, 0] - theirs).abs() <= found.bound[:, 0] + 1e-9).all())


def test_constant_logits_are_both_positional_and_symbolic():
    """Rounding must not violate the exclusion bound."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        k = torch.randn(2, 1, 8, generator=generator, dtype=torch.float64).expand(2, 60, 8)
        q = torch.randn(4, 60, 8, generator=generator, dtype=torch.float64)
        for options in (
            {},
            {"bias": torch.full((60, 60), 3.3)},
            {"rotation": Rotation("half", 0, torch.zeros(4), 1.0)},
        ):
            found = swap_scores(q, k, queries=[20, 59], **options)
            for values in (found.s_pos, found.s_sym, found.s_pos_logits, found.s_sym_logits):
                torch.testing.assert_close(values, torch.ones(4, 2).double(), rtol=0, atol=1e-7)
            assert bool(found.exclusion.isinf().all())


def queries_of(q, k, queries, **options):
    """The logits of queries, of tensors without mask or bias."""
    rotation, n = options.get("rotation"), q.shape[1]
    where = torch.arange(n)
    rotated = [x if rotation is None else rotation.rotate(x, where) for x in (q, k)]
    attention = LayerAttention(
        0, "built", rotated[0][None], rotated[1][None], k, q, 0.4, Mask(causal=True), rotation, where
    )
    ((_, found),) = query_logits(attention, queries)
    return found


def test_closed_form_equals_all_pairs():
    query = queries_of(*draw(N), [20, 45, N - 1], **ENCODINGS["rotary"])
    for one, other in zip(*(vars(f(query)).values() for f in (logit_deviations, all_pairs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def all_pairs(query):
    return deviations._all_pairs(query, 1)


def test_swaps_that_are_left_out_are_within_the_bound(monkeypatch):
    """With a coarser limit the scores differ, but never by more than the reported bound."""
    monkeypatch.setattr(scores, "LEFT_OUT", 0.3)
    monkeypatch.setattr(scores, "_TILE", {"cpu": 4})
    monkeypatch.setattr(scores, "_ENTRIES", {"cpu": 64})
    q, k = draw(N)
    differs = 0.0
    for tau in (1e-4, 1e-3, 1e-2, 0.1):
        found = swap_scores(q, k, tau=tau, scale=0.4)
        expected = Everything.of(q, k, N - 1, scale=0.4).scores(tau)
        for ours, theirs in zip((found.s_pos, found.s_sym), expected[:2], strict=True):
            apart = (ours[:, 0] - theirs).abs()
            differs = max(differs, float(apart.max()))
            assert bool((apart <= found.bound[:, 0] + 1e-9).all())
        torch.testing.assert_close(
            found.effective[:, 0], expected[2], rtol=1e-7, atol=0
        )  # of all swaps, those left out included
    assert differs > 1e-3


def test_few_swaps_are_computed_unless_attention_is_uniform():
    n = 200
    q, k = torch.ones(4, n, 1).double(), torch.zeros(4, n, 1).double()
    k[1, 7], k[2, 9], k[3] = 12.0, -12.0, torch.linspace(0, 1e-9, n)[:, None]
    found = swap_scores(q, k, scale=1.0)
    # All keys alike, one above all others, one below all others, differences far below τ.
    torch.testing.assert_close(found.kept[:, 0], torch.tensor([1, 2 / 199, 2 / 199, 1]).double(), rtol=1e-6, atol=0)
    assert found.bound[[0, 3], 0].tolist() == [0, 0]
    for head in range(4):
        expected = Everything.of(q[head, None], k[head, None], n - 1).scores(1e-4)
        ours = torch.stack([found.s_pos[head], found.s_sym[head], found.effective[head]])
        torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-6, atol=1e-6)
    # All of 199 · 198 / 2 swaps count where attention is uniform, 198 with one key above the others.
    torch.testing.assert_close(found.effective[:2, 0], torch.tensor([19701.0, 198.0]).double(), rtol=1e-6, atol=0)


class Entries(TorchDispatchMode):
    """Number of entries of all tensors that are computed, and of the largest of them."""

    def __init__(self):
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.total += x.numel()
                self.largest = max(self.largest, x.numel())
        return out


def test_time_and_memory_are_linear():
    counted = []
    for n in (1024, 4096):
        q, k = draw(n, heads=2, kv_heads=1, dtype=torch.float32)
        q[..., -1], k[:, 0, -1] = 10.0, 10.0
        with Entries() as entries:
            found = swap_scores(q, k, queries=[n // 2, n - 1], scale=0.4, **ENCODINGS["partial"])
        assert float(found.kept.max()) < 0.01
        counted.append(entries)
    assert counted[1].total < 5 * counted[0].total
    assert counted[1].largest <= 2 * 4096 * 8  # heads times keys times dimensions


def assert_alike(found, expected, **tolerance):
    """All scores are equal, however many swaps were computed."""
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor) and name not in ("bound", "kept"):
            torch.testing.assert_close(getattr(found, name), value, **tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_the_cpu(subtests):
    """Both may leave out swaps that weigh up to 1e-7, not the same ones."""
    q, k = draw(N)
    for encoding, given in ENCODINGS.items():
        options = {"queries": [36, 50, N - 1], "taus": (1e-2, 0.1), "blocks": (2, 5), "sink_tokens": 4, **given}
        expected = swap_scores(q, k, **options)
        moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with subtests.test(encoding=encoding):
            assert_alike(swap_scores(q.cuda(), k.cuda(), **moved), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_recorded_scores_equal_those_of_the_cpu(subtests):
    """From the second call on kernels are replayed, also where more swaps follow and all swaps are computed."""
    for n in (40, 700, 3000):
        graphs._entries.clear()
        options = {"queries": [n // 3, n // 2, n - 1], "taus": (1e-2,), "sink_tokens": 2, **ENCODINGS["partial"]}
        for seed in range(4):
            q, k = draw(n, dtype=torch.float32, seed=seed)
            with torch.inference_mode(seed % 2 == 0):
                found = swap_scores(q.cuda(), k.cuda(), **options)
            with subtests.test(n=n, seed=seed):
                assert_alike(found, swap_scores(q.double(), k.double(), **options), rtol=1e-4, atol=1e-5)
        assert [entry.graph is not None for entry in graphs._entries.values()] == [True]


@pytest.mark.parametrize("taus", [(1e-3, 1e-2), (1e-3, 0.1)])
@pytest.mark.parametrize("longest", [10, 1024])
def test_parts_that_are_recorded_give_the_same_scores(longest, taus, monkeypatch):
    """What a GPU computes in long texts and in short ones, where all swaps of blocks are recorded as well."""
    q, k = draw(N)
    options = {"queries": [20, 45, N - 1], "taus": taus, "blocks": (1, 2, 8), "sink_tokens": 2, **ENCODINGS["rotary"]}
    expected = swap_scores(q, k, **options)
    monkeypatch.setattr(all_swaps, "_DENSE", longest)
    gpu = torch.device("cuda")
    monkeypatch.setattr(layer, "takes_all", lambda counts, taus, _: all_swaps.takes_all(counts, taus, gpu))
    monkeypatch.setattr(layer, "has_graphs", lambda device: True)
    monkeypatch.setattr(layer, "launched", lambda function, *tensors, **_: function(*tensors))
    assert_alike(swap_scores(q, k, **options), expected, rtol=1e-6, atol=2.1e-7)


@pytest.mark.parametrize("slots", [2, 40])
def test_swaps_computed_without_reading_their_number_are_all_or_say_so(slots, monkeypatch):
    monkeypatch.setattr(scores, "_SLOTS", slots)
    for encoding in ("rotary", "interleaved", "partial", "scaled", "none"):  # the rotation alone is used
        query = queries_of(*draw(N), [20, 45, N - 1], **ENCODINGS[encoding])
        expected = score_swaps(query, taus=(1e-3, 1e-2))
        pivots = Pivots.of(query, (1e-3, 1e-2), 1)
        found, complete = pivots.first_scores()
        enough = pivots.number.sum(-1).amax() <= slots * pivots.number.shape[1]
        assert bool(complete) == bool(enough & ~pivots.even.any())
        counted = ~pivots.even & (pivots.number.sum(-1, keepdim=True) <= slots)
        for name in ("s_pos", "s_sym", "bound", "kept", "effective"):
            ours, theirs = (getattr(x, name)[counted] for x in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_columns_of_a_graph_are_those_of_all_swaps(sink_tokens, monkeypatch):
    """What a GPU records, computed on the CPU: complete with enough slots, and the same numbers."""
    monkeypatch.setattr(scores, "_SLOTS", 400)
    q, k = draw(N)
    q[:3] *= 4  # no head is even at the scale of τ
    query = replace(queries_of(q, k, [20, 45, N - 1], **ENCODINGS["rotary"]), sink=sink_tokens)
    taus = (1e-4, 1e-3)
    found, expected = layer._first_columns(query, taus, True), layer._columns(score_swaps(query, taus=taus))
    others = layer._deviation_columns(query, 1, True), layer._no_sink_columns(query, expected, taus, 1)
    assert bool((found[..., -1] == float(not Pivots.of(query, taus, 1).even.any())).all())
    every = ~(Pivots.of(query, taus, 1).even | Pivots.of(query.without_sink(), taus, 1).even)
    assert bool(every.any())
    torch.testing.assert_close(found[..., :-1][every], torch.cat([expected, *others], -1)[every])


@pytest.mark.parametrize("block", [1, 4])
def test_tiles_and_groups_of_queries_do_not_matter(block, monkeypatch):
    q, k = draw(N)
    options = {"queries": [20, 45, N - 1], "taus": (1e-3, 1e-1), "block": block, **ENCODINGS["rotary"]}
    whole = swap_scores(q, k, **options)
    monkeypatch.setattr(scores, "_TILE", {"cpu": 7})
    for module in (scores, deviations, logits):
        monkeypatch.setattr(module, "_ENTRIES", {"cpu": 1})
    assert_alike(swap_scores(q, k, **options), whole, rtol=1e-6, atol=1e-6)


def test_float32_is_close_to_float64():
    exact, coarse = (
        score_swaps(queries_of(*draw(N, dtype=dtype), [N - 1], **ENCODINGS["rotary"]), taus=(1e-2,))
        for dtype in (torch.float64, torch.float32)
    )
    # Queries and keys rounded to float32 change weights by up to 1e-6, and their differences are divided by τ.
    torch.testing.assert_close(coarse.s_pos, exact.s_pos, rtol=0, atol=1e-4)


def test_huge_logits_do_not_overflow():
    q, k = draw(N, dtype=torch.float32)
    found = swap_scores(1e3 * q, k, tau=1e-4, blocks=(3,))
    for values in (found.s_pos, found.s_sym, found.by_block, found.s_pos_logits, found.exclusion):
        assert bool(values.isfinite().all())


def test_keys_at_other_positions_are_rotated_keys():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(x, 9, generator=generator, dtype=torch.float64) for x in (2, 5))
    positions, nothing = torch.arange(5), torch.zeros(1, 2, 5)
    for scaling in (1.0, 1.3):
        rotation = Rotation("interleaved", 2, torch.tensor([0.5, 0.1]), scaling)
        query = QueryLogits.of(q[None], k[None], rotation, positions, counts=(5, 5), logits=nothing, weights=nothing)
        expected = torch.stack([q @ rotation.rotate(k[c].expand(5, 9), positions).T for c in range(5)], 1)
        torch.testing.assert_close(swapped_logits(query)[0], expected, rtol=0, atol=1e-5)  # angles are float32


def test_sensitivity_and_intervals_are_in_the_result():
    q, k = draw(40, 4, heads=4, kv_heads=2)
    found = swap_scores(q, k, rotation=ROTATION, queries=[20, 30, 39], taus=(0.1,), blocks=(1, 4, 30))
    assert found.taus == (1e-4, 0.1)
    torch.testing.assert_close(found.by_tau[0, :, 0], found.s_pos.mean(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.by_block[1, :, 0], found.s_sym.mean(1), rtol=0, atol=1e-6)
    assert bool(found.by_block[..., 1].isfinite().all())
    assert bool(found.by_block[..., 2].isnan().all())  # no query sees two blocks of 30
    for values, bounds in zip((found.s_pos, found.s_sym), found.intervals(), strict=True):
        mean = values.mean(1)
        assert bool(((bounds[:, 0] <= mean + 1e-9) & (mean <= bounds[:, 1] + 1e-9)).all())
        assert 0 <= float(bounds.min()) <= float(bounds.max()) <= 1
    alone = swap_scores(q, k, rotation=ROTATION, queries="last").intervals()
    assert all(bool(bounds.isnan().all()) for bounds in alone)


def test_labels():
    s_pos, s_sym = torch.tensor([0.95, 0.05, 0.95, 0.5, math.nan]), torch.tensor([0.05, 0.95, 0.95, 0.5, 0.0])
    names = [LABELS[code] if code >= 0 else None for code in label(s_pos, s_sym, 0.1).tolist()]
    assert names == ["positional", "symbolic", "uniform", "mixed", None]
    assert label(s_pos, s_sym, 0.04).tolist()[:2] == [0, 0]
    sink = torch.tensor([True, True, False, False, True])
    names = [LABELS[code] if code >= 0 else None for code in label(s_pos, s_sym, 0.1, sink=sink).tolist()]
    assert names == ["sink", "sink", "uniform", "mixed", "sink"]


def test_labels_keep_their_codes():
    """Stored codes are an interface: a new label comes last."""
    assert LABELS == ("mixed", "positional", "symbolic", "uniform", "sink")


def test_sink_heads_need_the_mean_and_the_interval():
    excess = torch.tensor([[0.5, 0.6, 0.4], [0.3, 0.31, 0.3], [0.29, 0.3, 0.29], [0.0, 0.02, 0.95], [-0.1, 0.9, 0.2]])
    assert sink_heads(excess).tolist() == [True, True, False, False, False]  # the last two differ over documents
    assert sink_heads(excess[:, :1]).tolist() == [True, True, False, False, False]  # a single document: its mean
    assert sink_heads(excess, 0.1).tolist() == [True, True, True, False, False]


def test_bad_input_is_one_clear_line(subtests):
    q, k = torch.ones(2, 12, 4), torch.ones(1, 12, 4)
    for given, options, words in (
        ((q, k), {"queries": [0]}, "position 0 of 12 tokens"),
        ((q, k), {"queries": [1]}, "position 1 of 12 tokens"),
        ((q, k), {"queries": [12]}, "2 to 11 can"),
        ((q, k), {"queries": "middle"}, "'last', 'all' or positions"),
        ((q, k), {"tau": 0.0}, "tau=0.0 must be positive"),
        ((q, k), {"tau": 1e-4, "taus": (-1.0,)}, "tau=-1.0 must be positive"),
        ((q, k), {"block": 6}, "block=6 is too long"),
        ((q, k), {"block": 20}, "block=20 is too long"),
        ((q, k), {"block": 0}, "block=0"),
        ((q, k), {"window": 2}, "sees 1 keys before it"),
        ((q, k), {"skip": 10}, "after the first 10"),
        ((torch.ones(3, 12, 4), torch.ones(2, 12, 4)), {}, "multiple of kv_heads"),
        ((torch.full((1, 12, 4), math.inf), k), {}, "NaN or Inf"),
        ((q[:, :2], k[:, :2]), {}, "leave no query"),
    ):
        with subtests.test(words=words):
            with pytest.raises(MeasureError, match=words) as error:
                swap_scores(*given, **options)
            assert "\n" not in str(error.value)


def test_queries_are_spread_and_end_with_the_last():
    assert choose_queries(256, count=16)[-1] == 255
    assert len(choose_queries(256, count=16)) == 16
    assert choose_queries(10, count=1) == [9]
    assert choose_queries(6, count=0) == [2, 3, 4, 5]
    assert choose_queries(6, count=1, positions=(-1, 3)) == [5, 3]


def test_key_mixing_tells_layers_that_must_be_run_again():
    for family, mixes in {"llama": False, "ctrl": False, "zaya": True, "gpt2": False}.items():
        for value in key_mixing(*proved(family)).values():
            assert (value > KEYS_MIX) == mixes, family
