"""End-to-end: ``wherewhat compare`` through the real command line."""

import pytest

from helpers.runs import finished
from wherewhat.cli.main import run_cli

pl = pytest.importorskip("polars")


@pytest.fixture
def store(tmp_path):
    for step, value in (("step1", 0.2), ("step10", 0.4)):
        finished(tmp_path / "store", {"a": value, "b": value + 0.1}, extra={"checkpoint": step})
    return tmp_path / "store"


def test_tables_and_files(store, tmp_path, capsys):
    files = {name: tmp_path / "out" / f"c.{name}" for name in ("csv", "parquet", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert run_cli(["compare", str(store), *options]) == 0
    shown = capsys.readouterr().out
    assert "2 runs" in shown
    assert "0.2 (0.0 to" in shown  # Student's ± 0.64, and r is not below 0
    assert "increase per factor of ten of step" in shown
    from_csv, from_parquet = pl.read_csv(files["csv"]), pl.read_parquet(files["parquet"])
    assert from_csv["mean"].to_list() == pytest.approx([0.25, 0.45], rel=1e-9)
    assert from_csv.columns == from_parquet.columns
    assert files["html"].read_text().startswith("<!doctype html>")


def test_names_are_no_markup(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for model in ("foo[v2]", "foo[/b]"):
        for step in ("step1", "step10"):
            finished(tmp_path, {"a": 0.2}, model=model, extra={"checkpoint": step})
    assert run_cli(["compare", str(tmp_path)]) == 0
    groups, trends = capsys.readouterr().out.split("increase per factor of ten")
    for name in ("foo[v2]", "foo[/b]"):
        assert name in groups
        assert name in trends


def test_damaged_runs_are_said(store, capsys):
    (next(store.glob("axes-*")) / "scores.parquet").write_bytes(b"damage")
    assert run_cli(["compare", str(store), "--by", "model"]) == 0
    assert "left out axes-" in capsys.readouterr().err


def test_wrong_options_are_one_line(store, capsys):
    for words in (["--by", "modle"], ["--where", "step"], ["--metric", "nothing"]):
        assert run_cli(["compare", str(store), *words]) == 2, words
        assert capsys.readouterr().err.count("\n") == 1, words
