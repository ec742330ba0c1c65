"""Identity: a run that was interrupted, or has lost a file, ends with the same results; errors: unfinished runs."""

from __future__ import annotations

import pytest

from wherewhat.errors import StoreError
from wherewhat.files import remove
from wherewhat.lab.multihop import study
from wherewhat.lab.multihop.study import Setup, measure_lengths, open_run, train_and_record
from wherewhat.runs.directory import RunDirectory

OPTIONS = {"layers": 2, "heads": 2, "width": 16, "steps": 6, "record_every": 2, "batch": 4, "sequences": 800}
SETUP = Setup.of("number", {**OPTIONS, "threads": 1})
FILES = ("config.json", "profiles.safetensors")


def contents(run):
    weights = {name: value.tolist() for name, value in run.model().state_dict().items()}
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


@pytest.mark.parametrize("lost", [("model.safetensors",), ("profiles.safetensors",), ("parts", "profiles.safetensors")])
def test_what_was_lost_is_made_again(whole, tmp_path, lost):
    run = train_and_record(SETUP, out=tmp_path, scored=6, tested=12)
    for name in lost:
        remove(run.path / name)
    with pytest.raises(StoreError, match="missing or damaged"):
        open_run(run.path)
    assert contents(train_and_record(SETUP, out=tmp_path, scored=6, tested=12)) == contents(whole)


def test_lengths_are_measured_once(whole, monkeypatch):
    first = measure_lengths(whole, (17, 20), count=8)
    monkeypatch.setattr(study, "accuracy_by_length", None)
    again = measure_lengths(open_run(whole.path), (20, 17), count=8)
    assert list(again) == [20, 17]
    assert all(again[n].hits.tolist() == first[n].hits.tolist() for n in (17, 20))


def test_other_runs_are_refused(tmp_path):
    run = RunDirectory.open(tmp_path, name="other", config={"measurement": "axes"})
    with pytest.raises(StoreError, match="not a run directory"):
        open_run(run.path)


def test_comparison_of_measurements_leaves_trainings_out(whole):
    pytest.importorskip("polars")
    from wherewhat.runs.index import open_index

    index = open_index(str(whole.path.parent))
    assert (index.runs, index.unreadable) == (0, {})
    remove(whole.path.parent / "index.parquet")
