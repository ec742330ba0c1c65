"""Brute force: group means, intervals and trends equal those computed by hand; the index changes none of them."""

import json
import os
import shutil
import statistics

import pytest
from scipy.stats import t as student

from helpers.runs import finished
from wherewhat.errors import ConfigError, LoadError, StoreError

pl = pytest.importorskip("polars")

from wherewhat.runs.comparison import compare  # noqa: E402 - only where polars is
from wherewhat.runs.index import INDEX, open_index  # noqa: E402

STEPS = {"step1": 1, "step10": 10, "step100": 100}


def reach(values):
    n = len(values)
    return float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5


def only(table, **wanted):
    for name, value in wanted.items():
        table = table.filter(pl.col(name) == value)
    assert len(table) == 1
    return table.row(0, named=True)


def test_one_run_has_its_interval_over_documents(tmp_path):
    finished(tmp_path / "one", {"a": 0.5})
    row = only(compare([tmp_path / "one"]).groups, metric="r")
    assert (row["mean"], row["low"], row["high"], row["n"]) == (0.5, None, None, 1)
    finished(tmp_path / "three", {"a": 0.5, "b": 0.7, "c": 0.9})
    found = compare([tmp_path / "three"])
    row = only(found.groups, metric="r")
    assert (found.by, found.runs) == (("model", "weights"), 1)
    assert (row["n"], row["over"], row["runs"]) == (3, "document", 1)
    assert row["mean"] == pytest.approx(0.7)
    assert row["high"] - row["mean"] == pytest.approx(reach([0.5, 0.7, 0.9]))
    assert row["mean"] - row["low"] == pytest.approx(reach([0.5, 0.7, 0.9]))


def test_several_runs_of_a_model_have_it_over_runs(tmp_path):
    for seed, value in enumerate((0.2, 0.4, 0.9)):
        finished(tmp_path, {"a": value - 0.1, "b": value + 0.1}, seed=seed, weights="random")
    row = only(compare([tmp_path]).groups, metric="r", weights="random")
    assert (row["n"], row["over"]) == (3, "run")
    assert row["high"] - row["mean"] == pytest.approx(reach([0.2, 0.4, 0.9]))


def test_several_models_have_it_over_models_each_counted_once(tmp_path):
    finished(tmp_path, {"a": 0.2}, model="x-1m")
    finished(tmp_path, {"a": 0.6}, model="x-1m", seed=1)
    finished(tmp_path, {"a": 0.8}, model="y-1m")
    row = only(compare([tmp_path], by=["weights"]).groups, metric="r")
    assert (row["n"], row["over"], row["runs"]) == (2, "model", 3)
    assert row["mean"] == pytest.approx((0.4 + 0.8) / 2)
    assert row["high"] - row["mean"] == pytest.approx(reach([0.4, 0.8]))


def test_numbers_over_all_documents_together_do_not_count_twice(tmp_path):
    finished(tmp_path, {"a": 0.2, "b": 0.4, None: 9.0})
    finished(tmp_path, {None: 3.0}, metric="r_shared")
    groups = compare([tmp_path], metrics=["r", "r_shared"]).groups
    assert only(groups, metric="r")["mean"] == pytest.approx(0.3)
    assert only(groups, metric="r_shared")["mean"] == pytest.approx(3.0)


def test_trend_along_steps_has_a_slope_for_each_document(tmp_path):
    slopes = {"a": 0.1, "b": 0.3, "c": 0.2}
    for name, step in STEPS.items():
        exponent = {1: 0, 10: 1, 100: 2}[step]
        values = {document: 0.1 * i + slope * exponent for i, (document, slope) in enumerate(slopes.items())}
        finished(tmp_path, values, extra={"checkpoint": name})
    found = compare([tmp_path])
    assert found.by == ("model", "weights", "step")
    assert found.groups["step"].to_list() == [1, 10, 100]
    row = only(found.trends, metric="r")
    assert (row["along"], row["n"], row["over"], row["points"]) == ("step", 3, "document", 3)
    assert row["slope"] == pytest.approx(0.2)
    assert row["high"] - row["slope"] == pytest.approx(reach([0.1, 0.2, 0.3]))
    assert row["last"] - row["first"] == pytest.approx(0.4)


def test_trend_along_sizes_and_over_several_models(tmp_path):
    for model, value in (("p-1m", 0.2), ("p-10m", 0.5), ("p-100m", 0.8)):
        finished(tmp_path / "sizes", {"a": value, "b": value + 0.1}, model=model)
    found = compare([tmp_path / "sizes"], by=["size"])
    assert only(found.trends, metric="r")["slope"] == pytest.approx(0.3)
    assert found.groups["size"].to_list() == [10**6, 10**7, 10**8]
    for model, slope in (("x", 0.1), ("y", 0.5)):
        for name, step in STEPS.items():
            values = {document: slope * len(str(step)) for document in ("a", "b")}
            finished(tmp_path / "steps", values, model=model, extra={"checkpoint": name})
    row = only(compare([tmp_path / "steps"], by=["step"]).trends, metric="r")
    assert (row["n"], row["over"]) == (2, "model")
    assert row["slope"] == pytest.approx(0.3)
    assert row["high"] - row["slope"] == pytest.approx(reach([0.1, 0.5]))


def test_encoding_weights_and_conditions(tmp_path):
    finished(tmp_path, {"a": 0.9}, extra={"encoding": "rope"})
    finished(tmp_path, {"a": 0.1}, model="b", extra={"encoding": "bias"})
    finished(tmp_path, {"a": 0.5}, weights="random", extra={"encoding": "rope"})
    groups = compare([tmp_path], by=["encoding"], where={"weights": "trained"}).groups
    assert dict(zip(groups["encoding"], groups["mean"], strict=True)) == pytest.approx({"bias": 0.1, "rope": 0.9})
    assert compare([tmp_path], where={"seed": "0"}).runs == 3


def test_the_index_follows_the_store(tmp_path):
    first = finished(tmp_path, {"a": 0.5})
    assert open_index(str(tmp_path)).values.collect()["run"].n_unique() == 1
    stamp = (tmp_path / INDEX).stat().st_mtime_ns
    assert compare([tmp_path]).runs == 1
    assert (tmp_path / INDEX).stat().st_mtime_ns == stamp  # nothing new: not written again
    finished(tmp_path, {"a": 0.7}, weights="random")
    groups = compare([tmp_path]).groups
    assert dict(zip(groups["weights"], groups["mean"], strict=True)) == pytest.approx({"trained": 0.5, "random": 0.7})
    shutil.rmtree(first.path)
    assert compare([tmp_path]).groups["weights"].to_list() == ["random"]


def test_an_index_that_cannot_be_used_is_made_again(tmp_path, monkeypatch):
    from wherewhat.runs.storage import Folder

    finished(tmp_path, {"a": 0.5, "b": 0.7})
    expected = compare([tmp_path]).groups
    for damage in (b"", b"PAR1 nonsense", None, "foreign"):
        if damage == "foreign":
            pl.DataFrame({"run": ["x"]}).write_parquet(tmp_path / INDEX)
        elif damage is not None:
            (tmp_path / INDEX).write_bytes(damage)
        else:
            (tmp_path / INDEX).unlink()
        assert compare([tmp_path]).groups.equals(expected), damage

    def refuse(*_):
        raise StoreError("read-only")

    (tmp_path / INDEX).unlink()
    monkeypatch.setattr(Folder, "write", refuse)
    assert compare([tmp_path]).groups.equals(expected)
    assert not (tmp_path / INDEX).exists()


def test_only_runs_that_can_be_read_count_and_each_once(tmp_path):
    store, copy = tmp_path / "store", tmp_path / "copy"
    finished(store, {"a": 0.5, "b": 0.7})
    (finished(store, {"a": 0.7}, seed=9).path / "complete.json").unlink()
    (store / "sweeps" / "0123").mkdir(parents=True)
    (store / "notes.txt").write_text("x")
    bad = {}
    for seed, name in enumerate(("scores.parquet", "config.json", "provenance.json")):
        path = finished(store, {"a": 0.7}, weights="random", seed=seed).path
        (path / name).write_bytes(b"damage")
        bad[path.name] = name
    found = compare([store])
    assert (found.runs, found.groups["weights"].to_list()) == (1, ["trained"])
    assert found.unreadable.keys() == bad.keys()
    assert all(name in found.unreadable[run] for run, name in bad.items())
    shutil.copytree(store, copy)
    finished(copy, {"a": 0.7}, model="other")
    assert compare([store, copy, store]).runs == 2
    if hasattr(os, "mkfifo"):
        for name in ("scores.parquet", "config.json"):
            path = finished(store, {"a": 0.7}, seed=7).path
            (path / name).unlink()
            os.mkfifo(path / name)
            (store / INDEX).unlink()
            assert compare([store]).unreadable.keys() == {*bad, path.name}, name
            shutil.rmtree(path)


def test_a_store_behind_an_address(tmp_path):
    pytest.importorskip("fsspec")
    finished(tmp_path / "s", {"a": 0.5, "b": 0.7})
    address = f"file://{tmp_path / 's'}"
    expected = compare([address]).groups
    assert (tmp_path / "s" / INDEX).is_file()
    assert compare([address]).groups.equals(expected)
    assert only(expected, metric="r")["mean"] == pytest.approx(0.6)


def test_wrong_questions_are_answered_in_one_line(tmp_path, subtests):
    finished(tmp_path / "runs", {"a": 0.5})
    (tmp_path / "empty").mkdir()
    for options, error, line in (
        ({"by": ["modle"]}, ConfigError, "did you mean 'model'"),
        ({"where": {"weihgts": "random"}}, ConfigError, "did you mean 'weights'"),
        ({"where": {"step": "many"}}, ConfigError, "step is a number"),
        ({"where": {"step": "--5"}}, ConfigError, "is a number"),
        ({"where": {"step": "9" * 30}}, ConfigError, "from -2"),
        ({"where": {"seed": "9" * 5000}}, ConfigError, "is a number"),
        ({"where": {"model": "nobody"}}, StoreError, "no finished run that fits --where"),
        ({"metrics": ["rr"]}, ConfigError, "no run holds the metric 'rr'"),
        ({"stores": [tmp_path / "nowhere"]}, StoreError, "there is no store at"),
        ({"stores": [tmp_path / "empty"]}, StoreError, "no finished run"),
        ({"stores": []}, ConfigError, "nothing to compare"),
        *(({"stores": [name]}, ConfigError, None) for name in ("", "~nosuchuser/x", "x" * 300, "a\0b")),
    ):
        with subtests.test(options=str(options)[:80]):
            with pytest.raises(error, match=line) as raised:
                compare(options.pop("stores", [tmp_path / "runs"]), **options)
            assert "\n" not in str(raised.value)


def test_without_polars_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "polars", None)
    with pytest.raises(LoadError, match=r"pip install 'wherewhat\[compare\]'"):
        compare([tmp_path])


def test_the_page_holds_names_as_data_only(tmp_path):
    from wherewhat.report.page import comparison_page

    finished(tmp_path, {"a": 0.5, "b": 0.6}, model="</script><b>bold", extra={"checkpoint": "step1"})
    finished(tmp_path, {"a": 0.7, "b": 0.6}, model="</script><b>bold", extra={"checkpoint": "step10"})
    text = comparison_page(compare([tmp_path]))
    assert "<b>bold" not in text
    assert "Content-Security-Policy" in text
    assert "<noscript>" in text
    start = text.index('id="data">') + len('id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert data["along"] == "step"
    section = next(s for s in data["sections"] if s["metric"] == "r")
    assert section["title"] == "r"
    assert [row["step"] for row in section["groups"]] == [1, 10]
    assert len(section["trends"]) == 1


def test_facts_of_any_size(tmp_path):
    run = finished(tmp_path, {"a": 0.5}, model=f"step{'9' * 90}", extra={"parameters": 2**90})
    (run.path / "config.json").write_text(json.dumps({**run.config, "seed": 2**80, "tokens": -(2**80)}))
    row = only(compare([tmp_path], by=["seed", "step", "size", "tokens"]).groups, metric="r")
    assert [row[name] for name in ("seed", "step", "size", "tokens")] == [None] * 4
