"""Identity: constructed heads have the flow and geometry that they were built for, the paper's pure layers follow from
its scores; brute force: accuracy by position of the answer; end-to-end: what was measured is read again."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from helpers.tolerance import rounding
from wherewhat.errors import ConfigError
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps.scores import label
from wherewhat.runs.directory import RunDirectory
from wherewhat_lab.constructions.transformers import index_transformer
from wherewhat_lab.multihop import figures
from wherewhat_lab.multihop.accuracy import EXTRA, measure_accuracy
from wherewhat_lab.multihop.figures import (
    PAPER,
    ROLES,
    answer_places,
    frequency_ids,
    information_flow,
    measure_figures,
    plane_points,
    runs_by_task,
    unscaled_use,
)
from wherewhat_lab.multihop.study import MultihopRun, Setup, open_run
from wherewhat_lab.tasks.one_hop import IndexTask

TASK = IndexTask(target=6)
THETA = 0.866


@pytest.fixture(scope="module")
def index_model():
    return index_transformer(TASK, theta=THETA, longest=16)


@pytest.fixture
def run(multihop_study, tmp_path):
    """A copy, so that other tests find the run as it was."""
    shutil.copytree(multihop_study.path, tmp_path / multihop_study.path.name)
    return open_run(tmp_path / multihop_study.path.name)


def test_a_constructed_index_head_makes_the_hop(index_model):
    sequences = TASK.sample(40, seed=5)
    found = information_flow(index_model, TASK, sequences)
    assert found["solved"].tolist() == [1.0]
    assert [ROLES[code] for code in found["roles"].flatten().tolist()] == ["Index"]
    query, answer = found["path"].tolist()
    assert query == sequences.tokens.shape[1] - 1
    attention = index_model.attention(sequences.tokens)[0].pattern()
    torch.testing.assert_close(found["pattern"][0], attention[0], atol=1e-9, rtol=0)
    reached = attention[torch.arange(40), 0, -1, sequences.path[:, 1]]
    torch.testing.assert_close(found["on_next"][0, 0, 0].double(), reached.mean(), atol=1e-6, rtol=0)
    assert found["pattern"][0, 0, query].argmax() == answer
    wrong = replace(sequences, answers=(sequences.answers + 1) % TASK.answers)  # it solves nothing
    flow = information_flow(index_model, TASK, wrong)
    assert {name: values.tolist() for name, values in flow.items()} == {"solved": [0.0]}


def test_a_constructed_index_head_has_bundled_keys_and_fanned_out_queries(index_model):
    found = plane_points(index_model, TASK, TASK.sample(64, seed=5))
    assert found["planes"].tolist() == [[0]]
    assert float(found["key_resultant"]) == pytest.approx(1, abs=1e-6)
    assert float(found["query_tightness"]) == pytest.approx(1, abs=1e-6)
    # The query of the integer m is the key's direction, turned by -mθ.
    (turned,), labels = found["queries"][0], found["query_labels"]
    angles = torch.atan2(turned[:, 1], turned[:, 0])
    key = torch.atan2(*found["keys"][0, 0, 0].flip(0))
    torch.testing.assert_close(torch.cos(angles - key), torch.cos(labels * THETA), atol=1e-5, rtol=0)


def test_positions_of_answers(run):
    model, task = run.model().double(), run.setup.task  # largest logits of other batches are those in float64
    for extra in (0, 5):
        sequences = task.sample(100, seed=3, extra=extra)
        found = answer_places(model, task, sequences)
        given = model(sequences.tokens).argmax(-1)
        hits, counts = [0] * task.slots, [0] * task.slots
        for row, tokens in enumerate(sequences.tokens.tolist()):
            answer, visited = task.solve(tokens)
            counts[visited[-1] - extra] += 1
            hits[visited[-1] - extra] += int(given[row]) == answer
        assert (found["hits"].tolist(), found["counts"].tolist()) == (hits, counts)
        assert int(found["hits"].sum()) == int(measure_accuracy(model, sequences).hits.sum())


def test_everything_is_measured_once(run, monkeypatch):
    first = measure_figures(run, (0, 3), count=12)
    for name in ("information_flow", "plane_points", "answer_places"):
        monkeypatch.setattr(figures, name, None)
    again = measure_figures(open_run(run.path), (0, 3), count=12)
    for one, other in ((first.flow, again.flow), (first.geometry, again.geometry), (first.places[0], again.places[0])):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert list(again.places) == [0]
    assert again.extra["best"][3].hits.tolist() == first.extra["best"][3].hits.tolist()
    with pytest.raises(TypeError):
        measure_figures(run, (0, 3), count=16)


def test_mean_frequencies_and_dot_products_before_their_scale(run, monkeypatch):
    recorded, records = frequency_ids(run), run.records()
    use, scale = records["use"], run.model().blocks[0].scale
    torch.testing.assert_close(unscaled_use(run) * scale, use, atol=0, rtol=1e-6)
    weights = (use.double() / scale).softmax(-1)
    ids = torch.arange(1, use.shape[-1] + 1).double()
    # The use before its scale is float32: its rounding moves weights by as much, relatively, times the use.
    moved = 8 * rounding(1) * (1 + float(use.max()) / scale)
    torch.testing.assert_close(frequency_ids(run, unscaled_use(run)).double(), weights @ ids, atol=0, rtol=moved)
    # Records of earlier versions have the use of planes alone.
    earlier = {name: values for name, values in records.values.items() if name != "mean_frequency_softmax"}
    monkeypatch.setattr(MultihopRun, "records", lambda _: replace(records, values=earlier))
    torch.testing.assert_close(frequency_ids(run).double(), recorded.double(), atol=0, rtol=moved)


def fake_run(tmp_path, name, seed, **options):
    setup = Setup.of(name, options).seeded(seed)
    return MultihopRun(RunDirectory.open(tmp_path, name=name, config=setup.values()))


def test_runs_are_grouped_by_task_and_seed(tmp_path):
    runs = [fake_run(tmp_path, *one) for one in (("letter", 1), ("number", 2), ("letter", 0))]
    found = runs_by_task(runs)
    assert {task: [run.seed for run in same] for task, same in found.items()} == {"number": [2], "letter": [0, 1]}
    with pytest.raises(ConfigError, match="several runs of the letter task have seed 1"):
        runs_by_task([*runs, runs[0]])
    with pytest.raises(ConfigError, match="differ in more than their seeds"):
        runs_by_task([*runs, fake_run(tmp_path, "number", 0, layers=2)])
    with pytest.raises(ConfigError, match="a run of the index task: give runs of the tasks number and letter"):
        runs_by_task([fake_run(tmp_path, "index", 0)])


def test_the_paper_is_consistent():
    for paper in PAPER.values():
        assert list(paper.accuracy) == list(EXTRA)
        assert sorted(paper.accuracy.values(), reverse=True) == list(paper.accuracy.values())
        assert len(paper.s_pos) == len(paper.s_sym) == len(paper.frequency_ids) == 12
        for gamma, pure in paper.pure.items():
            codes = label(torch.tensor(paper.s_pos).double(), torch.tensor(paper.s_sym).double(), gamma)
            for kind, layers in pure.items():
                assert (codes == LABELS.index(kind)).nonzero()[:, 0].tolist() == list(layers)
