"""Identity: a run that was interrupted, or has lost a file, ends with the same results; errors: unfinished runs."""

from __future__ import annotations

import shutil

import pytest
import torch

from wherewhat.errors import StoreError
from wherewhat.files import remove
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.records import Records
from wherewhat.scores import Column
from wherewhat_lab.multihop import study
from wherewhat_lab.multihop.accuracy import measure_accuracy
from wherewhat_lab.multihop.scores import best_step
from wherewhat_lab.multihop.study import Setup, measure_extra, open_run, train, train_and_record

OPTIONS = {"layers": 2, "heads": 2, "width": 16, "steps": 6, "record_every": 2, "batch": 4, "sequences": 800}
SETUP = Setup.of("number", {**OPTIONS, "threads": 1})
FILES = ("config.json", "profiles.safetensors")


def contents(run):
    weights = [
        {name: value.tolist() for name, value in run.model(checkpoint).state_dict().items()}
        for checkpoint in ("last", "best")
    ]
    return weights, {name: (run.path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_and_record(SETUP, out=tmp_path_factory.mktemp("whole"), scored=6, tested=12)


def test_interrupted_between_training_and_test(whole, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study, "measure_accuracy", killed)
        with pytest.raises(KeyboardInterrupt):
            train_and_record(SETUP, out=tmp_path, scored=6, tested=12)
    (path,) = tmp_path.iterdir()
    with pytest.raises(StoreError, match="not finished"):
        open_run(path)
    again = train_and_record(SETUP, out=tmp_path, scored=6, tested=12)
    assert contents(again) == contents(whole)
    assert again.test().overall == whole.test().overall


def test_what_was_lost_is_made_again(whole, tmp_path, subtests):
    for lost in (
        ("model.safetensors",),
        ("best.safetensors",),
        ("profiles.safetensors",),
        ("parts", "profiles.safetensors"),
    ):
        with subtests.test(lost=lost):
            path = tmp_path / lost[0] / whole.path.name
            shutil.copytree(whole.path, path)
            for name in lost:
                remove(path / name)
            with pytest.raises(StoreError, match="missing or damaged"):
                open_run(path)
            again = train_and_record(SETUP, out=path.parent, scored=6, tested=12)
            assert again.path == path
            assert contents(again) == contents(whole)


def test_longer_inputs_are_measured_once(whole, monkeypatch):
    first = {name: measure_extra(whole, (0, 3), count=8, checkpoint=name) for name in ("last", "best")}
    monkeypatch.setattr(study, "accuracy_by_extra", None)
    for name, before in first.items():
        again = measure_extra(open_run(whole.path), (3, 0), count=8, checkpoint=name)
        assert list(again) == [3, 0]
        assert all(again[extra].hits.tolist() == before[extra].hits.tolist() for extra in (0, 3))
    # Under the name that earlier versions gave to 17 + 3 tokens.
    assert whole.directory.has("length 20, 8 sequences")


def test_the_best_checkpoint_is_the_first_with_the_largest_accuracy(tmp_path):
    kept = {}

    def keep(step, model):
        kept[step] = {name: value.clone() for name, value in model.state_dict().items()}

    training, _, testing = SETUP.task.splits(SETUP.training.sequences, SETUP.training.data_seed)
    train(SETUP.task, SETUP.model, SETUP.training, record=keep, sequences=training)
    run = train_and_record(SETUP, out=tmp_path, scored=4, tested=4)
    found = run.records()
    accuracy = (found["accuracy"].double() * found["counts"]).sum(1).round().tolist()
    assert run.best_step == found.steps.tolist()[accuracy.index(max(accuracy))]
    assert run.checkpoints == ("last", "best")
    for checkpoint, step in (("last", 6), ("best", run.best_step)):
        model = run.model(checkpoint)
        assert all(torch.equal(value, kept[step][name]) for name, value in model.state_dict().items())
        assert run.test(checkpoint).hits.tolist() == measure_accuracy(model, testing).hits.tolist()
    # Of equals, too.
    accuracy = torch.tensor([[0.5, 0.0], [0.5, 1.0], [1.0, 0.5], [0.0, 1.0]])
    constants = {"counts": Column(torch.tensor([2, 2]), ("hop",))}
    records = Records(torch.tensor([0, 50, 100, 150]), {"accuracy": accuracy}, {"accuracy": ("hop",)}, constants)
    assert best_step(records) == 50


def test_interrupted_between_a_record_and_its_checkpoint(tmp_path, monkeypatch):
    setup = Setup.of("number", {**OPTIONS, "threads": 1, "save_every": 2})
    whole = train_and_record(setup, out=tmp_path / "whole", scored=6, tested=12)

    def killed(records):
        if int(records.steps[-1]) == 4:
            raise KeyboardInterrupt
        return best_step(records)

    with monkeypatch.context() as patch:
        patch.setattr(study, "best_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_and_record(setup, out=tmp_path / "again", scored=6, tested=12)
    (path,) = (tmp_path / "again").iterdir()
    assert {"state.safetensors", "records.safetensors", "best.safetensors"} <= {file.name for file in path.iterdir()}
    again = train_and_record(setup, out=tmp_path / "again", scored=6, tested=12)
    assert contents(again) == contents(whole)


def test_runs_of_earlier_versions_have_the_last_checkpoint_only(whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / whole.path.name)
    run = open_run(tmp_path / whole.path.name)
    remove(run.path / "best.safetensors")
    assert run.checkpoints == ("last",)
    assert run.test().overall == whole.test().overall
    for call in (run.model, run.test):
        with pytest.raises(StoreError, match="holds the last checkpoint only"):
            call("best")
    other = RunDirectory.open(tmp_path, name="other", config={"measurement": "axes"})
    with pytest.raises(StoreError, match="not a run directory"):
        open_run(other.path)


def test_comparison_of_measurements_leaves_trainings_out(whole):
    pytest.importorskip("polars")
    from wherewhat.runs.index import open_index

    index = open_index(str(whole.path.parent))
    assert (len(index.values.collect()), index.unreadable) == (0, {})
    remove(whole.path.parent / "index.parquet")
