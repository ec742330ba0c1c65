"""Brute force: planes against swaps made one by one, masking against dense softmax. Identity: sums. End-to-end too."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama import modeling_llama

from helpers.capture import TinySubject, proved, shared, swapped_logits, tokens
from helpers.capture import run as captured
from helpers.models import save_model, sharp_llama
from helpers.tolerance import rounding
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.attention import attention_output
from wherewhat.measures.extend.retrieval import plant, remembered_facts
from wherewhat.measures.frequencies import FrequenciesConfig, frequencies_measurement, planes
from wherewhat.measures.frequencies import text as frequencies_text
from wherewhat.measures.frequencies.frequencies_measurement import FrequenciesMeasurement
from wherewhat.measures.frequencies.masking import (
    MASSIVE,
    FixedDimensions,
    frequency_bands,
    relative_norms,
    without_planes,
)
from wherewhat.measures.frequencies.planes import (
    dimensions,
    frequency_ids,
    frequency_use,
    mean_frequency,
    mean_frequency_softmax,
    peak_band,
    plane_norms,
    plane_queries,
    predicted_band,
    slower_planes,
)
from wherewhat.measures.frequencies.text import measure_frequencies
from wherewhat.measures.measurement import all_metrics
from wherewhat.measures.swaps import SCORES
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.logits import keys_before, query_logits
from wherewhat.measures.tensors import correlation, next_token_loss
from wherewhat.report.result import run as run_request
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.subject import ModelSubject
from wherewhat.scores import Column, Scores

FAMILIES = [
    "llama",  # half-split, grouped queries
    "gptj",  # interleaved, partial
    "gpt_neox",  # partial
    "gemma3_text",  # norms on queries and keys, sliding window, two rotations
    "gemma2",  # soft-cap
    "phi3:longrope",  # scaled
    "gpt_oss",  # sinks
    "deepseek_v3",  # rotated at the end of the head
]
N, QUERY = 19, 18


class Subject(TinySubject):
    """A tiny model whose mixing of keys can be given."""

    def __init__(self, name, *, mixing=None, **options):
        super().__init__(name, **options)
        self.mixing = mixing

    def key_mixing(self):
        return super().key_mixing() if self.mixing is None else self.mixing


def partial_logits(attention, query, keys, dims):
    """Contributions of groups of head dimensions to the logits of one query, (heads, keys, groups) float64."""
    q = attention.rot_q[0, :, query].double()[:, dims]  # (heads, groups, width)
    k = attention.rot_k[0][:, keys].double()[..., dims]  # (kv_heads, keys, groups, width)
    shared = q.view(attention.kv_heads, -1, *q.shape[1:])
    return torch.einsum("khpw,knpw->khnp", shared, k).flatten(0, 1) * attention.scale


def plane_swaps(attention, query, **options):
    """Scores of one query."""
    s_pos, s_sym = planes.plane_swaps(attention, [query], **options)
    return s_pos[:, 0], s_sym[:, 0]


def plane_logits(attention, query, keys):
    return torch.cat([partial_logits(attention, query, keys, dims) for dims in dimensions(attention)], -1)


def masked_attention(attention, keep, *, heads=None, block_mib=64):
    return attention_output(without_planes(attention, keep, heads=heads), block_mib=block_mib)


def rotated_layers(name, dtype=torch.float64, n=N):
    """Layers that rotate, of a float32 model, with their tensors in ``dtype``."""
    layers = [layer for layer in captured(shared(name), tokens(n)) if layer.rotation is not None]
    return [replace(x, rot_q=x.rot_q.to(dtype), rot_k=x.rot_k.to(dtype), value=x.value.to(dtype)) for x in layers]


def groups_of(attention):
    """Dimensions of every plane, the unrotated ones last."""
    pairs = attention.rotation.pairs.tolist()
    turned = {x for pair in pairs for x in pair}
    rest = [x for x in range(attention.rot_q.shape[-1]) if x not in turned]
    return [*pairs, rest] if rest else pairs


@pytest.mark.parametrize("name", FAMILIES)
def test_planes_sum_to_the_logits(name):
    for attention in rotated_layers(name, torch.float32):
        (keys,) = keys_before(attention, [QUERY])
        k = attention.rot_k[0][:, keys].double().repeat_interleave(attention.heads // attention.kv_heads, 0)
        expected = (attention.rot_q[0, :, QUERY, None].double() * k).sum(-1) * attention.scale
        found = plane_logits(attention, QUERY, keys)
        assert found.shape[-1] == len(groups_of(attention))
        reach = float(expected.abs().max())
        torch.testing.assert_close(found.sum(-1), expected, rtol=0, atol=1e-5 * reach)

        ((_, whole),) = query_logits(attention, [QUERY])
        matrix = swapped_logits(whole).flatten(0, 1)
        logits, matrices = torch.zeros_like(expected), torch.zeros_like(matrix)
        for _, _, part in plane_queries(attention, [QUERY]):
            shape = (attention.kv_heads, -1)
            logits += part.logits.unflatten(0, shape).sum(1).flatten(0, 1)
            matrices += swapped_logits(part).unflatten(0, shape).sum(1).flatten(0, 1)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * reach)
        torch.testing.assert_close(matrices, matrix, rtol=0, atol=1e-5 * float(matrix.abs().max()))
        # What is, is one of the things that could be.
        torch.testing.assert_close(matrices.diagonal(dim1=1, dim2=2), expected, rtol=0, atol=1e-5 * reach)


def by_definition(attention, query, head, dims, tau):
    """Both scores of one plane of one head, from keys that are really swapped, rotated and weighed."""
    (keys,) = keys_before(attention, [query])
    content = torch.zeros_like(attention.k[0, 0])
    content[:, dims] = attention.k[0, head // (attention.heads // attention.kv_heads)][:, dims]
    q = attention.rot_q[0, head, query]

    def attend(k):
        rotated = attention.rotation.rotate(k, attention.positions.reshape(-1, attention.m)[0])
        return torch.softmax((rotated[keys] @ q) * attention.scale, -1)

    before = attend(content)
    gaps, same, reverse = [], [], []
    for i, j in itertools.combinations(range(len(keys)), 2):
        swapped = content.clone()
        swapped[keys[i]], swapped[keys[j]] = content[keys[j]], content[keys[i]]
        v, after = before[[i, j]], attend(swapped)[[i, j]]
        gaps.append((v[0] - v[1]).abs())
        same.append(torch.cosine_similarity(after, v, dim=0))
        reverse.append(torch.cosine_similarity(after, v.flip(0), dim=0))
    alpha = torch.softmax(torch.stack(gaps) / tau, 0)
    return float(alpha @ torch.stack(same)), float(alpha @ torch.stack(reverse))


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox", "gemma3_text", "phi3:longrope"])
def test_a_plane_equals_swaps_made_one_by_one(name):
    attention = rotated_layers(name)[-1]
    dims = groups_of(attention)
    for tau in (1e-2, 1e-4):
        found = plane_swaps(attention, QUERY, tau=tau)
        assert found[0].shape == found[1].shape == (attention.heads, len(dims))
        for head, plane in ((0, 0), (attention.heads - 1, len(dims) // 2), (1, len(dims) - 1)):
            expected = by_definition(attention, QUERY, head, dims[plane], tau)
            assert [float(x[head, plane]) for x in found] == pytest.approx(expected, abs=1e-6)


def test_some_planes_at_a_time_give_the_same(monkeypatch):
    attention = rotated_layers("gptj")[0]
    at_once = plane_swaps(attention, QUERY, skip=2)
    monkeypatch.setattr(planes, "_ENTRIES", {"cpu": attention.heads * N * 3})
    assert len(list(plane_queries(attention, [QUERY], skip=2))) > 2
    in_parts = plane_swaps(attention, QUERY, skip=2)
    torch.testing.assert_close(in_parts, at_once, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_queries_at_once_give_the_same_as_each_alone(family, dense, monkeypatch):
    """Brute force, also with all swaps computed, as on a GPU."""
    queries = [QUERY, 9, 17]
    for attention in rotated_layers(family):
        expected = [plane_swaps(attention, query, skip=1, tau=1e-3) for query in queries]
        with monkeypatch.context() as patch:
            patch.setattr(planes, "takes_all", lambda *_: dense)
            found = planes.plane_swaps(attention, queries, skip=1, tau=1e-3)
        for ours, theirs in zip(found, zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(ours, torch.stack(theirs, 1), rtol=0, atol=2e-6)


def test_hand_built_planes():
    """Plane 0 turns and holds the same key everywhere, plane 1 does not turn, plane 2 is empty."""
    n, rotation = 12, Rotation("half", 0, torch.tensor([0.3, 0.0, 0.01]), 1.0)
    k = 3 * torch.randn(1, 1, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k[..., [0, 3]], k[..., [2, 5]] = torch.tensor([4.0, 1.0], dtype=torch.float64), 0.0
    q = torch.ones(1, 1, n, 6, dtype=torch.float64)
    where = torch.arange(n)
    rot_q, rot_k = rotation.rotate(q, where), rotation.rotate(k, where)
    attention = LayerAttention(0, "built", rot_q, rot_k, k, q, 1.0, Mask(causal=True), rotation, where)
    s_pos, s_sym = plane_swaps(attention, n - 1)
    assert s_pos[0].tolist()[0] == pytest.approx(1, abs=1e-9)
    assert s_sym[0].tolist()[1:] == pytest.approx([1, 1], abs=1e-9)
    assert s_pos[0].tolist()[2] == pytest.approx(1, abs=1e-9)
    assert float(s_sym[0, 0]) < 0.1
    assert float(s_pos[0, 1]) < 0.1


def test_frequencies_are_ranked_by_speed_and_cut_into_bands():
    inv_freq = torch.tensor([0.1, -1.0, 0.0, 0.5, 0.01])
    assert frequency_ids(inv_freq).tolist() == [3, 1, 5, 2, 4]
    bands = frequency_bands(inv_freq, 2)
    assert bands.tolist() == [[True, True, False, True, False], [False, False, True, False, True]]
    assert frequency_bands(inv_freq, 5).sum(1).tolist() == [1] * 5
    with pytest.raises(MeasureError, match="bands=6 cannot be made of 5 planes"):
        frequency_bands(inv_freq, 6)


def test_scores_of_bands_are_means_over_heads_and_planes():
    """Layers with other frequencies, heads and numbers of planes; NaN is left out."""
    generator = torch.Generator().manual_seed(0)
    layers, bands = [], {}
    for layer, (heads, count) in enumerate([(3, 8), (3, 8), (5, 6)]):
        values = {name: torch.rand(heads, count, generator=generator) for name in SCORES}
        values["s_sym"][1, 2] = values["s_pos_no_sink"][:] = torch.nan
        curves = {f"plane_{name}": Column(x, ("head", "plane")) for name, x in values.items()}
        layers.append(Scores(layer=layer, curves=curves))
        bands[layer] = frequency_bands(torch.rand(count, generator=generator), 2)
    found = frequencies_text._band_scores(layers, bands)
    for name in SCORES:
        for band in range(2):
            parts = [x.curves[f"plane_{name}"].values[:, bands[x.layer][band]].double().flatten() for x in layers]
            expected = pytest.approx(float(torch.cat(parts).nanmean()), rel=1e-14, nan_ok=True)
            assert found.pop(f"{name}_band_{band + 1}") == expected
    assert not found


def test_use_is_the_largest_contribution_and_even_use_gives_the_middle():
    attention = rotated_layers("llama")[0]
    use = frequency_use(attention, [7, QUERY])
    keys = keys_before(attention, [7, QUERY])
    largest = [plane_logits(attention, q, k).abs().amax(1) for q, k in zip((7, QUERY), keys, strict=True)]
    torch.testing.assert_close(use, (largest[0] + largest[1]) / 2, rtol=1e-9, atol=0)
    for dtype in (torch.bfloat16, torch.float16):  # in float32, in which their products are exact
        half = replace(attention, rot_q=attention.rot_q.to(dtype), rot_k=attention.rot_k.to(dtype))
        double = replace(half, rot_q=half.rot_q.double(), rot_k=half.rot_k.double())
        expected = frequency_use(double, [7, QUERY])
        torch.testing.assert_close(frequency_use(half, [7, QUERY]), expected, rtol=3e-7, atol=1e-7)
    count = attention.rotation.planes
    even = mean_frequency(torch.ones(1, count, dtype=torch.float64), attention.rotation.inv_freq)
    assert float(even) == (count + 1) / 2
    single = torch.zeros(2, count, dtype=torch.float64)
    single[0, 0] = 3.0  # the first plane turns fastest here
    found = mean_frequency(single, attention.rotation.inv_freq)
    assert float(found[0]) == 1.0
    assert bool(found[1].isnan())
    assert float(mean_frequency_softmax(torch.ones(1, count), attention.rotation.inv_freq)) == (count + 1) / 2
    assert bool(mean_frequency_softmax(single, attention.rotation.inv_freq)[1].isnan())


def test_softmax_weights_follow_the_dominant_plane():
    """As in arXiv 2605.31558: one plane with 46 logits among 63 with 1 is the mean, but not with linear weights."""
    inv_freq = 10000.0 ** -(torch.arange(64) / 64)
    use = torch.ones(1, 64, dtype=torch.float64)
    use[0, 1] = 46.0
    assert float(mean_frequency_softmax(use, inv_freq)) == pytest.approx(2.0, abs=1e-9)
    expected = (46 * 2 + sum(range(1, 65)) - 2) / (46 + 63)
    assert float(mean_frequency(use, inv_freq)) == pytest.approx(expected)
    weights = [math.exp(x) for x in use[0].tolist()]
    by_hand = sum(w * rank for rank, w in enumerate(weights, 1)) / sum(weights)
    assert float(mean_frequency_softmax(use, inv_freq)) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", FAMILIES)
def test_masked_attention_equals_the_dense_formula(name):
    attention = rotated_layers(name)[0]
    keep = torch.arange(attention.rotation.planes) % 2 == 0
    k = attention.rot_k[0].repeat_interleave(attention.heads // attention.kv_heads, 0)
    products = attention.rot_q[0][:, :, None] * k[:, None] * attention.scale  # (heads, n, n, d)
    value = attention.value[0].repeat_interleave(attention.heads // attention.value.shape[1], 0)
    for heads in (None, torch.arange(attention.heads) == 1):
        changed = products.clone()
        changed[..., attention.rotation.pairs[~keep].flatten()] = 0
        if heads is not None:
            changed[~heads] = products[~heads]
        logits = changed.sum(-1)
        if attention.softcap is not None:
            logits = attention.softcap * torch.tanh(logits / attention.softcap)
        weights = attention.weigh(logits[None])[0]
        found = masked_attention(attention, keep, heads=heads)
        torch.testing.assert_close(found[0], (weights @ value).transpose(0, 1), rtol=1e-9, atol=1e-9)
        masked = without_planes(attention, keep, heads=heads)
        torch.testing.assert_close(masked.k, attention.k, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_plane_kept_is_the_model_and_none_is_the_model_with_all_positions_equal(name):
    """Identity, on half-split, interleaved, partial, scaled and windowed rotations."""
    model, proof = proved(name)
    subject, ids = ModelSubject(SimpleNamespace(model=model), proof), tokens(31)

    def edited(keep, how):
        def edit(attention):
            if attention.rotation is None:
                return None
            planes = torch.full((attention.rotation.planes,), keep)
            return attention_output(without_planes(attention, planes, how=how))

        return subject.edited(ids, edit)

    usual = subject.run(ids, lambda _: None, logits=True)
    still = subject.run(ids, lambda _: None, logits=True, positions=torch.zeros(31, dtype=torch.int64))
    size = float(usual.abs().max())
    # Four blocks of sums of 64 terms in float32.
    close = {"rtol": 0, "atol": rounding(4 * 64) * size}
    torch.testing.assert_close(edited(True, "mask"), usual, **close)
    torch.testing.assert_close(edited(False, "unrotate"), still, **close)
    assert float((usual - still).abs().max()) > 30 * close["atol"]  # positions matter


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox", "gemma3_text", "phi3:longrope", "deepseek_v3"])
def test_unrotated_planes_are_products_before_rotation(name):
    """Brute force: every plane of every head, with its angles or without."""
    attention = rotated_layers(name)[0]
    rotation, groups = attention.rotation, attention.heads // attention.kv_heads
    keep = torch.arange(rotation.planes) % 2 == 0
    q, k = attention.q[0], attention.k[0].repeat_interleave(groups, 0)
    turned_q, turned_k = attention.rot_q[0], attention.rot_k[0].repeat_interleave(groups, 0)
    for heads in (None, torch.arange(attention.heads) == 1):
        changed = without_planes(attention, keep, heads=heads, how="unrotate")
        expected = torch.zeros(attention.heads, N, N, dtype=torch.float64)
        for plane, dims in enumerate(groups_of(attention)):
            rotated = torch.einsum("hid,hjd->hij", turned_q[..., dims], turned_k[..., dims])
            still = torch.einsum("hid,hjd->hij", q[..., dims], k[..., dims]) * rotation.scaling**2
            for head in range(attention.heads):
                stays = plane >= rotation.planes or bool(keep[plane]) or (heads is not None and head != 1)
                expected[head] += (rotated if stays else still)[head]
        plain = replace(changed, softcap=None, mask=Mask(causal=True))
        torch.testing.assert_close(plain.attn_scores()[0], expected * attention.scale, rtol=1e-5, atol=1e-6)
        if heads is None:
            assert torch.equal(changed.rotation.inv_freq == 0, ~keep | (rotation.inv_freq == 0))
            torch.testing.assert_close(changed.q, attention.q, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(changed.k, attention.k, rtol=1e-6, atol=1e-6)
        else:
            assert changed.rotation is None


def test_predicted_band_is_the_formula():
    def frequencies(count, base):
        return base ** -(torch.arange(count, dtype=torch.float64) / count)

    # Published predictions: SmolLM2, TinyLlama, Gemma-3-270M in global and in local layers.
    for count, base, length, expected in (
        (32, 1e5, 8192, 21.4),
        (32, 1e4, 2048, 22.0),
        (128, 1e6, 32768, 84),
        (128, 1e4, 512, 69),
    ):
        found = predicted_band(frequencies(count, base), length)
        assert found == pytest.approx(count * math.log(length / 3.657) / math.log(base), rel=1e-6)
        assert found == pytest.approx(expected, abs=0.4)
        slower = slower_planes(frequencies(count, base), found)
        assert slower.tolist() == [plane > found for plane in range(count)]
    # Beyond the planes: extrapolated. In any order and direction, and with planes that do not turn.
    assert predicted_band(frequencies(4, 1e4), 10**6) == pytest.approx(4 * math.log(10**6 / 3.657) / math.log(1e4))
    assert predicted_band(frequencies(8, 1e4), 2) == pytest.approx(8 * math.log(2 / 3.657) / math.log(1e4))
    still = torch.cat([torch.zeros(3).double(), -frequencies(8, 1e4).flip(0)])
    assert predicted_band(still, 100) == pytest.approx(8 * math.log(100 / 3.657) / math.log(1e4))
    assert slower_planes(still, 2.5).tolist() == [True] * 3 + [True] * 5 + [False] * 3
    with pytest.raises(MeasureError, match="trained length is 1"):
        predicted_band(frequencies(8, 1e4), 1)
    with pytest.raises(MeasureError, match="at least 2 different"):
        predicted_band(torch.ones(4), 100)


def test_measured_band_is_the_plane_with_the_largest_norm():
    for name in ("llama", "gptj", "gpt_neox"):
        attention = rotated_layers(name)[0]
        pairs = attention.rotation.pairs
        k = attention.k[0].repeat_interleave(attention.heads // attention.kv_heads, 0)
        found = plane_norms(attention)
        for head in range(attention.heads):
            for plane, dims in enumerate(pairs.tolist()):
                size = [sum(float(row[dims].norm()) for row in x[head]) / N for x in (attention.q[0], k)]
                assert float(found[head, plane]) == pytest.approx(size[0] * size[1], rel=1e-6)
        boosted = replace(attention, rot_q=attention.rot_q.index_fill(-1, pairs[1], 9.0))
        assert peak_band(plane_norms(boosted)) == 1


class TrainedSubject(Subject):
    def trained_length(self):
        return 64


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_unrotated_losses(name):
    subject, ids = TrainedSubject(name, mixing={}), tokens(31)
    config = FrequenciesConfig(bands=2, queries=1, unrotate=True)
    found = measure_frequencies(subject, ids, config)
    plain = measure_frequencies(subject, ids, replace(config, unrotate=False))
    assert {key: found.whole[key] for key in plain.whole} == pytest.approx(plain.whole, rel=1e-5, nan_ok=True)
    slow = {}
    for layer in found.layers:
        inv_freq = layer.curves["inv_freq"].values
        slow[layer.layer] = slower_planes(inv_freq, layer.whole["band_predicted"])
        norms = layer.curves["plane_norm"].values
        largest = norms.gather(-1, layer.heads["band_measured"].long()[:, None])[:, 0]
        torch.testing.assert_close(largest, norms.amax(-1), rtol=1e-6, atol=0)
        assert 0 <= layer.whole["band_peak"] < len(inv_freq)

    def loss(changed, how="unrotate"):
        def edit(attention):
            keep = ~changed(attention)
            return attention_output(without_planes(attention, keep, how=how))

        return next_token_loss(subject.edited(ids, edit), ids)

    whole = found.whole
    assert whole["loss_unrotated_all"] == pytest.approx(loss(lambda a: torch.ones(a.rotation.planes) > 0), rel=1e-5)
    assert whole["loss_unrotated_slow"] == pytest.approx(loss(lambda a: slow[a.layer]), rel=1e-5)
    assert whole["loss_without_slow"] == pytest.approx(loss(lambda a: slow[a.layer], "mask"), rel=1e-5)
    fast = loss(lambda a: frequency_ids(a.rotation.inv_freq) <= int(slow[a.layer].sum()))
    assert whole["loss_unrotated_fast"] == pytest.approx(fast, rel=1e-5)
    for band in range(2):
        wanted = loss(lambda a, band=band: frequency_bands(a.rotation.inv_freq, 2)[band])
        assert whole[f"loss_unrotated_band_{band + 1}"] == pytest.approx(wanted, rel=1e-5)
    named = {metric.name for metric in all_metrics(FrequenciesMeasurement(), config)}
    controls = {metric.control for metric in all_metrics(FrequenciesMeasurement(), config)}
    assert set(whole) <= named | controls
    assert {"loss_unrotated_random", "loss_unrotated_slow_random", "loss_without_slow_random"} <= set(whole)


@pytest.mark.parametrize("name", ["llama", "gptj", "gemma3_text", "deepseek_v3"])
def test_massive_dimensions_by_definition(name):
    """Brute force: norms over tokens, one dimension at a time, and replaced values, one entry at a time."""
    attention = rotated_layers(name)[0]
    d = attention.rot_q.shape[-1]
    scale = torch.ones(d, dtype=torch.float64).index_fill(0, torch.tensor([d - 1]), 300.0)
    attention = replace(attention, rot_q=attention.rot_q * scale, rot_k=attention.rot_k * scale)
    fixed = FixedDimensions.massive(attention)
    chosen = fixed.random(torch.Generator().manual_seed(0))
    changed, random, later = fixed.apply(attention), chosen.apply(attention), fixed.apply(attention, first=1)
    for name, which, other in (("rot_q", fixed.q, chosen.q), ("rot_k", fixed.k, chosen.k)):
        x = getattr(attention, name)[0]
        for head in range(len(x)):
            norms = [math.sqrt(sum(float(v) ** 2 for v in x[head, :, i])) for i in range(d)]
            mean = sum(norms) / d
            assert relative_norms(x)[head].tolist() == pytest.approx([norm / mean for norm in norms], rel=1e-9)
            assert which[head].tolist() == [norm > MASSIVE * mean for norm in norms]
            assert bool(which[head, -1])
            assert int(other[head].sum()) == int(which[head].sum())
            assert not bool((which & other).any())
            for i in range(d):
                average = x[head, :, i].mean().expand(N)
                for made, replaced in ((changed, which), (random, other)):
                    expected = average if replaced[head, i] else x[head, :, i]
                    torch.testing.assert_close(getattr(made, name)[0, head, :, i], expected, rtol=1e-9, atol=1e-9)
                if which[head, i]:
                    torch.testing.assert_close(getattr(later, name)[0, head, 1:, i], average[1:], rtol=1e-9, atol=1e-9)
        assert torch.equal(getattr(later, name)[:, :, 0], getattr(attention, name)[:, :, 0])
        assert torch.equal(getattr(fixed.none().apply(attention), name), getattr(attention, name))


VOCABULARY = 64


def encode(text):
    return [sum(map(ord, word)) % VOCABULARY for word in text.split()]


def massive_model():
    """A tiny Llama with one massive dimension in the queries and keys of every head."""
    model = sharp_llama(VOCABULARY)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data[15::16] *= 30  # the slowest plane
    return model


def test_replaced_dimensions_are_those_of_a_patched_model(monkeypatch):
    """Parity: the model's own rotation is patched, and every prompt is run without others beside it."""
    model, ids = massive_model(), torch.randint(VOCABULARY, (1, 160), generator=torch.Generator().manual_seed(1))
    subject = ModelSubject(SimpleNamespace(model=model))
    monkeypatch.setattr(frequencies_text, "LEAST_GAIN", -math.inf)  # an untrained model has no gains
    config = FrequenciesConfig(queries=1, masking=False, massive=True)
    found = measure_frequencies(subject, ids, config, encode=encode, prefix=1)
    layers = captured(model, ids)
    fixed = [FixedDimensions.massive(layer) for layer in layers]
    assert all(int(x.q.sum()) == 4 and int(x.k.sum()) == 2 for x in fixed)
    generator = torch.Generator().manual_seed(0)
    random = [x.random(generator) for x in fixed]
    rotate = modeling_llama.apply_rotary_pos_emb

    def logits(tokens, chosen, first=0):
        waiting = list(chosen)

        def patched(*args, **options):
            q, k = (x.clone() for x in rotate(*args, **options))
            own = waiting.pop(0)
            for x, which, mean in ((q, own.q, own.mean_q), (k, own.k, own.mean_k)):
                for head, dimension in which.nonzero().tolist():
                    x[:, head, first:, dimension] = mean[head, dimension]
            return q, k

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", patched)
            return model(input_ids=tokens, use_cache=False).logits

    planting = plant(ids, (0, 25, 50, 75), run=16)
    facts = remembered_facts(ids, encode, prefix=1)

    def outcome(*changes):
        control, planted = (logits(x, *changes)[0].log_softmax(-1) for x in (planting.control, planting.planted))
        loss = -sum(float(control[i, ids[0, i + 1]]) for i in range(159)) / 159
        counted = [i for i in range(96, 160) if (i - 96) % 16 >= 4]
        gain = sum(float(planted[i - 1, ids[0, i]] - control[i - 1, ids[0, i]]) for i in counted) / len(counted)
        rows = []
        for prompt, last in zip(facts.ids, facts.last.tolist(), strict=True):
            assert int(prompt[0]) == int(ids[0, 0])
            rows.append(logits(prompt[None, : last + 1], *changes)[0, -1].log_softmax(-1))
        known = []
        for j, answer in enumerate(facts.answers.tolist()):
            others = [float(rows[i][answer]) for i in range(len(rows)) if facts.others[i, j]]
            known.append(float(rows[j][answer]) - sum(others) / len(others))
        return loss, gain, sum(known) / len(known)

    whole = found.whole
    before = outcome([x.none() for x in fixed])
    assert (whole["loss"], whole["planted"], whole["facts"]) == pytest.approx(before, rel=1e-4, abs=1e-6)
    for ending, changes in (("", (fixed,)), ("_random", (random,)), ("_later", (fixed, 1))):
        loss, gain, known = outcome(*changes)
        assert whole[f"loss_massive{ending}"] == pytest.approx(loss, rel=1e-5)
        assert loss != pytest.approx(before[0], rel=1e-4)
        assert whole[f"planted_lost_massive{ending}"] == pytest.approx(1 - gain / before[1], rel=1e-2, abs=1e-3)
        assert whole[f"facts_lost_massive{ending}"] == pytest.approx(1 - known / before[2], rel=1e-2, abs=1e-3)
    for layer, attention in zip(found.layers, layers, strict=True):
        assert layer.heads["massive_q"].tolist() == pytest.approx(relative_norms(attention.rot_q[0]).amax(-1).tolist())
        assert layer.heads["massive_k"][1] == layer.heads["massive_k"][0] > MASSIVE
        assert layer.whole["massive_heads"] == layer.whole["massive_slow"] == 1
        assert (layer.whole["massive_heads_v"], layer.whole["massive_slow_even"]) == (0, 0.5)
    metrics = all_metrics(FrequenciesMeasurement(), config)
    names = {name for metric in metrics for name in (metric.name, metric.control)}
    stored = set(whole).union(*(set(layer.heads) | set(layer.whole) for layer in found.layers))
    assert stored <= names
    assert {metric.name for metric in frequencies_measurement._MASSIVE} <= stored


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_models_without_massive_values_lose_nothing(name, monkeypatch):
    monkeypatch.setattr(frequencies_text, "LEAST_GAIN", -math.inf)
    config = FrequenciesConfig(queries=1, masking=False, bands=2, massive=True)
    found = measure_frequencies(Subject(name, mixing={}), tokens(160), config)
    assert found.whole["planted_lost_massive"] == found.whole["planted_lost_massive_random"] == 0
    assert found.whole["loss_massive"] == pytest.approx(found.whole["loss"], rel=1e-5)
    assert "facts" not in found.whole  # without a tokenizer
    for layer in found.layers:
        assert layer.whole["massive_heads"] == 0
        assert "massive_slow" not in layer.whole
    plain = measure_frequencies(Subject(name, mixing={}), tokens(160), replace(config, massive=False))
    assert {key: found.whole[key] for key in plain.whole} == pytest.approx(plain.whole, rel=1e-5, nan_ok=True)
    with pytest.raises(MeasureError, match="too few for 4 planted sequences"):
        measure_frequencies(Subject(name, mixing={}), tokens(40), config)


def test_facts_that_a_tokenizer_cannot_distinguish():
    ids = tokens(20)
    assert remembered_facts(ids, lambda text: [1] * len(text.split())) is None
    assert remembered_facts(ids, lambda text: []) is None
    facts = remembered_facts(ids, encode)
    assert facts is not None
    assert bool(facts.others.any(0).all())
    assert not bool(facts.others.diagonal().any())
    again, other = remembered_facts(ids, encode), remembered_facts(ids + 1, encode)
    assert torch.equal(facts.ids, again.ids)
    assert not (facts.ids.shape == other.ids.shape and torch.equal(facts.ids, other.ids))


def test_masking_in_small_blocks_is_the_same():
    attention = rotated_layers("llama", n=150)[0]
    keep = torch.arange(attention.rotation.planes) == 0
    # One MiB holds every logit of so short a text: more heads make it several blocks.
    wide = {name: torch.cat([getattr(attention, name)] * 16, 1) for name in ("rot_q", "rot_k", "value")}
    many = replace(attention, **wide)
    assert many.heads * many.m * many.n * 4 > 2**20
    torch.testing.assert_close(
        masked_attention(many, keep, block_mib=1), masked_attention(many, keep), rtol=0, atol=1e-9
    )


def test_wrong_masks_are_refused():
    attention = rotated_layers("llama")[0]
    everything = torch.ones(attention.rotation.planes, dtype=torch.bool)
    with pytest.raises(MeasureError, match="one entry for each of"):
        without_planes(attention, everything[:-1])
    with pytest.raises(MeasureError, match="one entry for each of"):
        without_planes(attention, everything, heads=torch.ones(99, dtype=torch.bool))
    plain = captured(shared("gpt2"), tokens(N))[0]
    with pytest.raises(MeasureError, match="does not rotate"):
        without_planes(plain, everything)
    with pytest.raises(MeasureError, match="does not rotate"):
        plane_swaps(plain, QUERY)
    with pytest.raises(MeasureError, match="must be positive"):
        plane_swaps(attention, QUERY, tau=0.0)
    with pytest.raises(MeasureError, match="sees 1 keys before it"):
        plane_swaps(attention, 1)


QUICK = ("llama", "gpt_neox", "gemma3_text")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_measured_on_every_family(name):
    subject, ids = Subject(name, mixing={}), tokens(31)
    found = measure_frequencies(subject, ids, FrequenciesConfig(bands=2))
    correlations = {f"{name}_{score}" for name in ("frequency", "frequency_softmax") for score in SCORES}
    whole = (
        {"loss", "loss_without_random", "loss_only_random"}
        | correlations
        | {
            f"{metric}_band_{band}"
            for band in (1, 2)
            for metric in (*SCORES, *(f"{score}_change_without" for score in SCORES), "loss_without", "loss_only")
        }
    )
    assert found.whole.keys() == whole
    untouched = next_token_loss(subject.run(ids, lambda attention: None, logits=True), ids)
    assert found.whole["loss"] == pytest.approx(untouched, rel=1e-5)
    assert all(found.whole[f"loss_without_band_{band}"] != untouched for band in (1, 2))
    for layer in found.layers:
        count = layer.curves["inv_freq"].values.numel()
        assert layer.whole["mean_frequency_even"] == (count + 1) / 2
        assert bool(((layer.heads["mean_frequency"] >= 1) & (layer.heads["mean_frequency"] <= count)).all())
        for curve in ("plane_s_pos", "plane_s_sym", "frequency_use"):
            assert layer.curves[curve].values.shape == (len(layer.heads["s_pos"]), count)
            assert layer.curves[curve].axes == ("head", "plane")
        assert bool(((layer.curves["plane_s_pos"].values >= 0) & (layer.curves["plane_s_pos"].values <= 1)).all())
    assert ("s_pos_rest" in found.layers[0].heads) == (name in ("gptj", "gpt_neox", "deepseek_v3"))


def test_scores_without_the_sink_are_those_of_the_other_keys():
    subject, ids = Subject("llama"), tokens(31)
    found = measure_frequencies(subject, ids, FrequenciesConfig(bands=2, queries=2, masking=False, sink_tokens=3))
    expected: dict[str, list[torch.Tensor]] = {"s_pos": [], "s_sym": []}

    def look(attention):
        whole = layer_swaps(attention, [15, 30], skip=3)
        torch.testing.assert_close(found.layers[attention.layer].heads["s_pos_no_sink"], whole.s_pos.mean(1))
        single = [plane_swaps(attention, query, skip=3) for query in (15, 30)]
        for values, both in zip(expected.values(), zip(*single, strict=True), strict=True):
            values.append(torch.stack(both).mean(0))

    subject.run(ids, look)
    for name, values in expected.items():
        for layer, of_planes in zip(found.layers, values, strict=True):
            torch.testing.assert_close(layer.curves[f"plane_{name}_no_sink"].values, of_planes.float())
    band = frequency_bands(found.layers[0].curves["inv_freq"].values, 2)[0]
    fast = torch.cat([x[:, band].flatten() for x in expected["s_pos"]]).mean()
    assert found.whole["s_pos_no_sink_band_1"] == pytest.approx(float(fast), abs=1e-6)


def test_only_the_chosen_heads_are_masked_and_scored():
    subject, ids = Subject("llama"), tokens(31)
    config = FrequenciesConfig(bands=2, queries=1, heads=("0.1", "0.3"))
    found = measure_frequencies(subject, ids, config)
    heads = torch.tensor([False, True, False, True])
    changes = []

    def look(attention):
        if attention.layer == 0:  # nothing before it is changed, so the masked pass has the same queries and keys
            slow = frequency_bands(attention.rotation.inv_freq, 2)[1]
            masked = layer_swaps(without_planes(attention, slow, heads=heads), [30])
            changes.append((masked.s_pos - layer_swaps(attention, [30]).s_pos)[heads].mean())

    def edit(attention):
        slow = frequency_bands(attention.rotation.inv_freq, 2)[1]
        return masked_attention(attention, slow, heads=heads) if attention.layer == 0 else None

    subject.run(ids, look)
    assert found.whole["s_pos_change_without_band_1"] == pytest.approx(float(changes[0]), abs=1e-5)
    expected = next_token_loss(subject.edited(ids, edit), ids)
    # Two bands: without the fast one is with only the slow one.
    assert found.whole["loss_without_band_1"] == pytest.approx(expected, rel=1e-5)
    assert found.whole["loss_only_band_2"] == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_measured_is_refused(subtests):
    for name, count, options, message in (
        ("llama", 12, {"bands": 1, "heads": ("9.0",)}, "layer 9 is not one that rotates"),
        ("llama", 12, {"bands": 1, "heads": ("0.4",)}, "layer 0 has heads 0 to 3"),
        ("llama", 12, {"bands": 100}, "choose at most"),
        ("llama", 2, {}, "at least 3"),
        ("gpt2", 12, {}, "without rotation there are no frequencies"),
        ("bloom", 12, {}, "without rotation there are no frequencies"),
    ):
        with subtests.test(message=message, name=name), pytest.raises(MeasureError, match=message):
            measure_frequencies(Subject(name), tokens(count), FrequenciesConfig(**options))
    for options in (
        {"queries": -1},
        {"tau": 0.0},
        {"tau": float("nan")},
        {"bands": 0},
        {"block_mib": 0},
        {"heads": ("3",)},
    ):
        with subtests.test(options=options), pytest.raises(ConfigError):
            FrequenciesConfig(**options)


def test_layers_without_rotation_are_left_out():
    subject = Subject("smollm3")
    turning = []
    subject.run(tokens(20), lambda a: turning.append(a.layer) if a.rotation is not None else None)
    found = measure_frequencies(subject, tokens(20), FrequenciesConfig(bands=2, queries=1))
    assert [layer.layer for layer in found.layers] == turning
    assert len(turning) < subject.model.config.num_hidden_layers


def test_layers_that_mix_keys_have_no_scores():
    config = FrequenciesConfig(bands=2, queries=1)
    some = measure_frequencies(Subject("llama", mixing={0: 0.4, 1: 1e-7}), tokens(20), config)
    first, second = some.layers[:2]
    assert bool(first.heads["s_pos"].isnan().all())
    assert bool(first.curves["plane_s_sym"].values.isnan().all())
    assert not bool(first.heads["mean_frequency"].isnan().any())
    assert not bool(second.heads["s_pos"].isnan().any())
    assert "s_pos_band_1" in some.whole
    every = measure_frequencies(Subject("llama", mixing=dict.fromkeys(range(9), 1.0)), tokens(20), config)
    assert "loss_without_band_1" in every.whole
    assert not any(name.startswith(("s_pos", "s_sym", "frequency")) for name in every.whole)


def test_masking_that_is_not_faithful_is_refused():
    class Careless(Subject):
        def edited(self, ids, editor):
            return super().edited(ids, editor) * 1.5

    with pytest.raises(MeasureError, match="masking is not faithful"):
        measure_frequencies(Careless("llama"), tokens(20), FrequenciesConfig(bands=2))


def test_half_precision_is_measured():
    found = measure_frequencies(Subject("llama", dtype=torch.bfloat16), tokens(31), FrequenciesConfig(bands=2))
    assert "loss_without_band_1" in found.whole


def test_without_masking_one_pass_is_enough():
    subject = Subject("llama")
    subject.edited = None
    found = measure_frequencies(subject, tokens(20), FrequenciesConfig(masking=False))
    assert "s_pos_band_4" in found.whole
    assert not any(name.startswith("loss") for name in found.whole)


def test_correlation():
    x = torch.tensor([1.0, 2.0, 4.0, torch.nan, 3.0], dtype=torch.float64)
    y = torch.tensor([2.0, 1.0, 5.0, 9.0, torch.nan], dtype=torch.float64)
    known = torch.corrcoef(torch.stack([x[:3], y[:3]]))[0, 1]
    assert correlation(x, y) == pytest.approx(float(known), rel=1e-9)
    for constant in (torch.ones(5), torch.full((5,), 0.1, dtype=torch.float64)):
        assert math.isnan(correlation(x, constant))
    assert math.isnan(correlation(torch.arange(270.0), torch.full((270,), 0.1, dtype=torch.float64)))
    assert correlation(x[:2], y[:2]) != correlation(x[:2], y[:2])


def test_stored_through_the_pipeline(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran " * 4)
    request = Request(
        measurement="frequencies",
        model=ModelRequest(model=save_model(tmp_path / "tiny")),
        files=(str(text),),
        tokens=24,
        options={"bands": "2", "heads": "0.1,1.0"},
    )
    directory = run_request(request, out=tmp_path / "out")
    table = directory.scores().to_pydict()
    metrics = set(table["metric"])
    assert {"mean_frequency", "mean_frequency_even", "s_pos", "loss_without_band_2", "frequency_s_sym"} <= metrics
    curves = directory.profiles()
    name = next(key for key in curves if key.endswith("/1/plane_s_pos"))
    assert curves.axes(name) == ("head", "plane")
    assert curves.axes(name.replace("plane_s_pos", "inv_freq")) == ("plane",)
