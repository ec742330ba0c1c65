"""Brute force and identity: pattern statistics against loops over heads, queries and keys, and heads made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.capture import run, shared
from helpers.layers import causal_layer, random_causal_layer
from wherewhat.captures.attention import Mask
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.attention import attention_stats, gaussian_rank_one_share, rank_one_share, weight_blocks
from wherewhat.measures.heads import AttentionConfig, PatternConfig, patterns
from wherewhat.measures.heads.heads_measurement import PATTERN_METRICS
from wherewhat.measures.heads.patterns import lag_sums
from wherewhat.measures.tensors import defined

FAMILIES = ["llama", "gemma2", "gemma3_text", "gpt_oss", "bloom", "mpt", "falcon", "gpt2"]
# Weights are products of 8 to 16 terms in float32, and exponentials of them: within 2e-6.
CLOSE = {"rtol": 2e-5, "atol": 1e-6, "equal_nan": True}
NEAR = 1e-5  # of two weights that are closer, either may be found to be the largest


def pattern_statistics(attention, ids, config):
    """The patterns of one text."""
    return patterns.pattern_statistics(attention, ids[None], config)


def layer_scores(stats):
    """Values per head, controls that are defined, and curves."""
    heads, whole, curves = patterns.layer_scores(stats)
    return heads, defined({name: float(value) for name, value in whole.items()}), curves


def few_tokens(n=37, kinds=7, seed=0):
    """Random tokens of a small alphabet: most come again and some twice in a row."""
    return torch.randint(20, 20 + kinds, (n,), generator=torch.Generator().manual_seed(seed))


def is_target(kind, ids, i, j):
    """Whether key j is one that a head of this kind looks for at query i."""
    if kind == "duplicate_token":
        return j < i and ids[j] == ids[i]
    if kind == "induction":
        return 1 <= j <= i and ids[j - 1] == ids[i]
    return i + 1 < len(ids) and j <= i and ids[j] == ids[i + 1]


def mean(values):
    return sum(values) / len(values) if values else math.nan


def hit(row, targets, near):
    """Whether the largest weight is on a target, if targets had ``near`` more weight than they have."""
    return max(row[j] for j in targets) + near >= max((w for j, w in enumerate(row) if j not in targets), default=0.0)


def by_loops(attention, ids, *, max_lag, sink_tokens=1):
    """Every statistic by name: a list over heads, or a number where it is the same for all.

    What depends on which weight is the largest is a list of the lags, or the least and the most, that rounding allows.
    """
    ids, n = ids.tolist(), attention.n
    weights = attention.pattern()[0].double().tolist()
    visible = attention.visible().expand(1, attention.heads, -1, -1)[0].tolist()
    keys = [[j for j in range(n) if visible[0][i][j]] for i in range(n)]
    found = {}
    lags = range(min(n, max_lag + 1))
    found["slash"] = [[mean([w[i][i - lag] for i in range(lag, n)]) for lag in lags] for w in weights]
    found["slash_uniform"] = [mean([(i - lag in keys[i]) / len(keys[i]) for i in range(lag, n)]) for lag in lags]
    compared = [lag for lag in lags if lag <= n // 2]
    found["slash_max"] = [max(row[lag] for lag in compared) for row in found["slash"]]
    found["slash_lag"] = [
        [float(lag) for lag in compared if row[lag] >= max(row[: len(compared)]) - NEAR] for row in found["slash"]
    ]
    found["slash_max_uniform"] = max(found["slash_uniform"][lag] for lag in compared)
    found["previous_token"] = [row[1] for row in found["slash"]]
    found["previous_token_uniform"] = found["slash_uniform"][1]
    for kind in ("duplicate_token", "induction", "retrieval"):
        targets = {i: [j for j in keys[i] if is_target(kind, ids, i, j)] for i in range(n)}
        targets = {i: js for i, js in targets.items() if js}
        found[kind] = [mean([sum(w[i][j] for j in js) for i, js in targets.items()]) for w in weights]
        found[f"{kind}_uniform"] = mean([len(js) / len(keys[i]) for i, js in targets.items()])
        found[f"{kind}_queries"] = len(targets)
        if kind == "retrieval":
            found["retrieval_argmax"] = [
                [mean([hit(w[i], js, near) for i, js in targets.items()]) for near in (-NEAR, NEAR)] for w in weights
            ]
    missing = [[max(0.0, 1 - sum(row)) if attention.sinks is not None else 0.0 for row in w] for w in weights]
    found["entropy"] = [
        mean([-sum(p * math.log(p) for p in (*w[i], lost[i]) if p > 0) for i in range(n) if len(keys[i]) > 1])
        for w, lost in zip(weights, missing, strict=True)
    ]
    columns = int(attention.sinks is not None)
    found["entropy_uniform"] = mean([math.log(len(seen) + columns) for seen in keys if len(seen) > 1])
    found["sink_mass"] = [mean([sum(w[i][:sink_tokens]) for i in range(sink_tokens, n)]) for w in weights]
    found["sink_mass_uniform"] = mean(
        [sum(j < sink_tokens for j in keys[i]) / len(keys[i]) for i in range(sink_tokens, n)]
    )
    if attention.sinks is not None:
        found["learned_sink_mass"] = [mean(lost) for lost in missing]
    groups = attention.heads // attention.kv_heads
    for name, x in (("q", attention.q[0]), ("k", attention.k[0].repeat_interleave(groups, 0))):
        for suffix, tokens in (("", x), ("_centred", x.double() - x.double().mean(1, keepdim=True))):
            values = torch.linalg.svdvals(tokens.double()).square()
            found[f"rank_one_{name}{suffix}"] = (values[:, 0] / values.sum(-1)).tolist()
    return found


def assert_same(stats, expected):
    heads, whole, curves = layer_scores(stats)
    everything = heads | whole | {name: curve.values for name, curve in curves.items()}
    gaussian = everything.pop("rank_one_gaussian")
    assert 0 < gaussian < 1
    queries = {
        f"{kind}_queries": int(getattr(stats, kind).queries) for kind in ("duplicate_token", "induction", "retrieval")
    }
    everything |= queries
    defined = {name for name, value in expected.items() if not (isinstance(value, float) and math.isnan(value))}
    assert everything.keys() == defined
    for lag, allowed in zip(everything.pop("slash_lag").tolist(), expected["slash_lag"], strict=True):
        assert lag in allowed
    for share, (least, most) in zip(
        everything.pop("retrieval_argmax").tolist(), expected["retrieval_argmax"], strict=True
    ):
        assert least - 1e-9 <= share <= most + 1e-9 or (math.isnan(share) and math.isnan(least))
    for name, value in everything.items():
        got, wanted = (torch.as_tensor(v, dtype=torch.float64) for v in (value, expected[name]))
        torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_family_equals_the_loops(family):
    ids = few_tokens()
    layers = run(shared(family), ids[None])
    assert len(layers) == 4
    for attention in layers:
        stats = pattern_statistics(attention, ids, PatternConfig(max_lag=30, sink_tokens=2))
        assert_same(stats, by_loops(attention, ids, max_lag=30, sink_tokens=2))
        assert (attention.sinks is not None) == (family == "gpt_oss")
        one = attention_stats(attention, AttentionConfig(sink_tokens=2))
        torch.testing.assert_close(one.entropy, stats.spread.result().entropy, **CLOSE)


def test_masks_and_tokens_of_all_kinds_equal_the_loops(subtests):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    layers = {
        f"window {window}, sinks {own is not None}": random_causal_layer(window=window, sinks=own)
        for window in (None, 5)
        for own in (None, sinks)
    }
    layers["keys that come later are no targets"] = replace(random_causal_layer(), mask=Mask(causal=False))
    layers |= {f"{n} tokens": random_causal_layer(n=n) for n in (2, 3)}
    for kind, attention in layers.items():
        n = attention.n
        for text, ids in {"few": few_tokens(n), "different": torch.arange(n), "one": torch.zeros(n).long()}.items():
            with subtests.test(kind=kind, text=text):
                assert_same(pattern_statistics(attention, ids, PatternConfig()), by_loops(attention, ids, max_lag=256))


@pytest.mark.parametrize("window", [None, 20])
def test_blocks_of_rows_change_nothing(window):
    attention, ids = random_causal_layer(heads=16, kv_heads=16, n=300, window=window), few_tokens(300, 40)
    blocks = [block.weights.numel() * 4 for block in weight_blocks(attention, 1)]
    assert len(blocks) > 3
    assert max(blocks) <= 2**20
    for max_lag in (1, 50, 299):
        whole, cut = (
            layer_scores(pattern_statistics(attention, ids, PatternConfig(block_mib=mib, max_lag=max_lag)))
            for mib in (1024, 1)
        )
        near = ("slash_lag", "retrieval_argmax")  # which weight is the largest, see the loops
        for one, other in zip(whole[:2], cut[:2], strict=True):
            assert one.keys() == other.keys()
            for name in one.keys() - set(near):
                torch.testing.assert_close(one[name], other[name], **CLOSE)
        for name, curve in whole[2].items():
            torch.testing.assert_close(curve.values, cut[2][name].values, **CLOSE)


def test_sums_by_lag_of_a_block():
    for start, rows, lags in ((0, 5, 5), (0, 5, 2), (3, 4, 7), (3, 4, 9), (6, 1, 3), (0, 1, 1)):
        weights = torch.randn(2, rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        expected = torch.zeros(2, lags, dtype=torch.float64)
        for r in range(rows):
            for lag in range(min(lags, start + r + 1)):
                expected[:, lag] += weights[:, r, start + r - lag]
        torch.testing.assert_close(lag_sums(weights, start, lags), expected, rtol=0, atol=1e-12)


def looking_at(*choices):
    """A layer whose head h puts all attention of query i on key ``choices[h][i]``."""
    n = len(choices[0])
    q = 200 * torch.stack([torch.nn.functional.one_hot(torch.tensor(choice), n).float() for choice in choices])
    return causal_layer(q, torch.eye(n)[None])


def test_heads_made_by_hand_on_repeated_random_tokens():
    length = 12
    half = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:length]
    ids, n = torch.cat([half, half]), 2 * length
    again = range(length, n)
    heads = {
        "previous": [max(0, i - 1) for i in range(n)],
        "duplicate": [i - length if i in again else i for i in range(n)],
        "induction": [i - length + 1 if i in again else i for i in range(n)],
        "itself": list(range(n)),
        "first": [0] * n,
    }
    stats = pattern_statistics(looking_at(*heads.values()), ids, PatternConfig())
    scores, whole, _ = layer_scores(stats)

    def of(metric):
        return dict(zip(heads, scores[metric].tolist(), strict=True))

    assert of("previous_token") == {
        "previous": 1.0,
        "duplicate": 0.0,
        "induction": 0.0,
        "itself": 0.0,
        "first": pytest.approx(1 / (n - 1), abs=1e-6),
    }
    assert of("slash_max")["previous"] == of("slash_max")["itself"] == 1.0
    assert of("slash_lag") == {"previous": 1, "duplicate": 12, "induction": 11, "itself": 0, "first": 12}
    expected = {"previous": 0, "duplicate": 1, "induction": 0, "itself": 0, "first": 1 / length}
    assert of("duplicate_token") == pytest.approx(expected, abs=1e-6)
    assert of("induction")["induction"] == 1.0
    assert of("induction")["duplicate"] == of("induction")["itself"] == 0.0
    # The last token of the first half is followed by one that came before, but is none that came before.
    assert of("retrieval")["induction"] == pytest.approx(1 - 1 / length, abs=1e-6)
    assert of("retrieval_argmax") == pytest.approx(of("retrieval"), abs=1e-6)
    assert of("entropy") == dict.fromkeys(heads, 0.0)
    assert of("sink_mass")["first"] == 1.0
    assert whole["induction_uniform"] == pytest.approx(mean([1 / (i + 1) for i in again]))
    assert stats.induction.queries == stats.duplicate_token.queries == stats.retrieval.queries == length


def test_a_sink_does_not_pass_for_a_slash():
    n = 64
    stats = pattern_statistics(looking_at([0] * n), torch.arange(n), PatternConfig())
    assert stats.slashes.by_lag[0, -1] == 1.0
    assert stats.slashes.largest[0] <= 2 / n


def test_uniform_attention_reaches_its_controls():
    heads, whole, curves = layer_scores(
        pattern_statistics(random_causal_layer(scale=0.0), few_tokens(), PatternConfig())
    )
    for name in ("slash_max", "previous_token", "duplicate_token", "induction", "retrieval", "entropy", "sink_mass"):
        expected = torch.full((4,), whole[f"{name}_uniform"], dtype=torch.float64)
        torch.testing.assert_close(heads[name], expected, **CLOSE)
    torch.testing.assert_close(curves["slash"].values, curves["slash_uniform"].values.expand(4, -1), **CLOSE)


def test_a_text_without_repeats_has_no_such_scores_and_no_such_controls():
    heads, whole, _ = layer_scores(pattern_statistics(random_causal_layer(), torch.arange(37), PatternConfig()))
    undefined = {"duplicate_token", "induction", "retrieval", "retrieval_argmax"}
    assert {name for name, values in heads.items() if bool(values.isnan().any())} == undefined
    assert {name for name in whole if name.removesuffix("_uniform") in undefined} == set()
    assert not any(math.isnan(value) for value in whole.values())


def test_every_score_has_words_and_every_control_its_score():
    heads, whole, curves = layer_scores(pattern_statistics(random_causal_layer(), few_tokens(), PatternConfig()))
    of_sinks = ["learned_sink_mass"]  # this layer has no sink column
    assert [metric.name for metric in PATTERN_METRICS if metric.name not in of_sinks] == list(heads)
    assert {metric.control for metric in PATTERN_METRICS if metric.control} == whole.keys()
    for curve in curves.values():
        assert curve.values.ndim == len(curve.axes)


def test_rank_one_share_of_known_spectra():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    basis = torch.linalg.qr(randn(50, 6))[0]
    assert float(rank_one_share(basis)) == pytest.approx(1 / 6)
    assert float(rank_one_share(basis * torch.tensor([3.0, 1, 0, 0, 0, 0]))) == pytest.approx(0.9)
    line = basis[:, :1] @ randn(1, 6)
    shifted = line + 10 * randn(6)
    assert float(rank_one_share(line)) == pytest.approx(1)
    assert float(rank_one_share(shifted)) < 1
    assert float(rank_one_share(shifted, centred=True)) == pytest.approx(1)
    same = randn(1, 6).expand(49, 6)
    assert float(rank_one_share(same)) == pytest.approx(1)
    assert math.isnan(rank_one_share(same, centred=True))
    assert math.isnan(rank_one_share(torch.zeros(5, 3)))


def test_rank_one_share_of_noise_is_that_of_random_matrix_theory():
    n, d = 4096, 64
    assert gaussian_rank_one_share(n, d) == pytest.approx((1 + math.sqrt(d / n)) ** 2 / d, rel=0.03)


def test_wrong_tokens_layers_and_options_are_refused(subtests):
    attention = random_causal_layer()
    for ids in (torch.arange(36), torch.arange(37)[None], torch.tensor(3)):
        with subtests.test(ids=tuple(ids.shape)), pytest.raises(MeasureError, match=r"ids have the shape .* 37 tokens"):
            pattern_statistics(attention, ids, PatternConfig())
    names = ("rot_q", "rot_k", "value", "output")
    twice = replace(attention, **{name: getattr(attention, name).expand(2, -1, -1, -1) for name in names})
    cached = replace(attention, rot_q=attention.rot_q[:, :, 5:])
    for wrong, options, words in (
        (twice, {}, "tokens of 2 texts"),
        (cached, {}, "one text at a time, without a cache"),
        (attention, {"sink_tokens": 37}, "only 37 tokens"),
    ):
        with subtests.test(words=words), pytest.raises(MeasureError, match=words):
            pattern_statistics(wrong, torch.arange(wrong.n), PatternConfig(**options))
    for option in ("max_lag", "sink_tokens", "block_mib"):
        with subtests.test(option=option), pytest.raises(ConfigError, match="at least 1"):
            PatternConfig(**{option: 0})
