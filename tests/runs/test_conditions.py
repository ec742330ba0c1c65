"""Known answers: runs that differ in what a number depends on are compared, not averaged."""

import pytest

from helpers.runs import finished

pytest.importorskip("polars")

from wherewhat.runs.comparison import compare


def test_runs_that_differ_in_what_a_number_depends_on_are_not_averaged(tmp_path):
    for tokens, options in ((64, {"queries": 8, "skip": 0}), (128, {"queries": 8, "skip": 0})):
        finished(tmp_path, {"a": tokens / 100}, config={"tokens": tokens, "options": options})
    finished(tmp_path, {"a": 0.3}, weights="random", config={"options": {"queries": 8, "skip": 0}})
    found = compare([tmp_path], by=["model", "weights"])
    assert (found.by, found.apart) == (("model", "weights", "tokens"), ("tokens",))
    rows = {(row["weights"], row["tokens"]): row["mean"] for row in found.groups.iter_rows(named=True)}
    assert rows == pytest.approx({("random", 64): 0.3, ("trained", 64): 0.64, ("trained", 128): 1.28})
    finished(tmp_path, {"a": 0.9}, config={"options": {"queries": 1, "skip": 0}})
    found = compare([tmp_path], where={"tokens": "64", "weights": "trained"})
    assert found.apart == ("options",)
    assert sorted(found.groups["options"]) == ["queries=1", "queries=8"]
    assert compare([tmp_path], by=["run"]).apart == ()


def test_texts_are_kept_apart_within_a_model_only(tmp_path):
    finished(tmp_path, {"a": 0.2}, model="x", text="1" * 64)
    finished(tmp_path, {"a": 0.4}, model="y", text="2" * 64)
    assert compare([tmp_path]).apart == ()
    finished(tmp_path, {"a": 0.6}, model="x", text="3" * 64, config={"other": 1})
    found = compare([tmp_path], by=["model"])
    assert found.apart == ("text",)
    assert len(found.groups) == 3
