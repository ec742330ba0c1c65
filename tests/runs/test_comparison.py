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
    values = {"a": 0.5, "b": 0.7, "c": 0.9}
    finished(tmp_path, values)
    found = compare([tmp_path])
    row = only(found.groups, metric="r")
    assert (found.by, found.runs) == (("model", "weights"), 1)
    assert (row["n"], row["over"], row["runs"]) == (3, "document", 1)
    assert row["mean"] == pytest.approx(0.7)
    assert row["high"] - row["mean"] == pytest.approx(reach([0.5, 0.7, 0.9]))
    assert row["mean"] - row["low"] == pytest.approx(reach([0.5, 0.7, 0.9]))


def test_one_document_has_no_interval(tmp_path):
    finished(tmp_path, {"a": 0.5})
    row = only(compare([tmp_path]).groups, metric="r")
    assert (row["mean"], row["low"], row["high"], row["n"]) == (0.5, None, None, 1)


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


def test_trend_over_several_models_is_over_models(tmp_path):
    for model, slope in (("x", 0.1), ("y", 0.5)):
        for name, step in STEPS.items():
            values = {document: slope * len(str(step)) for document in ("a", "b")}
            finished(tmp_path, values, model=model, extra={"checkpoint": name})
    row = only(compare([tmp_path], by=["step"]).trends, metric="r")
    assert (row["n"], row["over"]) == (2, "model")
    assert row["slope"] == pytest.approx(0.3)
    assert row["high"] - row["slope"] == pytest.approx(reach([0.1, 0.5]))


def test_trend_along_size(tmp_path):
    for model, value in (("p-1m", 0.2), ("p-10m", 0.5), ("p-100m", 0.8)):
        finished(tmp_path, {"a": value, "b": value + 0.1}, model=model)
    found = compare([tmp_path], by=["size"])
    row = only(found.trends, metric="r")
    assert row["slope"] == pytest.approx(0.3)
    assert found.groups["size"].to_list() == [10**6, 10**7, 10**8]


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


@pytest.mark.parametrize("damage", [b"", b"PAR1 nonsense", None, "foreign"])
def test_an_index_that_cannot_be_used_is_made_again(tmp_path, damage):
    finished(tmp_path, {"a": 0.5, "b": 0.7})
    expected = compare([tmp_path]).groups
    if damage is None:
        (tmp_path / INDEX).unlink()
    elif damage == "foreign":
        pl.DataFrame({"run": ["x"]}).write_parquet(tmp_path / INDEX)
    else:
        (tmp_path / INDEX).write_bytes(damage)
    assert compare([tmp_path]).groups.equals(expected)


def test_a_store_that_can_only_be_read_is_compared_all_the_same(tmp_path, monkeypatch):
    from wherewhat.runs.storage import Folder

    finished(tmp_path, {"a": 0.5})

    def refuse(*_):
        raise StoreError("read-only")

    monkeypatch.setattr(Folder, "write", refuse)
    assert compare([tmp_path]).runs == 1
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize("name", ["scores.parquet", "config.json", "provenance.json"])
def test_damaged_runs_are_left_out_and_named(tmp_path, name):
    finished(tmp_path, {"a": 0.5})
    bad = finished(tmp_path, {"a": 0.7}, weights="random")
    (bad.path / name).write_bytes(b"damage")
    found = compare([tmp_path])
    assert found.groups["weights"].to_list() == ["trained"]
    assert list(found.unreadable) == [bad.path.name]
    assert name in found.unreadable[bad.path.name]


def test_unfinished_runs_and_other_folders_are_no_runs(tmp_path):
    finished(tmp_path, {"a": 0.5})
    (finished(tmp_path, {"a": 0.7}, weights="random").path / "complete.json").unlink()
    (tmp_path / "sweeps" / "0123").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("x")
    assert compare([tmp_path]).runs == 1


def test_the_same_run_in_two_stores_counts_once(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    finished(one, {"a": 0.5})
    shutil.copytree(one, two)
    finished(two, {"a": 0.7}, model="other")
    assert compare([one, two, one]).runs == 2


def test_a_store_behind_an_address(tmp_path):
    pytest.importorskip("fsspec")
    finished(tmp_path / "s", {"a": 0.5, "b": 0.7})
    address = f"file://{tmp_path / 's'}"
    expected = compare([address]).groups
    assert (tmp_path / "s" / INDEX).is_file()
    assert compare([address]).groups.equals(expected)
    assert only(expected, metric="r")["mean"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        ({"by": ["modle"]}, ConfigError, "did you mean 'model'"),
        ({"where": {"weihgts": "random"}}, ConfigError, "did you mean 'weights'"),
        ({"where": {"step": "many"}}, ConfigError, "step is a number"),
        ({"where": {"model": "nobody"}}, StoreError, "no finished run that fits --where"),
        ({"metrics": ["rr"]}, ConfigError, "no run holds the metric 'rr'"),
    ],
)
def test_wrong_questions_are_answered_in_one_line(tmp_path, options, error, line):
    finished(tmp_path, {"a": 0.5})
    with pytest.raises(error, match=line) as raised:
        compare([tmp_path], **options)
    assert "\n" not in str(raised.value)


def test_no_store_and_an_empty_one(tmp_path):
    with pytest.raises(StoreError, match="there is no store at"):
        compare([tmp_path / "nowhere"])
    with pytest.raises(StoreError, match="no finished run"):
        compare([tmp_path])
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([])


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


@pytest.mark.slow
def test_ten_thousand_runs_in_ten_seconds(tmp_path):
    """Without an index, on whatever machine this is; with one it is a matter of reading a file."""
    import time

    files = {path.name: path.read_bytes() for path in finished(tmp_path / "one", {"a": 0.5, "b": 0.7}).path.glob("*.*")}
    provenance = json.loads(files["provenance.json"])
    store = tmp_path / "store"
    for number in range(10_000):
        folder = store / f"axes-{number:012d}"
        folder.mkdir(parents=True)
        config = json.loads(files["config.json"]) | {"seed": number // 20, "model": f"pythia-{number % 4 + 1}m"}
        extra = {"checkpoint": f"step{10 ** (number % 5)}"}
        contents = files | {
            "config.json": json.dumps(config).encode(),
            "provenance.json": json.dumps(provenance | {"extra": extra}).encode(),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    for most in (10.0, 2.0):
        started = time.process_time()  # of all threads; wall time would depend on what else the machine does
        assert compare([store]).runs == 10_000
        assert time.process_time() - started < most


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_scores_in_a_pipe_are_left_out(tmp_path):
    finished(tmp_path, {"a": 0.5})
    other = finished(tmp_path, {"a": 0.7}, seed=1)
    (other.path / "scores.parquet").unlink()
    os.mkfifo(other.path / "scores.parquet")
    found = compare([tmp_path])
    assert found.runs == 1
    assert list(found.unreadable) == [other.path.name]
    (other.path / "config.json").unlink()
    os.mkfifo(other.path / "config.json")
    (tmp_path / INDEX).unlink()
    assert list(compare([tmp_path]).unreadable) == [other.path.name]


@pytest.mark.parametrize(
    ("where", "words"),
    [({"step": "--5"}, "is a number"), ({"step": "9" * 30}, "from -2"), ({"seed": "9" * 5000}, "is a number")],
)
def test_numbers_to_filter_by(tmp_path, where, words):
    finished(tmp_path, {"a": 0.5})
    with pytest.raises(ConfigError, match=words):
        compare([tmp_path], where=where)


@pytest.mark.parametrize("store", ["", "~nosuchuser/x", "x" * 300, "a\0b"])
def test_stores_that_no_system_accepts(store):
    with pytest.raises(ConfigError):
        compare([store])


def test_facts_of_any_size(tmp_path):
    run = finished(tmp_path, {"a": 0.5}, model=f"step{'9' * 90}", extra={"parameters": 2**90})
    (run.path / "config.json").write_text(json.dumps({**run.config, "seed": 2**80, "tokens": -(2**80)}))
    row = only(compare([tmp_path], by=["seed", "step", "size", "tokens"]).groups, metric="r")
    assert [row[name] for name in ("seed", "step", "size", "tokens")] == [None] * 4
