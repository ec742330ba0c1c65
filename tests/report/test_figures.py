"""End-to-end: runs of a tiny model as figures, notebook tables and files."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import shutil
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch

import wherewhat
from helpers.models import save_model
from wherewhat.errors import ConfigError, StoreError, WherewhatError
from wherewhat.measures.statistics import Interval, in_words
from wherewhat.report.data import Value
from wherewhat.report.figures import FIGURES, figure, loss_by_rate
from wherewhat.report.result import Result
from wherewhat.report.run_sections import perturbation
from wherewhat.report.views import view_of
from wherewhat.runs.results import StoredRun

CASES = {
    "axes": {},
    "heads": {"queries": 3},
    "perturb": {"kinds": ("words", "position_jitter"), "rates": (0.0, 0.1, 0.5)},
    "extend": {"methods": ("none", "sliding-window"), "trained": 12, "depths": (0,), "run": 4},
    "residual": {},
    "frequencies": {"bands": 2, "queries": 1},
}


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """One finished run of each measurement, of a model whose name is HTML."""
    folder = tmp_path_factory.mktemp("figures")
    model = save_model(folder / "<b onclick=alert(1)>tiny")
    text = folder / "text.jsonl"
    lines = [{"name": f"<i>{i}", "text": "the cat sat on a mat and the dog ran. " * (3 + i)} for i in range(2)]
    text.write_text("\n".join(map(json.dumps, lines)))
    return {
        name: wherewhat.run(
            wherewhat.Request(
                measurement=name,
                model=wherewhat.ModelRequest(model=model, device="cpu"),
                files=(str(text),),
                tokens=24,
                options=options,
            ),
            out=folder / "runs",
        )
        for name, options in CASES.items()
    }


def test_map_and_distance_curve_are_the_stored_numbers(results):
    drawn = results["axes"].plot("map", metric="r")
    means = StoredRun(results["axes"]).head_means("r")
    assert [list(row) for row in drawn.data[0].z] == [means[layer] for layer in sorted(means)]
    assert list(drawn.data[0].y) == sorted(means)
    drawn = results["axes"].plot("distance", layer=1, head=2)
    profiles = results["axes"].profiles()
    name = next(name for name in profiles if name.endswith("/1/a"))
    assert list(drawn.data[0].y) == profiles[name][2].tolist()


def test_a_run_with_default_kinds_has_a_line_for_each(results, monkeypatch):
    """The default of ``kinds`` is stored empty, and means all."""
    stored = StoredRun(results["perturb"])
    given = perturbation(stored)
    monkeypatch.setitem(stored.options, "kinds", ())
    assert {kind["id"] for kind in perturbation(stored)["kinds"]} == {kind["id"] for kind in given["kinds"]} != set()


def test_each_run_has_a_figure_of_its_own_and_every_figure_is_refused_or_drawn(results):
    assert {name: view_of(StoredRun(result).measurement).figure for name, result in results.items()} == {
        "axes": "map",
        "heads": "plane",
        "perturb": "rates",
        "extend": "positions",
        "residual": "map",
        "frequencies": "map",
    }
    for name in ("axes", "heads", "perturb", "extend"):
        assert results[name].plot().data
    for result in results.values():
        for name in FIGURES:
            with contextlib.suppress(WherewhatError):
                drawn = figure(StoredRun(result), name)
                assert drawn.layout.title.text
                assert drawn.data


def test_lines_are_means_over_documents(results):
    drawn = results["perturb"].plot("rates")
    lines = {trace.name: trace for trace in drawn.data if trace.mode == "lines+markers"}
    assert set(lines) == {"words transposed", "positions jittered"}
    profiles = results["perturb"].profiles()
    stored = [profiles[name] for name in profiles if name.endswith("loss_by_rate_words")]
    assert len(stored) == 2
    expected = [float(sum(curve[i, 1].double() for curve in stored) / 2) for i in range(len(stored[0]))]
    # Rates are stored in float32; means of two numbers are one rounding apart in any precision.
    assert list(lines["words transposed"].y) == pytest.approx(expected, rel=1e-6)
    assert list(lines["words transposed"].x) == pytest.approx([0, 10, 50], rel=1e-6)


def test_no_band_is_where_a_loss_cannot_be():
    """Two documents with losses of 0.1 and 2: Student's interval would begin below 0, and its figure ends at 0."""
    curves = [torch.tensor([[0.0, loss], [1.0, loss + 1]]) for loss in (0.1, 2.0)]
    run = SimpleNamespace(
        profiles={"a/-/loss_by_rate_words": curves[0]},
        curves=lambda name: curves,
        title="tiny",
        measurement=SimpleNamespace(name="perturb"),
    )
    low, _, line = loss_by_rate(run).data
    assert min(low.y) == 0
    assert list(line.y) == pytest.approx([1.05, 2.05], rel=1e-6)


def test_no_number_is_shown_with_an_impossible_interval(results):
    """In the terminal's table, a notebook and the page of one measurement."""
    result = results["axes"]
    for summary in result.summary():
        least, most = summary.metric.range
        for about in (summary.overall, *summary.layers.values()):
            assert about.low is None or least <= about.low <= about.mean <= about.high <= most
    assert in_words(Interval(0.9, 0.8, 1.0, 3)) == "0.90 ± 0.10"
    assert in_words(Interval(0.95, 0.8, 1.0, 3)) == "0.95 (0.80 to 1.00)"
    assert in_words(Interval(0.001, 0.0, 0.004, 3)) == "0.0010 (0.0000 to 0.0040)"
    assert Value("share", Interval(0.95, 0.8, 1.0, 3)).words == "0.95 (0.80 to 1.00)"


def test_what_is_not_there_is_said(results):
    for run, name, options, said in (
        ("axes", "mop", {}, "did you mean 'map'"),
        ("axes", "map", {"metric": "rr"}, "'rr'"),
        ("axes", "plane", {}, "give a run of heads"),
        ("heads", "distance", {}, "give a run of axes"),
        ("axes", "distance", {"layer": 9}, "layer 9"),
        ("axes", "distance", {"head": 99}, "no head 99"),
        ("axes", "rates", {}, "loss by rate"),
        ("axes", "rates", {"metric": "r"}, "no option metric"),
        ("axes", "positions", {}, "loss by position"),
    ):
        with pytest.raises(ConfigError, match=said):
            results[run].plot(name, **options)


def test_notebooks_and_plotly_are_given_no_markup_of_others(results):
    for result in results.values():
        shown = result._repr_html_()
        assert "<b onclick" not in shown
        assert "&lt;b onclick" in shown
        assert shown.count("<tr") == len(result.summary()) + 1
    drawn = [results[name].plot() for name in ("axes", "heads", "perturb", "extend")]
    drawn.append(results["axes"].plot("distance"))
    for one in drawn:
        assert "&lt;b onclick=alert(1)&gt;tiny" in one.layout.title.text
        assert "<" not in one.layout.title.text
    assert [trace.name for trace in drawn[-1].data] == ["&lt;i&gt;0", "&lt;i&gt;1"]


def test_tables_hold_all_scores(results, tmp_path):
    scores = results["axes"].scores()
    results["axes"].export(tmp_path / "new" / "scores.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "new" / "scores.parquet").equals(scores)
    with (results["axes"].export(tmp_path / "scores.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == scores.num_rows
    assert [row["metric"] for row in rows] == scores["metric"].to_pylist()
    with pytest.raises(ConfigError, match="leave out the figure"):
        results["axes"].export(tmp_path / "scores.csv", "map")
    results["heads"].export(tmp_path / "roles.parquet", "roles")
    roles = results["heads"].roles(frame="pyarrow")
    assert pyarrow.parquet.read_table(tmp_path / "roles.parquet").equals(roles)
    with pytest.raises(ConfigError, match="a run of axes has no roles"):
        results["axes"].export(tmp_path / "roles.csv", "roles")


def test_html_opens_offline(results, tmp_path):
    written = results["heads"].export(tmp_path / "plane.html").read_text()
    assert "cdn.plot.ly" not in written.replace("https://cdn.plot.ly/un/", "")
    assert "positional score" in written


def test_wrong_files_are_refused(results, tmp_path):
    with pytest.raises(ConfigError, match=r"\.png"):
        results["axes"].export(tmp_path / "figure.gif")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(StoreError, match="folder"):
        results["axes"].export(tmp_path / "folder.html")
    with pytest.raises(StoreError, match="not a run directory"):
        Result.load(tmp_path)


def test_without_kaleido_it_says_what_to_install(results, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kaleido" else found(name))
    with pytest.raises(ConfigError, match=r"wherewhat\[figures\]"):
        results["axes"].export(tmp_path / "map.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.browser
def test_pictures(results, tmp_path):
    pytest.importorskip("kaleido")
    browser = shutil.which("chromium") or shutil.which("google-chrome") or os.environ.get("BROWSER_PATH")
    if not browser:
        pytest.skip("no Chromium or Chrome is installed")
    for ending, begins in (("svg", b"<svg"), ("png", b"\x89PNG")):
        assert results["axes"].export(tmp_path / f"map.{ending}", "map").read_bytes().startswith(begins)


def test_command_line(results, tmp_path, capfd):
    from wherewhat.cli.main import run_cli

    assert run_cli(["export", str(results["axes"].path), str(tmp_path / "s.csv")]) == 0
    assert capfd.readouterr().out.strip() == str(tmp_path / "s.csv")
    assert run_cli(["export", str(results["axes"].path), str(tmp_path / "s.html"), "--figure", "plane"]) == 2
    assert run_cli(["export", str(tmp_path), str(tmp_path / "s.html")]) == 2
    assert "not a run directory" in capfd.readouterr().err
