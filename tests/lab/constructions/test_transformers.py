"""Brute force: constructions on all inputs; identity: their scores, streams and geometry, as derived on paper."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.swaps import LABELS, SCORES
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.scores import label, sink_heads
from wherewhat.progress import Silent
from wherewhat_lab.config import LabConfig
from wherewhat_lab.constructions.checks import check_exhaustively, check_randomly
from wherewhat_lab.constructions.discrepancy import index_discrepancy
from wherewhat_lab.constructions.geometry import (
    directions_by_label,
    head_geometry,
    resultant,
    task_labels,
)
from wherewhat_lab.constructions.transformers import (
    index_leak,
    index_temperature,
    index_transformer,
    letter_angle,
    repeating_distance,
    retrieval_error,
    retrieval_temperature,
    retrieval_transformer,
    softmax_temperature,
)
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask

FAST = 10_000 ** (-1 / 64)
SLOW = 10_000 ** (-41 / 64)


def aligned_resultant(points, labels, angle):
    """Resultant length after rotation of each point by its label times ``angle``."""
    turn = labels.double() * angle
    z = torch.view_as_complex(points.double().contiguous()) * torch.polar(torch.ones_like(turn), turn)
    return resultant(torch.view_as_real(z))


def small_index(task, **options):
    return index_transformer(task, theta=FAST, layers=task.max_hops, **options)


def small_retrieval(task, **options):
    return retrieval_transformer(task, theta=SLOW, layers=task.max_hops, **options)


@pytest.mark.parametrize(
    ("write", "task", "least", "dtype"),
    [
        (small_index, IndexTask(target=4, symbols=3), 4000, torch.float64),
        (small_index, NumberTask(target=2, pretarget=2, hops=3, symbols=2), 2000, torch.float32),
        (small_retrieval, RetrievalTask(target=4, letters=3, digits=1), 10_000, torch.float32),
        (small_retrieval, LetterTask(target=1, pretarget=2, hops=2, letters=4, digits=1), 8000, torch.float32),
    ],
    ids=("index", "number", "retrieval", "letter"),
)
def test_right_on_all_inputs(write, task, least, dtype):
    found = check_exhaustively(write(task).to(dtype), task)
    assert found.inputs > least
    assert found.wrong == 0
    assert found.margin > 0.5
    assert found.examples == ()


def test_all_inputs_are_those_of_the_task():
    task = IndexTask(target=2, symbols=2)
    # Letters and integers in front; the query points to a letter: 1 back with 4 x 2 inputs, 2 back with 2 x 4.
    assert check_exhaustively(small_index(task), task).inputs == 16


def test_too_few_layers_are_wrong_and_shown():
    task = NumberTask(target=2, pretarget=2, hops=2, symbols=2)
    found = check_exhaustively(index_transformer(task, theta=FAST, layers=1), task)
    assert 0 < found.wrong < found.inputs
    assert found.margin < 0
    answer, visited = task.solve(found.examples[0])
    assert len(visited) == 3
    assert int(index_transformer(task, theta=FAST, layers=2)(torch.tensor(found.examples[:1])).argmax()) == answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["index", "retrieval"])
def test_right_on_100000_random_inputs(kind):
    if kind == "index":
        task, longest = NumberTask(symbols=10), 48
        model = index_transformer(task, theta=FAST, layers=4, longest=longest)
    else:
        task, longest = LetterTask(letters=6, digits=2), 32
        model = retrieval_transformer(task, theta=1e-4, layers=4, longest=longest)
    found = check_randomly(model.float(), task, longest=longest)
    assert found.inputs == 100_000
    assert found.wrong == 0
    assert min(found.by_length) == task.length
    assert max(found.by_length) == longest


def test_more_layers_than_hops_are_reflexive():
    for task, write, theta in (
        (NumberTask(hops=2), index_transformer, FAST),
        (LetterTask(hops=2), retrieval_transformer, 1e-4),
    ):
        found = check_randomly(write(task, theta=theta, layers=5, longest=32), task, count=300, longest=32)
        assert found.wrong == 0
        assert (found.inputs, min(found.by_length), max(found.by_length)) == (300, task.length, 32)


def test_stream_of_index_is_what_was_derived():
    task = NumberTask(symbols=6)
    model = index_transformer(task, theta=FAST, layers=4)
    sequences = task.sample(200, seed=1)
    streams = []
    model(sequences.tokens, edit_stream=lambda layer, x: streams.append(x.clone()))
    for layer, x in enumerate(streams):
        copies = torch.tensor([sum(math.comb(layer, k) * 2**k for k in range(h, layer + 1)) for h in range(5)])
        expected = torch.zeros(len(sequences), task.vocabulary + 1, dtype=torch.float64)
        expected.scatter_(1, sequences.answers[:, None], copies[sequences.hops].double()[:, None])
        expected.scatter_(1, sequences.tokens[:, -1:], 1.0)
        expected[:, -1] = 1
        # Attention leaks at most 1e-7, of at most 81 copies.
        torch.testing.assert_close(x[:, -1, : task.vocabulary + 1].detach(), expected, atol=1e-4, rtol=0)
    layers = model.attention(sequences.tokens[:5])
    assert all(torch.allclose(layer.pattern(), layers[0].pattern(), atol=1e-12) for layer in layers)


def test_stream_of_retrieval_is_the_pair_so_many_hops_on():
    task = LetterTask()
    model = retrieval_transformer(task, theta=1e-4, layers=4)
    sequences = task.sample(200, seed=1)
    streams = []
    model(sequences.tokens, edit_stream=lambda layer, x: streams.append(x.clone()))
    rows = torch.arange(len(sequences))
    for layer, x in enumerate(streams):
        held = sequences.path[rows, sequences.hops.clamp_max(layer)]
        assert torch.equal(x[:, -1, : task.vocabulary].argmax(-1), sequences.tokens[rows, held])


def test_scores():
    for model, task, expected in (
        (index_transformer(IndexTask(symbols=9), theta=FAST, longest=47), IndexTask(symbols=9), (1.0, 0.0)),
        (small_index(NumberTask(), longest=47), NumberTask(), (1.0, 0.0)),
        (retrieval_transformer(RetrievalTask(), theta=SLOW, longest=47), RetrievalTask(), (0.0, 1.0)),
        (retrieval_transformer(LetterTask(), theta=SLOW, longest=47), LetterTask(), (0.0, 1.0)),
    ):
        for extra in (0, 30):
            name = "positional" if expected[0] else "symbolic"
            found: dict[
                int, list[torch.Tensor]
            ] = {}  # both scores of both versions and the excess on the first key, by layer
            for tokens in task.sample(5, seed=3, extra=extra).tokens:
                n = len(tokens)
                for attention in model.attention(tokens[None]):
                    swaps = layer_swaps(attention, [n - 1], sink_tokens=1)
                    scores = [getattr(swaps, score)[:, 0] for score in SCORES]
                    first = attention.pattern(slice(n - 1, n))[0, :, 0, 0].double()
                    found.setdefault(attention.layer, []).append(torch.stack([*scores, first - 1 / n]))
                    # An answer in the first place has all the attention, so that the other keys are alike.
                    for values, wanted in zip(scores[: 4 if float(first) < 0.5 else 2], expected * 2, strict=False):
                        assert float((values - wanted).abs().max()) < 1e-6
            for of_layer in found.values():
                s_pos, s_sym, *no_sink, excess = torch.stack(of_layer, -1)  # (heads, sequences)
                sink = sink_heads(excess)
                assert not bool(sink.any())
                for both in ((s_pos, s_sym), no_sink):
                    codes = label(both[0].mean(1), both[1].mean(1), 0.1, sink=sink)
                    assert {LABELS[code] for code in codes.tolist()} == {name}


def test_leak_is_what_the_temperature_was_made_for():
    for n, leak in itertools.product((3, 17, 60), (0.4, 0.01)):
        task = IndexTask(target=n - 1, symbols=2)
        temperature = index_temperature(n, FAST, leak=leak)
        model = index_transformer(task, theta=FAST, temperature=temperature)
        attention = model.attention(task.sample(300, seed=0).tokens)[0]
        last = attention.pattern(slice(n - 1, n))[:, 0, 0].amax(-1)
        assert float(last.min()) >= 1 - leak - 1e-6
        exact = softmax_temperature(index_discrepancy(n, FAST, at="worst"), n - 1, leak=leak)
        assert exact == pytest.approx(temperature, rel=1e-3)


def test_leak_that_index_bears_is_enough_and_not_by_much():
    for layers in (1, 2, 3, 4, 8):
        for leak, holds in ((index_leak(layers), True), (index_leak(layers) + 1e-6, False)):
            right, wrong = (2 * (1 - leak)) ** layers, 3.0**layers - (3 - 2 * leak) ** layers
            assert (right > max(wrong, 1)) == holds


def test_error_bound_of_retrieval_holds():
    # Of several layers, at temperatures warm enough for the error to be seen.
    task = LetterTask(letters=6, digits=1)
    omega = letter_angle(task)
    sequences = task.sample(400, seed=2)
    for temperature in (0.003, 0.01, 0.02):
        for layers in (1, 2, 3):
            bound = retrieval_error(17, 1e-3, omega, layers=layers, temperature=temperature)
            short = sequences.select(sequences.hops <= layers)
            model = retrieval_transformer(task, theta=1e-3, layers=layers, temperature=temperature)
            error = 1 - model.requires_grad_(False)(short.tokens).gather(1, short.answers[:, None])
            assert float(error.max()) <= bound + 1e-12


def test_temperature_of_stacked_retrieval_is_proved_or_refused():
    omega = math.pi / 4
    assert (
        retrieval_error(17, SLOW, omega, layers=4, temperature=retrieval_temperature(17, SLOW, omega, layers=4)) < 0.5
    )
    with pytest.raises(ConfigError, match="not proved at length 60"):
        retrieval_temperature(60, SLOW, omega, layers=4)
    assert retrieval_temperature(60, 1e-5, omega, layers=4) > 0
    assert retrieval_temperature(60, 0.0, omega, layers=4) > 0


def test_geometry_of_index():
    task = NumberTask()
    model = small_index(task)
    for layer in (0, 3):
        found = head_geometry(model, task, task.sample(300, seed=0).tokens, layer=layer)
        assert (found.plane, found.share) == (0, 1.0)
        assert found.angle == pytest.approx(FAST, rel=1e-6)
        assert found.key_resultant == pytest.approx(1, abs=1e-6)
        assert found.query_tightness == pytest.approx(1, abs=1e-6)
        assert found.query_spread > 0.9
        assert aligned_resultant(found.queries, found.query_labels, FAST) == pytest.approx(1, abs=1e-6)
        assert found.query_labels.unique().tolist() == list(range(1, 17))


def test_geometry_of_retrieval():
    task = LetterTask()
    found = head_geometry(retrieval_transformer(task, theta=SLOW), task, task.sample(300, seed=0).tokens)
    for points, labels in ((found.keys, found.key_labels), (found.queries, found.query_labels)):
        means, resultants = directions_by_label(points, labels)
        assert means.shape == (8, 2)
        assert torch.allclose(resultants, torch.ones(8, dtype=torch.float64), atol=1e-6)
        assert resultant(means) < 1e-6
        assert aligned_resultant(points, labels, math.pi / 4) == pytest.approx(1, abs=1e-6)


def test_geometry_of_any_head_takes_its_largest_plane():
    task = NumberTask(symbols=24)
    model = LabModel(LabConfig(vocabulary=40, layers=1, heads=2, width=16))
    with torch.no_grad():
        model.blocks[0].qkv.weight[4:6] *= 30  # queries of head 0 in plane 2
    tokens = task.sample(40, seed=0).tokens
    found = head_geometry(model, task, tokens)
    assert found.plane == 2
    assert found.share > 0.5
    attention = model.attention(tokens)[0]
    torch.testing.assert_close(found.keys, attention.k[:, 0, :, 4:6].flatten(0, 1).double(), atol=1e-5, rtol=0)


def test_labels():
    numbers, letters = NumberTask(target=2, pretarget=1, hops=1, symbols=2), LetterTask(letters=6, digits=2)
    keys, queries = task_labels(numbers, torch.tensor([[0, 1, 2, 4]]))
    assert keys.tolist() == [[0, 0, 1, 3]]
    assert queries.tolist() == [[-1, -1, 1, 3]]
    keys, queries = task_labels(letters, torch.tensor([[5, 12 + 6 * 3 + 4]]))
    assert keys.tolist() == [[2, 3]]
    assert queries.tolist() == [[-1, 4]]


def test_wrong_options(subtests):
    for make, message in (
        (lambda: index_transformer(LetterTask(), theta=1.0), "solves number and index tasks, not a LetterTask"),
        (lambda: retrieval_transformer(PartialInductionTask(), theta=0.1), "not a PartialInductionTask"),
        (
            lambda: index_transformer(NumberTask(), theta=2 * math.pi / 7),
            "theta=0.8975.* times 7 is a .* or at most 7 tokens",
        ),
        (lambda: index_transformer(NumberTask(), theta=FAST, longest=5000), "float32 angles need at least"),
        (lambda: index_transformer(NumberTask(), theta=-1.0), "theta is -1.0"),
        (lambda: index_transformer(NumberTask(), theta=1.0, temperature=0.0), "temperature is 0.0"),
        (lambda: retrieval_transformer(RetrievalTask(), theta=0.03), "give less than 0.0231"),
        (lambda: check_exhaustively(small_index(NumberTask()), NumberTask()), "are more than 2000000"),
        (lambda: check_randomly(small_index(NumberTask()), NumberTask(), longest=9), "longest is 9"),
        (lambda: softmax_temperature(0.0, 3), "the gap is 0.0"),
        (lambda: softmax_temperature(1.0, 3, leak=0.5), "leak is 0.5"),
        (lambda: task_labels(PartialInductionTask(), torch.zeros(1, 2)), "have no labels"),
    ):
        with subtests.test(message=message):
            with pytest.raises(ConfigError, match=message) as caught:
                make()
            assert "\n" not in str(caught.value)


def test_the_ratio_of_the_angle_to_pi_must_be_irrational():
    """An irrational angle is not enough (2π/7), and a rational one (1) is no obstacle."""
    for period, theta in ((7, 2 * math.pi / 7), (7, 6 * math.pi / 7), (14, math.pi / 7), (1, 2 * math.pi)):
        assert repeating_distance(theta, 50) == period
        assert repeating_distance(theta, period) is None  # distances 0 to period - 1
    for theta in (1.0, 0.5, 0.866, math.sqrt(2)):
        assert repeating_distance(theta, 100) is None
    task = IndexTask(target=6, symbols=3)
    assert task.length == 7
    assert check_randomly(index_transformer(task, theta=2 * math.pi / 7), task, count=500).wrong == 0
    with pytest.raises(ConfigError, match="at most 7 tokens"):
        index_transformer(task, theta=2 * math.pi / 7, longest=8)
    assert check_randomly(index_transformer(task, theta=1.0, longest=40), task, count=500, longest=40).wrong == 0


def test_wrong_heads():
    task = NumberTask()
    tokens = task.sample(2, seed=0).tokens
    for options, message in (({"layer": 4}, "no layer 4"), ({"head": 1}, "no head 1")):
        with pytest.raises(MeasureError, match=message):
            head_geometry(small_index(task), task, tokens, **options)
    with pytest.raises(MeasureError, match="does not rotate"):
        head_geometry(LabModel(LabConfig(layers=1, encoding="nope")), task, tokens)


def test_a_length_that_angles_do_not_hold_is_refused_before_any_work(monkeypatch):
    def work(*_, **__):
        raise AssertionError

    monkeypatch.setattr("wherewhat_lab.constructions.transformers.index_discrepancy", work)
    with pytest.raises(ConfigError, match="at length 1000000000"):
        index_transformer(IndexTask(target=16), theta=0.866, longest=10**9)


def test_checking_tells_how_far_it_is():
    class Told(Silent):
        def track(self, items, label):
            told.append((len(items), label))
            return iter(items)

    told = []
    task = RetrievalTask(target=4)
    model = retrieval_transformer(task, theta=0.001, longest=12)
    found = check_randomly(model, task, count=5000, longest=12, progress=Told())
    plain = check_randomly(model, task, count=5000, longest=12)
    assert told == [(8, "5,000 inputs of up to 12 tokens")]
    assert (found.inputs, found.by_length, found.margin) == (plain.inputs, plain.by_length, plain.margin)
