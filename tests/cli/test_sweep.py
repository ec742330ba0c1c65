"""End-to-end: ``wherewhat sweep`` through the command line, good and bad."""

from __future__ import annotations

import json
import sys

import pytest
from rich.console import Console

from helpers.command_line import assert_one_line
from wherewhat.cli.sweep import SweepView
from wherewhat.runs.storage import Folder
from wherewhat.sweep.engine import CellTask
from wherewhat.sweep.records import Record, SweepFolder, statuses


@pytest.fixture
def path(sweep_home, tmp_path, cli):
    """A sweep file with two cells, one of which fails: its text is too short."""
    (tmp_path / "short.txt").write_text("the cat sat")
    path = tmp_path / "some.toml"
    path.write_text(f"""
        tokens = 24
        models = ["{sweep_home / "tiny"}"]
        texts = ["{sweep_home / "a.txt"}", "short.txt"]
        measurements = ["attention"]
    """)
    return path


@pytest.mark.slow
def test_a_failed_cell_is_recorded_and_does_not_stop_the_rest(cli, path, tmp_path, request):
    outcome = cli("sweep", path, "--workers", 1)
    assert outcome.code == 1
    assert outcome.err == ""
    assert "failed: attention of tiny (trained) on short: document 'short': the text has 3 tokens" in outcome.out
    assert "1 of 2 cells done, 1 failed" in outcome.out
    assert outcome.out.splitlines()[-1] == str(tmp_path / "runs")

    seen = cli("sweep", path, "--status")
    assert seen.code == 0
    assert [word.strip() for word in seen.out.splitlines()[3].split("│")[3:7]] == ["2", "1", "1", "0"]
    assert "the text has 3 tokens" in seen.out
    assert cli("sweep", "--status").out == seen.out

    (record,) = [p for p in tmp_path.glob("runs/sweeps/*/cells/*.json") if "failed" in p.read_text()]
    (done,) = [p for p in tmp_path.glob("runs/sweeps/*/cells/*.json") if p != record]
    before = done.read_bytes()
    values = json.loads(before)
    assert (tmp_path / "runs" / values["run"] / "scores.parquet").is_file()
    done.write_text(json.dumps({**values, "state": "failed", "run": None, "reason": "the power was cut"}))
    again = cli("sweep", path)
    assert again.code == 1
    assert "the power was cut" in again.out
    request.getfixturevalue("forked")
    retried = cli("sweep", path, "--retry-failed", "--workers", 1)
    assert retried.code == 1
    assert "1 of 2 cells done, 1 failed" in retried.out
    assert json.loads(done.read_text())["run"] == values["run"]


def test_wrong_words(cli, path, subtests):
    for arguments, words in (
        ((), ["FILE is missing"]),
        (("missing.toml",), ["missing.toml", "No such file"]),
        (("some.toml", "--engine", "dask"), ["dask", "local or ray"]),
        (("some.toml", "--address", "127.0.0.1:6379"), ["--engine ray"]),
        (("some.toml", "--workers", "0"), ["--workers is 0"]),
        (("some.toml", "--store", "nosuch://bucket/runs"), ["nosuch://bucket/runs"]),
        (("some.toml", "--store", "some.toml"), ["some.toml"]),
        (("some.toml", "--status"), ["has no sweep of some.toml"]),
        (("--status", "--store", "nowhere"), ["nowhere", "no sweep at all"]),
    ):
        with subtests.test(arguments=arguments):
            assert_one_line(cli("sweep", *arguments), *words)


def test_without_ray(cli, path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert_one_line(cli("sweep", path, "--engine", "ray"), "--engine ray", "pip install 'wherewhat[ray]'")
    assert not (tmp_path / "runs").exists()


def test_a_damaged_record_is_a_cell_to_be_run_again(tmp_path):
    folder = SweepFolder(Folder(tmp_path), "large")
    names = [f"attention-tiny-trained-{i:012x}" for i in range(100)]
    folder.begin({name: {"described": name} for name in names}, title="large", file_sha256="")
    (tmp_path / "sweeps/large/cells").mkdir()
    for name in names[:-1]:
        (tmp_path / f"sweeps/large/cells/{name}.json").write_text('{"state": "done", "run": "r", "seconds": 1.0}')
    (tmp_path / f"sweeps/large/cells/{names[0]}.json").write_text('{"state": "do')
    (found,) = statuses(Folder(tmp_path))
    assert found.done == 98
    assert not found.failed


@pytest.mark.usefixtures("forked")
def test_names_are_no_markup_and_cells_that_differ_only_in_options_fail_each_for_itself(cli, path, tmp_path):
    path = path.rename(tmp_path / "v[bold]2.toml")
    twice = '["attention", {measurement = "attention", set = {sink_tokens = 2}}]'
    path.write_text(path.read_text().replace('["attention"]', twice))
    outcome = cli("sweep", path, "--workers", 1)
    assert outcome.code == 1
    assert "2 of 4 cells done, 2 failed" in outcome.out
    seen = cli("sweep", path, "--status").out
    assert [word.strip() for word in seen.splitlines()[3].split("│")[3:7]] == ["4", "2", "2", "0"]
    assert seen.splitlines()[3].split("│")[1].strip() == "v[bold]2"
    assert seen.count("failed: attention of tiny") == outcome.out.count("failed: attention of tiny") == 2


def test_the_view_counts_and_tells_the_time_left(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console = Console(width=120, force_terminal=True, record=True, color_system=None)
    view = SweepView(console)
    view.planned(left=8, done=2, failed=1)
    view.begin(workers="Ray: 1 node, 2 CPUs", dashboard="http://127.0.0.1:8265")
    view.running(["axes of tiny (trained)"])
    now = 130.0
    task = CellTask(cell="c", described="heads of tiny", store="", sweep="")
    for state in ("done", "done", "failed"):
        view.finished(task, Record(state=state, reason="out of memory"))
    assert view.time_left() == pytest.approx(50.0, rel=1e-9)
    console.print(view.render())
    text = console.export_text()
    for words in ("4 of 11 done", "1 running", "2 failed", "about 50 s left", "axes of tiny (trained)"):
        assert words in text
    assert "heads of tiny: out of memory" in text
    assert "http://127.0.0.1:8265" in text
