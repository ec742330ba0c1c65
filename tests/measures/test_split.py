"""Brute force, identity and end-to-end: queries, keys and logits split into position and content over documents."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config

from helpers.capture import run as captured
from helpers.capture import tiny, tokens
from helpers.models import WORDS, save_model
from wherewhat.errors import ConfigError, MeasureError, TextError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.measurement import DocumentsMeasurement, Text
from wherewhat.measures.split import SplitConfig
from wherewhat.measures.split.logits import logit_split, split_documents, squares
from wherewhat.measures.split.split_measurement import SplitMeasurement
from wherewhat.measures.split.statistics import PositionSums, jackknife_error, position_share
from wherewhat.report.result import run
from wherewhat.runs.jobs import estimate
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.results import StoredRun
from wherewhat.runs.subject import load

GPT2 = {"vocab_size": 16, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def planted(documents, *, position=1.0, document=0.0, n=40, d=6, seed=0):
    """Vectors (documents, 1, n, d) with a known position part, an offset per document, and content that lasts."""
    p = position * randn(1, 1, n, d, seed=999)
    noise = randn(documents, 1, n + 1, d, seed=seed)
    content = (noise[:, :, 1:] + noise[:, :, :-1]) / 2**0.5  # neighbours are correlated, the variance is one
    truth = float(p.var((2,), correction=0).sum())
    return p + content + document * randn(documents, 1, 1, d, seed=seed + 1), truth / (truth + d * (1 + document**2))


def dense_share(x):
    """Position's share, raw and corrected, from all pairs of documents; ``(documents, n, d)``."""
    count, n, _ = x.shape
    y = x - x.mean(1, keepdim=True)
    common = sum((y[t] * y[s]).sum() for t, s in itertools.permutations(range(count), 2)) / (count * (count - 1))
    position = x.mean(0)
    within = (x - position).square().sum() / (n * (count - 1))
    raw = count * (position - position.mean(0)).square().sum() / (x - x.mean((0, 1))).square().sum()
    biased = (position - position.mean(0)).square().sum() / n
    interaction = (y - y.mean(0)).square().sum() / ((n - 1) * (count - 1))
    # The textbook's (MS_position - MS_interaction) / D, and the variance of the content it goes with.
    textbook = (count * n * biased / (n - 1) - interaction) / count * (n - 1) / n
    torch.testing.assert_close(textbook, common / n, rtol=1e-6, atol=1e-9)
    return float(raw), float(textbook / (textbook + within))


def test_share_equals_the_analysis_of_variance_and_all_pairs_of_documents():
    x = planted(5, document=0.7)[0].expand(5, 1, 40, 6) + randn(5, 2, 40, 6, seed=3)
    found = position_share(x)
    for head in range(2):
        raw, share = dense_share(x[:, head])
        assert float(found.raw[head]) == pytest.approx(raw, rel=1e-10)
        assert float(found.share.value[head]) == pytest.approx(share, rel=1e-10)
        left_out = [dense_share(x[[s for s in range(5) if s != t], head])[1] for t in range(5)]
        assert found.share.left_out[:, head].tolist() == pytest.approx(left_out, rel=1e-10)
        mean = sum(left_out) / 5
        error = (4 / 5 * sum((value - mean) ** 2 for value in left_out)) ** 0.5
        assert float(found.share.error[head]) == pytest.approx(error, rel=1e-10)


def test_shuffled_positions_give_the_control_on_average_and_no_position():
    x = planted(2, document=0.5, n=4)[0]
    orders = [list(order) for order in itertools.permutations(range(4))]
    every = [position_share(torch.stack([x[0], x[1][:, order]])) for order in orders]  # one shuffle is as good as two
    expected = position_share(x).shuffled
    torch.testing.assert_close(torch.stack([share.raw for share in every]).mean(0), expected, rtol=0, atol=1e-10)
    assert float(torch.stack([share.share.value for share in every]).mean()) == pytest.approx(0, abs=1e-10)


def test_planted_share_is_recovered_within_its_error(subtests):
    for position, document in itertools.product((0.0, 0.3, 1.5), (0.0, 1.5)):
        found, errors = [], []
        for seed in range(60):
            x, truth = planted(6, position=position, document=document, seed=100 * seed)
            share = position_share(x).share
            found.append(float(share.value))
            errors.append(float(share.error))
        values = torch.tensor(found)
        spread = float(values.std())
        with subtests.test(position=position, document=document):
            # A ratio of unbiased estimates is itself biased, by little.
            assert abs(float(values.mean()) - truth) < 4 * spread / 60**0.5 + 0.03 * truth
            # Where there is little position the jackknife is too careful, by up to √(2 (D - 1) / (D - 2)) = 1.58.
            assert 0.8 * spread < float(torch.tensor(errors).mean()) < 1.58 * 1.2 * spread


def test_one_way_analysis_would_be_wrong_where_documents_differ():
    """Why the table has two ways: what is constant in a document is no noise of differences between positions."""
    one_way, found = [], []
    for seed in range(40):
        x, _ = planted(6, position=0.0, document=3.0, seed=100 * seed)
        flat = x[:, 0]
        between = 6 * (flat.mean(0) - flat.mean((0, 1))).square().sum() / 39
        within = (flat - flat.mean(0)).square().sum() / (40 * 5)
        one_way.append(float((between - within) / 6 / within))
        found.append(float(position_share(x).share.value))
    assert sum(one_way) / 40 < -0.1
    assert sum(found) / 40 == pytest.approx(0, abs=0.005)


def dense_weights(count, t):
    """Complex weights of the documents but t in its position part: they sum to one, and their squares to zero."""
    own = 2**0.5 * (2 * torch.pi * torch.arange(count, dtype=torch.float64) / count + torch.pi / 6).cos()
    keep = torch.arange(count) != t
    centred = own[keep] - own[keep].mean()
    weights = torch.zeros(count, dtype=torch.complex128)
    weights[keep] = (1 + 1j * centred / centred.square().mean().sqrt()) / (count - 1)
    assert abs(weights.sum() - 1) + abs(weights.square().sum()) < 1e-12
    return weights


def dense_terms(q, k, flat=lambda x: x, window=None):
    """Shares from logits that are all made, of ``(documents, heads, n, d)``; ``flat`` turns a part into its mean."""
    n, count = q.shape[2], len(q)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (window or n))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    q, k = q.to(torch.complex128), k.to(torch.complex128)

    def squares(x, y):
        logits = (x @ y.mT)[..., seen]
        return (logits - logits.mean(-1, keepdim=True)).square().sum(-1).real

    sums = dict.fromkeys(("pp", "pc", "cp", "cc", "pp_mean", "pc_mean", "cp_mean"), 0)
    for t in range(count):
        p, r = (torch.einsum("t,thnd->hnd", dense_weights(count, t), x) for x in (q, k))
        mean_q, mean_k = flat(p.real).to(p.dtype), flat(r.real).to(p.dtype)
        u, v = q[t] - p, k[t] - r
        pairs = ((p, r), (p, v), (u, r), (u, v), (mean_q, mean_k), (mean_q, v), (u, mean_k))
        sums = {name: so_far + squares(*pair) for (name, so_far), pair in zip(sums.items(), pairs, strict=True)}
    return {name: total / squares(q, k).sum(0) for name, total in sums.items()}


def test_rotated_position_parts_are_those_of_rotated_vectors():
    """Sums over documents are rotated; the slow way rotates the parts of every document."""
    x = randn(5, 2, 7, 4, seed=1)
    turns = torch.linalg.qr(randn(7, 4, 4, seed=2))[0]  # a rotation of each position

    def turn(x):
        return (turns @ x[..., None])[..., 0]

    parts = []
    for rotation in ((), (turn(x), turn)):
        sums = PositionSums(5)
        sums.add(x)
        parts.append(sums.compare(x, *rotation))
    for name in ("mean", "noise"):
        torch.testing.assert_close(getattr(parts[1], name), turn(getattr(parts[0], name)), rtol=1e-12, atol=1e-12)
    for t, (mean, noise, flat) in enumerate(zip(parts[0].mean, parts[0].noise, parts[0].flat, strict=True)):
        weights = dense_weights(5, t)
        expected = torch.einsum("t,thnd->hnd", weights, x.to(torch.complex128))
        torch.testing.assert_close(torch.complex(mean, noise), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(flat, expected.real.mean(1, keepdim=True), rtol=1e-12, atol=1e-12)


def value(x):
    return getattr(x, "value", x)


def test_logit_shares_equal_those_of_all_logits(subtests):
    for n, window, kv in ((20, None, 2), (20, 7, 4), (90, None, 1)):
        q = randn(5, 4, n, 6, seed=1) + 2 * randn(4, n, 6, seed=2) + 3 * randn(4, 1, 6, seed=3)
        k = randn(5, kv, n, 6, seed=4) + randn(kv, n, 6, seed=5) + randn(kv, 1, 6, seed=6)
        found = logit_split(q, k, window=window)
        expected = dense_terms(q, k, lambda x: x.mean(1, keepdim=True).expand_as(x), window)
        with subtests.test(n=n, window=window, kv=kv):
            for name, share in expected.items():
                torch.testing.assert_close(value(getattr(found, name)), share, rtol=1e-9, atol=1e-12)
            total = sum(expected[name] for name in ("pp", "pc", "cp", "cc")) + found.covariance
            torch.testing.assert_close(total, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-9)


def test_covariance_is_that_of_the_terms():
    """The complex terms sum to the logits exactly, so what is missing to one is twice their covariances."""
    q, k = randn(3, 1, 8, 2, seed=1), randn(3, 1, 8, 2, seed=2)
    seen = torch.ones(8, 8).tril().bool()
    both = total = 0
    for t in range(3):
        p, r = (torch.einsum("t,tnd->nd", dense_weights(3, t), x[:, 0].to(torch.complex128)) for x in (q, k))
        terms = [x @ y.mT for x, y in ((p, r), (p, k[t, 0] - r), (q[t, 0] - p, r), (q[t, 0] - p, k[t, 0] - r))]
        terms = [term[seen] - term[seen].mean() for term in terms]
        both += 2 * sum((x * y).sum().real for x, y in itertools.combinations(terms, 2))
        total += sum(terms).square().sum().real
    assert float(logit_split(q, k).covariance) == pytest.approx(float(both / total), rel=1e-9)


def test_axes_of_position_are_those_of_its_own_logits():
    """Without content every document has the same logits, and their axes are all position."""
    q, k = randn(1, 2, 30, 4, seed=1).expand(3, 2, 30, 4), randn(1, 2, 30, 4, seed=2).expand(3, 2, 30, 4)
    found = logit_split(q, k)
    for share in (found.pp, found.axes_pp, found.distance_pp):
        torch.testing.assert_close(share.value, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)
    # Content of the key alone: what the position parts still explain of the axes is a ratio of two fits.
    many = k[:1] + 0.5 * randn(40, 2, 30, 4, seed=3)
    own = fit_axes(q[0], k[0])
    each = [fit_axes(q[0], x) for x in many]
    expected = (own.tss - own.sse) / torch.stack([fit.tss - fit.sse for fit in each]).mean(0)
    share = logit_split(q[:1].expand(40, 2, 30, 4), many).axes_pp
    assert bool(((share.value - expected).abs() < 4 * share.error).all())
    assert bool((share.error < 0.1).all())


@pytest.mark.parametrize("position", [0.5, 2.0])
def test_planted_terms_are_recovered_from_few_documents(position, subtests):
    """Queries and keys made from the same content, as in a model: shares must not depend on how few documents tell."""
    n, d = 16, 4
    p, r = position * randn(1, n, d, seed=1), position * randn(1, n, d, seed=2)
    to_q, to_k = randn(6, d, seed=3) / 2, randn(6, d, seed=4) / 2

    def drawn(count, seed):
        content = randn(count, 1, n, 6, seed=seed) + 0.5 * randn(count, 1, 1, 6, seed=seed + 1)
        return content @ to_q, content @ to_k

    u, v = drawn(4000, 5)

    def total(x, y):
        return float(squares(x.expand(4000, 1, n, d)[:, 0], y.expand(4000, 1, n, d)[:, 0]).sum())

    pairs = {"pp": (p, r), "pc": (p, v), "cp": (u, r), "cc": (u, v)}
    truth = {name: total(*pair) / total(p + u, r + v) for name, pair in pairs.items()}
    for documents in (3, 6):
        # Thirty draws side by side, as heads.
        u, v = (torch.cat(x, 1) for x in zip(*(drawn(documents, 1000 + 2 * seed) for seed in range(30)), strict=True))
        split = logit_split(p + u, r + v)
        with subtests.test(documents=documents):
            for name, share in truth.items():
                found = getattr(split, name).value
                assert abs(float(found.mean()) - share) < 4 * float(found.std()) / 30**0.5 + 0.02
            errors, spread = split.pp.error, float(split.pp.value.std())
            assert 0.7 * spread < float(errors.mean()) < 3 * spread


class Replay:
    """Shows layers that were captured before, document after document."""

    def __init__(self, documents):
        self.documents = documents

    def run(self, ids, reducer, *, logits=False):
        for layer in self.documents[tuple(ids[0].tolist())]:
            reducer(layer)


def replay(name, *, count=3, length=23):
    model = tiny(name)
    documents = [tokens(length, seed=seed)[0] for seed in range(count)]
    layers = {tuple(ids.tolist()): captured(model, ids[None]) for ids in documents}
    return documents, layers


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "bloom", "gemma3_text", "deepseek_v3", "smollm3"])
def test_layers_of_every_encoding_equal_the_dense_split(name):
    documents, layers = replay(name)
    found = split_documents(Replay(layers), documents, SplitConfig(skip=2))
    for index, scores in enumerate(found.layers):
        same = [layers[tuple(ids.tolist())][index] for ids in documents]
        q, k, rot_q, rot_k = (
            torch.stack([getattr(layer, part)[0, :, 2:].double() for layer in same])
            for part in ("q", "k", "rot_q", "rot_k")
        )
        window = int(same[0].visible(slice(22, 23)).reshape(-1, 23)[0].sum())

        def flat(x, rotation=same[0].rotation):
            if rotation is None:
                return x.mean(1, keepdim=True).expand_as(x)
            mean = rotation.unrotate(x, torch.arange(2, 23)).mean(1, keepdim=True).expand_as(x)
            return rotation.rotate(mean, torch.arange(2, 23))

        for term, share in dense_terms(rot_q, rot_k, flat, window).items():
            torch.testing.assert_close(scores.heads[f"logit_{term}"], share, rtol=1e-4, atol=1e-6)
        groups = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            for side, x in (("q", q[:, head]), ("k", k[:, head // groups])):
                raw, share = dense_share(x)
                assert float(scores.heads[f"{side}_position_raw"][head]) == pytest.approx(raw, rel=1e-6)
                assert float(scores.heads[f"{side}_position"][head]) == pytest.approx(share, rel=1e-6)
    assert found.whole["q_position_se"] > 0


def test_bad_input_is_one_line():
    documents, layers = replay("gpt2")
    with pytest.raises(MeasureError, match="documents=2 cannot be split: at least 3 are needed, 8 or more are better"):
        split_documents(Replay(layers), documents[:2], SplitConfig())
    with pytest.raises(MeasureError, match="from 20 to 23 tokens: cut all to one length"):
        split_documents(Replay(layers), [*documents, documents[1][:20]], SplitConfig())
    with pytest.raises(MeasureError, match="skip is 20, but the texts have only 23 tokens"):
        split_documents(Replay(layers), documents, SplitConfig(skip=20))
    with pytest.raises(ConfigError, match="skip is -1"):
        SplitConfig(skip=-1)
    with pytest.raises(MeasureError, match="at least 2"):
        position_share(randn(1, 1, 9, 2))
    with pytest.raises(MeasureError, match="NaN or Inf"):
        position_share(randn(2, 1, 9, 2) / 0)


def test_what_does_not_vary_is_undefined():
    constant = torch.ones(3, 1, 9, 2)
    assert bool(position_share(constant).share.value.isnan().all())
    assert bool(logit_split(constant, constant).pp.value.isnan().all())
    same = randn(1, 1, 9, 2).expand(3, 1, 9, 2)
    assert float(position_share(same).share.value) == pytest.approx(1)
    assert float(logit_split(same, same).pp.value) == pytest.approx(1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    generator = random.Random(0)
    paths = [folder / f"text{index}.txt" for index in range(5)]
    for path in paths:
        path.write_text(" ".join(generator.choices(WORDS, k=40)))
    return tuple(map(str, paths))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("gpt2") / "tiny", GPT2Config(**GPT2))


def request(folder, texts, **changes):
    return Request(measurement="split", model=ModelRequest(model=folder), files=texts, tokens=24, **changes)


def stored(directory, metric, layer):
    table = directory.scores().to_pydict()
    rows = zip(table["metric"], table["layer"], table["head"], table["value"], strict=True)
    return {head: value for name, where, head, value in rows if name == metric and where == layer}


def test_gpt2_through_the_pipeline(gpt2, texts, tmp_path):
    directory = run(request(gpt2, texts), out=tmp_path)
    loaded = load(gpt2)
    ids = torch.stack([loaded.encode(Path(path).read_text(), tokens=24) for path in texts])
    block = loaded.model.transformer.h[0]
    with torch.no_grad():
        hidden = loaded.model.transformer.wte(ids) + loaded.model.transformer.wpe.weight[:24]
        q = block.attn.c_attn(block.ln_1(hidden))[..., :16].view(5, 24, 4, 4).transpose(1, 2)
    found = stored(directory, "q_position", 0)
    for head in range(4):
        assert found[head] == pytest.approx(dense_share(q[:, head, 1:].double())[1], rel=1e-4)
    summaries = {summary.metric.name: summary for summary in StoredRun(directory).summaries}
    assert set(summaries) == {metric.name for metric in SplitMeasurement.metrics}
    overall = summaries["q_position"].overall
    assert overall.n == 5
    error = stored(directory, "q_position_se", None)[None]
    assert overall.high - overall.mean == pytest.approx(2.776445 * error, rel=1e-5)
    rest = StoredRun(directory).without_each("q_position")
    assert list(rest) == StoredRun(directory).documents
    assert float(jackknife_error(torch.tensor([*rest.values()], dtype=torch.float64))) == pytest.approx(error, rel=1e-9)
    assert summaries["logit_pp"].layers[1].high is not None
    assert summaries["logit_pp"].control == pytest.approx(0, abs=1e-9)  # nothing rotates, and means are constant


@pytest.mark.slow
def test_learned_positions_are_all_or_nothing(gpt2, texts, tmp_path):
    """A model that sees only positions has nothing else in q and k; one that sees none has none in its first layer."""
    from transformers import AutoModelForCausalLM

    for name, zeroed in (("where", "wte"), ("what", "wpe")):
        folder = save_model(tmp_path / name, GPT2Config(**GPT2))
        model = AutoModelForCausalLM.from_pretrained(folder)
        getattr(model.transformer, zeroed).weight.data.zero_()
        model.save_pretrained(folder)
        directory = run(request(folder, texts), out=tmp_path / "out")
        first = stored(directory, "k_position", 0)
        if name == "where":
            assert list(first.values())[:4] == pytest.approx([1] * 4, abs=1e-6)
            assert stored(directory, "logit_pp", 1)[2] == pytest.approx(1, abs=1e-6)
        else:
            error = stored(directory, "k_position_se", 0)
            assert all(abs(first[head]) < 4 * error[head] for head in range(4))


def test_too_few_documents_are_refused_before_anything_is_loaded(texts, tmp_path):
    for count in (1, 2):
        with pytest.raises(TextError, match=f"at least 3 are needed and 8 or more are better, but there are {count}"):
            run(request("no-such-model", texts[:count]), out=tmp_path)
        assert not list(tmp_path.iterdir())


def test_resumed_run_computes_nothing_twice(gpt2, texts, tmp_path, monkeypatch):
    whole = run(request(gpt2, texts), out=tmp_path / "whole")
    with monkeypatch.context() as broken:
        broken.setattr(
            "wherewhat.runs.directory.RunDirectory._link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            run(request(gpt2, texts), out=tmp_path / "killed")
    monkeypatch.setattr("wherewhat.runs.jobs._measured", lambda *_: pytest.fail("measured twice"))
    again = run(request(gpt2, texts), out=tmp_path / "killed")
    assert (again.path / "config.json").read_bytes() == (whole.path / "config.json").read_bytes()
    ours, theirs = (directory.scores().to_pydict() for directory in (again, whole))
    values, expected = (torch.tensor(table.pop("value"), dtype=torch.float64) for table in (ours, theirs))
    assert ours == theirs
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_time_of_documents_together_is_announced(monkeypatch):
    clock, counts = [0.0], []
    monkeypatch.setattr("wherewhat.runs.jobs.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Counted(DocumentsMeasurement):
        least_documents = 3

        def measure(self, subject, texts, config):
            counts.append([text.ids.shape[1] for text in texts])
            clock[0] += 1e-2 * sum(counts[-1])

    line = estimate(None, Counted(), None, [Text(torch.arange(4096)[None])] * 20)
    assert counts == [[64] * 3, [64] * 3, [256] * 3]
    assert line.startswith("20 documents of 4096 tokens: about ")


def test_command_shows_model_twin_and_intervals_and_refuses_one_document(cli, gpt2, texts, tmp_path):
    arguments = ["split", gpt2, "--tokens", "24", "--out", tmp_path / "out"]
    for path in texts:
        arguments += ["--text", path]
    shown = cli(*arguments)
    assert shown.code == 0, shown.err
    assert all(words in shown.out for words in ("position in q", "±", "random"))
    alone = cli(*arguments, "--documents", "1")
    assert alone.code == 2
    assert len(alone.err.strip().splitlines()) == 1
