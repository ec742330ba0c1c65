"""Brute force: batched scores against those of one sequence at a time; identity: records, purity and order of learning
against curves whose outcome is known; end-to-end: a small training with its witness, interrupted and resumed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from wherewhat.captures.attention import Mask
from wherewhat.errors import ConfigError, MeasureError, StoreError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.frequencies.planes import frequency_use, mean_frequency, mean_frequency_softmax
from wherewhat.measures.swaps import LABELS, SCORE_LABELS
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.tensors import share_intervals
from wherewhat.runs import results as summary
from wherewhat.runs.records import Records
from wherewhat.scores import Column
from wherewhat_lab.config import LabConfig, TrainConfig
from wherewhat_lab.constructions.transformers import index_transformer, retrieval_transformer
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.accuracy import accuracy_by_extra, measure_accuracy, solved_by, split_rows
from wherewhat_lab.multihop.learning import align, find_learning, find_purity, pooled
from wherewhat_lab.multihop.scores import (
    AXES,
    hold_out,
    multihop_recorder,
    noise_level,
    overall_accuracy,
    record_scores,
    score_model,
)
from wherewhat_lab.multihop.study import train
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask

TASK = NumberTask(target=4, pretarget=4, hops=3, symbols=10)
SMALL = LabConfig(vocabulary=TASK.vocabulary, layers=2, heads=2, width=16, positions=16)
EXACT = {"atol": 1e-9, "rtol": 1e-9}


def make(config=SMALL, *, spread=0.4, dtype=torch.float64):
    """A model with larger weights than initial ones, which hide mistakes."""
    model = LabModel(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def alone(attention, row):
    """A layer's attention on one sequence of the batch."""
    assert isinstance(attention.mask, Mask)
    one = slice(row, row + 1)
    parts = {name: getattr(attention, name)[one] for name in ("rot_q", "rot_k", "value", "output")}
    return replace(attention, **parts)


@pytest.fixture
def held_out():
    return hold_out(TASK.sample(60, seed=3), scored=9, tested=30)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 1},
        {"encoding": "partial", "rotary_share": 0.5},
        {"encoding": "p-rope"},
        {"encoding": "alibi"},
        {"encoding": "nope"},
        {"encoding": "learned"},
        {"frequencies": ("0.0:0", "1.*:1-2")},
    ],
    ids=str,
)
def test_batched_scores_are_those_of_each_sequence(options):
    """In float64, where sums in any order agree to 1e-12."""
    held_out = hold_out(TASK.sample(60, seed=3), scored=6, tested=30)
    model = make(replace(SMALL, **options))
    found = score_model(model, held_out)
    sequences = held_out.sequences.select(torch.arange(held_out.scored))
    n = sequences.tokens.shape[1]
    layers = model.attention(sequences.tokens)
    for layer, attention in enumerate(layers):
        use, sse, tss, path = [], 0.0, 0.0, []
        for row in range(len(sequences)):
            one = alone(attention, row)
            swaps = layer_swaps(one, [n - 1], sink_tokens=1)
            fit = fit_layer(one)
            torch.testing.assert_close(found.by_sequence["s_pos"][layer, :, row], swaps.s_pos[:, 0], **EXACT)
            torch.testing.assert_close(found.by_sequence["s_sym"][layer, :, row], swaps.s_sym[:, 0], **EXACT)
            for name in ("s_pos_no_sink", "s_sym_no_sink"):
                torch.testing.assert_close(found.by_sequence[name][layer, :, row], getattr(swaps, name)[:, 0], **EXACT)
            torch.testing.assert_close(
                found.by_sequence["effective_swaps"][layer, :, row], swaps.effective[:, 0], **EXACT
            )
            weights = one.pattern(slice(n - 1, n))[0, :, 0].double()
            assert torch.allclose(
                found.by_sequence["sink_excess"][layer, :, row], weights[:, 0] - 1 / n, atol=2e-6, rtol=0
            )
            entropy = -(weights * weights.log()).sum(-1)
            torch.testing.assert_close(found.by_sequence["entropy"][layer, :, row], entropy, **EXACT)
            torch.testing.assert_close(found.by_sequence["r"][layer, :, row], fit.r, **EXACT)
            sse, tss = sse + fit.sse, tss + fit.tss
            if one.rotation is not None:
                use.append(frequency_use(one, [n - 1]))
            leaves = sequences.path[row, : int(sequences.hops[row])].tolist()
            path += [(layer_swaps(one, [query]).s_pos, layer_swaps(one, [query]).s_sym) for query in leaves]
        torch.testing.assert_close(found.overall["r_pooled"][layer], (1 - sse / tss).sqrt(), **EXACT)
        for mine, which in ((found.overall["s_pos_path"], 0), (found.overall["s_sym_path"], 1)):
            torch.testing.assert_close(mine[layer], torch.cat([p[which] for p in path], 1).mean(1), **EXACT)
        if use:
            mean = torch.stack(use).mean(0)
            torch.testing.assert_close(found.overall["use"][layer], mean, **EXACT)
            expected = mean_frequency(mean, attention.rotation.inv_freq)
            torch.testing.assert_close(found.overall["mean_frequency"][layer], expected, **EXACT)
            expected = mean_frequency_softmax(mean, attention.rotation.inv_freq)
            torch.testing.assert_close(found.overall["mean_frequency_softmax"][layer], expected, **EXACT)
        else:
            assert found.overall["use"].shape[-1] == 0
            assert bool(found.overall["mean_frequency"].isnan().all())
            assert bool(found.overall["mean_frequency_softmax"].isnan().all())


def test_accuracy_counts_right_answers(held_out):
    model, sequences = make(), held_out.sequences
    with torch.no_grad():
        logits = model(sequences.tokens)
    said = logits.argmax(-1)
    found = score_model(model, held_out).accuracy
    also = measure_accuracy(model, sequences)
    assert found.hops == also.hops == (1, 2, 3)
    for index, hops in enumerate(found.hops):
        rows = (sequences.hops == hops).nonzero()[:, 0]
        hits = sum(int(said[row] == sequences.answers[row]) for row in rows)
        assert (int(found.hits[index]), int(found.counts[index])) == (hits, len(rows))
        loss = torch.nn.functional.cross_entropy(logits[rows], sequences.answers[rows])
        assert float(found.loss[index]) == pytest.approx(float(loss), rel=1e-5)
    assert torch.equal(found.hits, also.hits)
    assert found.overall == pytest.approx(float((said == sequences.answers).double().mean()))
    assert torch.equal(solved_by(model, sequences), said == sequences.answers)


def test_threads_change_nothing(held_out):
    sequences = TASK.sample(600, seed=5)
    model, before = make(dtype=torch.float32), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(score_model(model, hold_out(sequences, scored=400, tested=600)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    one, two = found
    for kind in ("by_sequence", "overall"):
        for name, value in getattr(one, kind).items():
            assert torch.equal(value, getattr(two, kind)[name]), name
    assert torch.equal(one.accuracy.loss, two.accuracy.loss)


def test_parts_cover_all_rows_once():
    for count, n in ((0, 17), (1, 17), (500, 17), (7, 100_000), (481, 17)):
        parts = split_rows(count, n, torch.device("cpu"))
        assert [row for part in parts for row in range(count)[part]] == list(range(count))
        assert all(part.stop - part.start <= max(1, 2**12 // n) for part in parts)


def test_constructions_are_pure():
    # Purity in what is known: the Index transformer is positional, the Retrieval transformer symbolic.
    number, letter = NumberTask(target=4, pretarget=4, hops=2, symbols=6), LetterTask(target=4, pretarget=4, hops=2)
    for task, model, kind in (
        (number, index_transformer(number, theta=0.866, layers=2), "positional"),
        (letter, retrieval_transformer(letter, theta=0.0, layers=2), "symbolic"),
    ):
        held_out = hold_out(task.sample(40, seed=0), scored=20, tested=40)
        recorder = multihop_recorder(held_out)
        recorder(0, model)
        purity = find_purity(recorder.records)
        assert purity.pure(kind, 0.05)[:1] == [(0, 0)]
        assert float(overall_accuracy(recorder.records)[0]) == 1.0


def test_hold_out_takes_equal_shares():
    sequences = TASK.sample(90, seed=0)
    chosen = hold_out(sequences, scored=12, tested=60)
    assert chosen.sequences.hops.bincount().tolist() == [0, 20, 20, 20]
    assert chosen.sequences.hops[: chosen.scored].bincount().tolist() == [0, 4, 4, 4]
    rows = {tuple(row) for row in sequences.tokens.tolist()}
    assert {tuple(row) for row in chosen.sequences.tokens.tolist()} <= rows
    assert chosen.fingerprint != hold_out(sequences, scored=9, tested=60).fingerprint
    with pytest.raises(ConfigError, match="of one there are 30"):
        hold_out(sequences, scored=12, tested=91)
    with pytest.raises(ConfigError, match="scored is 2"):
        hold_out(sequences, scored=2, tested=60)
    only = sequences.select(torch.cat([(sequences.hops == h).nonzero()[:k, 0] for h, k in ((1, 30), (2, 2), (3, 9))]))
    with pytest.raises(ConfigError, match="of one there are 2"):
        hold_out(only, scored=3, tested=20)


def test_short_sequences_are_refused():
    task = IndexTask(target=2, symbols=4)
    model = LabModel(LabConfig(vocabulary=task.vocabulary, layers=1, width=8))
    with pytest.raises(MeasureError, match="3 tokens are too short"):
        score_model(model, hold_out(task.sample(8, seed=0), scored=4, tested=8))


def test_recorder_keeps_and_resumes(tmp_path, held_out):
    path, models = tmp_path / "dynamics.safetensors", [make(replace(SMALL, seed=seed)) for seed in range(3)]
    recorder = multihop_recorder(held_out, path=path, identity="a")
    assert len(recorder.records) == 0
    recorder(0, models[0])
    recorder(100, models[2])
    again = multihop_recorder(held_out, path=path, identity="a")
    again(100, models[0])  # there already: not recorded again
    again(50, models[1])
    found = Records.read(path)
    assert found.steps.tolist() == [0, 50, 100]
    for index, model in enumerate(models):
        scores = score_model(model, held_out)
        assert torch.equal(found["s_pos"][index], scores.by_sequence["s_pos"].mean(-1).float())
        assert torch.equal(found["use"][index], scores.overall["use"].float())
        assert torch.equal(found["accuracy"][index], scores.accuracy.shares.float())
    assert {*found.values, *found.constants} == {*AXES, "hops", "counts", "about"}
    for name in (*found.values, *found.constants):
        assert torch.equal(found[name].nan_to_num(9), again.records[name].nan_to_num(9)), name
    assert noise_level(found) == pytest.approx(
        fit_layer(alone(models[0].attention(TASK.sample(1, seed=0).tokens)[0], 0)).noise_floor
    )
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="another training"):
        multihop_recorder(held_out, path=path, identity="b")
    with pytest.raises(ConfigError, match="another training"):
        multihop_recorder(hold_out(TASK.sample(60, seed=4), scored=9, tested=30), path=path, identity="a")
    with pytest.raises(ConfigError, match="does not continue"):
        again(150, make(replace(SMALL, heads=1)))
    path.write_bytes(b"nothing")
    with pytest.raises(StoreError, match="cannot read"):
        multihop_recorder(held_out, path=path, identity="a")


def test_training_with_records_killed_and_resumed(tmp_path, held_out):
    config = replace(SMALL, heads=1)
    options = TrainConfig(steps=8, batch=8, warmup=2, sequences=1200, record_every=2, save_every=4)

    class Killed(Exception):
        pass

    def run(folder, kill_at=None):
        recorder = multihop_recorder(held_out, path=folder / "dynamics.safetensors")

        def record(step, model):
            recorder(step, model)
            if step == kill_at:
                raise Killed

        train(TASK, config, options, record=record, directory=folder)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run(whole)
    with pytest.raises(Killed):
        run(parts, kill_at=6)
    run(parts)
    assert (whole / "dynamics.safetensors").read_bytes() == (parts / "dynamics.safetensors").read_bytes()
    assert Records.read(whole / "dynamics.safetensors").steps.tolist() == [0, 2, 4, 6, 8]


def test_records_of_a_whole_training_are_small(tmp_path):
    task = NumberTask()
    held_out = hold_out(task.sample(16, seed=0), scored=4, tested=8)
    model = LabModel(LabConfig(vocabulary=task.vocabulary))
    scores = record_scores(score_model(model, held_out))
    many = {name: value[None].repeat_interleave(136, 0) for name, value in scores.items()}
    Records(torch.arange(136), many, AXES).write(tmp_path / "dynamics")
    assert (tmp_path / "dynamics").stat().st_size < 600_000


def curves(labels, accuracy, *, counts=(100, 100), every=50):
    """Records of heads with given labels, ``(records, heads)``, and accuracies, ``(records, hops)``."""
    high = {"positional": (0.97, 0.02), "symbolic": (0.0, 1.0), "uniform": (1.0, 0.99), "mixed": (0.6, 0.5)}
    scores = torch.tensor([[high[name] for name in row] for row in labels])[:, None]  # (records, 1, heads, 2)
    records = len(labels)
    nothing = torch.zeros(records, 1, len(labels[0]))
    values = {
        "accuracy": torch.tensor(accuracy),
        "loss": torch.zeros(records, len(counts)),
        "s_pos": scores[..., 0],
        "s_sym": scores[..., 1],
        **dict.fromkeys(
            ("s_pos_spread", "s_sym_spread", "entropy", "mean_frequency", "mean_frequency_softmax", "r", "r_pooled"),
            nothing,
        ),
        "effective_swaps": nothing + 1,
        "s_pos_path": scores[..., 1],
        "s_sym_path": scores[..., 0],
        "use": nothing[..., None],
    }
    constants = {
        "hops": Column(torch.arange(1, len(counts) + 1), ("hop",)),
        "counts": Column(torch.tensor(counts), ("hop",)),
        "about": Column(torch.tensor([0, 4, 17]), ("number",)),
    }
    return Records(every * torch.arange(records), values, AXES, constants)


LABELLED = [
    ("uniform", "uniform", "uniform", "mixed"),
    ("positional", "mixed", "symbolic", "mixed"),
    ("mixed", "symbolic", "symbolic", "symbolic"),
    ("positional", "symbolic", "symbolic", "mixed"),
    ("positional", "symbolic", "positional", "uniform"),
]
RISING = [(0.01, 0.0), (0.6, 0.3), (0.9, 0.49), (0.89, 0.9), (1.0, 0.98)]


def test_purity_and_when_it_came():
    purity = find_purity(curves(LABELLED, RISING))
    assert purity.final[0, 0].tolist() == [LABELS.index(x) for x in ("positional", "symbolic", "positional", "uniform")]
    assert purity.since[0, 0].tolist() == [150, 100, 200, -1]
    assert purity.counts[0].tolist() == [[1, 0, 0, 3], [2, 1, 1, 0], [1, 0, 3, 0], [1, 1, 2, 0], [0, 2, 1, 1]]
    assert purity.ever[0].tolist() == [[1, 0, 0, 3], [2, 1, 1, 3], [3, 1, 3, 3], [3, 1, 3, 3], [3, 2, 3, 4]]
    assert torch.equal(purity.codes[0], purity.codes[1])  # γ = 0.05 as well
    strict = find_purity(curves(LABELLED, RISING), gammas=(0.01,))
    assert strict.pure("positional", 0.01) == []
    assert strict.pure("symbolic", 0.01) == [(0, 1)]
    assert purity.pure("positional", 0.1) == [(0, 0), (0, 2)]
    assert purity.pure("symbolic", 0.1) == [(0, 1)]
    assert purity.pure("symbolic", 0.1, ever=True) == [(0, 1), (0, 2), (0, 3)]
    for call in (lambda: purity.pure("round", 0.1), lambda: purity.pure("mixed", 0.3)):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ConfigError, match=r"gamma is 0\.5"):
        find_purity(curves(LABELLED, RISING), gammas=(0.5,))


def test_purity_without_the_sink():
    """Sinks have a label of their own, and all other heads that of their scores without the first key."""
    records = curves(LABELLED, RISING)
    with pytest.raises(ConfigError, match="without the first key"):  # records of an earlier version
        find_purity(records, no_sink=True)
    records.values["s_pos_no_sink"], records.values["s_sym_no_sink"] = records["s_sym"], records["s_pos"]
    records.values["sink_excess"] = torch.zeros(5, 1, 4)
    records.values["sink_excess"][3:, :, 0] = 0.3
    purity = find_purity(records, no_sink=True)
    names = [[LABELS[code] for code in row] for row in purity.codes[0, :, 0].tolist()]
    assert names[0] == ["uniform", "uniform", "uniform", "mixed"]
    assert names[2] == ["mixed", "positional", "positional", "positional"]
    assert names[4] == ["sink", "positional", "symbolic", "uniform"]
    assert purity.counts[0, :, LABELS.index("sink")].tolist() == [0, 0, 0, 1, 1]
    assert purity.since[0, 0].tolist() == [-1, 100, 200, -1]  # a sink is not pure


def test_purity_is_what_a_walk_over_records_says():
    generator = torch.Generator().manual_seed(0)
    names = ("positional", "symbolic", "uniform", "mixed")
    chosen = torch.randint(4, (9, 40), generator=generator)
    chosen[5:, 20:] = chosen[5, 20:]
    dynamics = curves([[names[code] for code in row] for row in chosen.tolist()], [(0.0, 0.0)] * 9)
    since = find_purity(dynamics).since[0, 0].tolist()
    ever = find_purity(dynamics).ever[0]
    for record in range(9):
        for code, name in enumerate(SCORE_LABELS):
            had = sum(any(names[chosen[at, head]] == name for at in range(record + 1)) for head in range(40))
            assert int(ever[record, code]) == had
    for head in range(40):
        walk = [names[code] for code in chosen[:, head].tolist()]
        expected = -1
        if walk[-1] in ("positional", "symbolic"):
            first = len(walk) - 1
            while first > 0 and walk[first - 1] == walk[-1]:
                first -= 1
            expected = 50 * first
        assert since[head] == expected


def test_order_of_learning():
    learning = find_learning(curves(LABELLED, RISING))
    assert learning.passed.tolist() == [[50, 150], [100, 150], [200, -1]]
    assert learning.overall.tolist() == [100, 200, 200]
    assert learning.at(0.9) == {1: 100, 2: 150}
    with pytest.raises(ConfigError, match=r"not for 0\.7"):
        learning.at(0.7)
    with pytest.raises(ConfigError, match="level is 0"):
        find_learning(curves(LABELLED, RISING), levels=(0.0,))


def test_alignment_over_runs():
    never = [(0.0, 0.0)] * 5
    runs = [curves(LABELLED, RISING), curves(LABELLED, RISING, every=100), curves([("mixed",) * 4] * 5, never)]
    found = pooled([align(run) for run in runs])
    assert found.pure == {"positional": (2, 2, 0), "symbolic": (1, 1, 0)}
    # Positional heads at 150 and 200, mean 175, and a symbolic one at 100; both numbers of hops together at 200.
    assert found.lags["positional"][:2] == (-25.0, -50.0)
    assert found.lags["symbolic"][:2] == (-100.0, -200.0)
    assert math.isnan(found.lags["symbolic"][2])
    assert found.lag_interval("positional") == summary.interval([-25.0, -50.0])
    assert found.pure_interval("positional") == summary.interval([2.0, 2.0, 0.0])
    pure = torch.tensor([0.0, 2.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    overall = torch.tensor([sum(row) / 2 for row in RISING], dtype=torch.float64)  # recorded in float32
    expected = float(torch.corrcoef(torch.stack([pure, overall]))[0, 1])
    assert found.correlation[0] == pytest.approx(expected, abs=5e-6)
    assert math.isnan(found.correlation[2])
    assert found.correlation_interval().n == 2
    assert align(runs[2]).lag_interval("symbolic") is None
    for wrong in ([], [align(runs[0]), replace(align(runs[0]), hops=(1, 2, 3))]):
        with pytest.raises(ConfigError, match="all on the same numbers of hops"):
            pooled(wrong)


def test_wilson_is_the_other_one():
    for hits, count in ((0, 12), (3, 7), (12, 12), (1, 1)):
        expected = summary.wilson([1.0] * hits + [0.0] * (count - hits))
        assert share_intervals(torch.tensor(hits), torch.tensor(count)).tolist() == pytest.approx(
            [expected.low, expected.high], abs=1e-12
        )
    assert bool(share_intervals(torch.tensor(0), torch.tensor(0)).isnan().all())


def test_accuracy_by_extra_tokens():
    model = make(spread=0.2)
    found = accuracy_by_extra(model, TASK, extra=(0, 3, 31), count=61, seed=7)
    assert [int(found[extra].counts.sum()) for extra in (0, 3, 31)] == [61] * 3
    for extra, accuracy in found.items():
        sequences = TASK.sample(61, seed=7, extra=extra)
        assert sequences.tokens.shape[1] == TASK.length + extra
        with torch.no_grad():
            right = model(sequences.tokens).argmax(-1) == sequences.answers
        assert accuracy.overall == pytest.approx(float(right.double().mean()))
        for column, hops in enumerate(accuracy.hops):
            assert int(accuracy.hits[column]) == int(right[sequences.hops == hops].sum())
        low, high = accuracy.overall_interval
        assert low <= accuracy.overall <= high
    perfect = index_transformer(TASK, theta=0.866, layers=3, longest=60)
    found = accuracy_by_extra(perfect, TASK, extra=(0, 60 - TASK.length), count=30)
    assert [accuracy.overall for accuracy in found.values()] == [1.0, 1.0]
    with pytest.raises(ConfigError, match="extra is -1: at least 0 is needed"):
        accuracy_by_extra(model, TASK, extra=(0, -1))
    with pytest.raises(ConfigError, match="16 positions"):
        accuracy_by_extra(LabModel(replace(SMALL, encoding="learned")), TASK, extra=(8,))
