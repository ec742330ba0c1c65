"""End-to-end: a study too small to learn anything, run, killed, resumed and reported; identity: what is resumed ends
with the same bytes, and what cannot depend on positions does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from helpers.lab import RECIPE, killed, write_recipe
from wherewhat.errors import StoreError, TextError
from wherewhat_lab.encoding_study import study
from wherewhat_lab.encoding_study.__main__ import main
from wherewhat_lab.encoding_study.scores import score
from wherewhat_lab.encoding_study.study import open_runs, run_study
from wherewhat_lab.encoding_study.summary import summarise_run

NOPE = replace(RECIPE, encodings=("nope",))
SAME = ("config.json", "profiles.safetensors")


def test_a_study_leaves_records_and_curves_and_no_weights(encoding_study):
    out, lines = encoding_study
    assert len(lines) == 3
    assert all("recording" in line and "\n" not in line for line in lines)
    runs = open_runs(out)
    assert [run.encoding for run in runs] == ["rope", "alibi", "learned"]
    for run in runs:
        assert {file.name for file in run.path.iterdir()} - {".lock"} == {
            *SAME,
            "provenance.json",
            "complete.json",
            "parts",
        }
        assert {"seconds_training", "seconds_recording", "seconds_after"} <= set(run.details)
        records = run.records()
        assert records.steps[0] == 0
        assert records.steps[-1] == RECIPE.training.steps
        assert float(records["loss"][-1].mean()) < float(records["loss"][0].mean())
        after = run.after()
        strength = after["loss_by_strength"].values
        assert torch.equal(strength[0, :, 0], torch.tensor([0.0, 1.0]))
        longest = 1 if run.encoding == "learned" else RECIPE.after.times
        assert len(after["position"].values) == 4 * longest
    methods = {run.encoding: sum(name.startswith("loss_by_position_") for name in run.after()) for run in runs}
    assert methods == {"rope": 3, "alibi": 2, "learned": 1}
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}
    run_study(RECIPE, out=out, only=("rope:0",))
    assert before == {file: file.stat().st_mtime_ns for file in before}  # what is finished is left alone


def test_positions_do_nothing_without_an_encoding(tmp_path):
    (run,) = run_study(NOPE, out=tmp_path, keep=True)
    jitter = run.after()["loss_by_rate_position_jitter"].values
    assert float(jitter[..., 3].abs().max()) < 1e-6
    assert (run.path / "model.safetensors").exists()  # as it was asked for
    assert not (run.path / "state.safetensors").exists()
    # Studies are not mixed.
    run_study(replace(NOPE, training=replace(NOPE.training, learning_rate=1e-4)), out=tmp_path)
    with pytest.raises(StoreError, match="differ in training"):
        open_runs(tmp_path)
    with pytest.raises(StoreError, match="no finished run"):
        open_runs(tmp_path / "nothing")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _study(given, connection):
    """Run a study that tells its records, and waits for the end of its process at the third."""
    torch.set_num_threads(1)
    found = []

    def told(*arguments):
        found.append(score(*arguments))
        connection.send(len(found))
        if len(found) == 3:
            signal.pause()
        return found[-1]

    study.score = told
    main(given)


@pytest.mark.usefixtures("one_thread")
def test_killed_and_resumed_ends_with_the_same_bytes(tmp_path, capsys, processes):
    recipe = write_recipe(tmp_path / "recipe.toml", encodings=("rope", "pope"), save_every=1)
    given = ["--recipe", str(recipe), "--only", "pope:0", "--device", "cpu", "--out"]
    ended, whole = tmp_path / "killed", tmp_path / "whole"
    killed(processes, _study, [*given, str(ended)], after=3)
    assert not list(ended.glob("*/complete.json"))
    assert main([*given, str(ended)]) == main([*given, str(whole)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (one,), (other,) = open_runs(ended), open_runs(whole)
    assert one.path.name == other.path.name
    assert one.details["resumed_after_step"] is not None
    for name in SAME:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_errors_are_one_line_and_leave_nothing_behind(tmp_path, capsys):
    text, out = tmp_path / "short.txt", tmp_path / "out"
    assert main(["--only", "rop", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "wherewhat: there is no encoding 'rop': did you mean 'rope'?\n"
    text.write_text("too short to hold anything out " * 20)
    with pytest.raises(TextError, match="held-out bytes are fewer"):
        run_study(RECIPE, out=out, text=text)
    assert not out.exists()


def test_the_report(encoding_study, cli):
    out, _ = encoding_study
    shown = cli("encodings", "report", out)
    assert shown.code == 0, shown.err
    for word in ("half of the change", "results at the end of training", "rank correlation", "learned"):
        assert word in shown.out
    page = (out / "report.html").read_text("utf-8")
    assert "{{" not in page.partition("<script")[0]
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert [one["name"] for one in data["encodings"]] == ["rope", "alibi", "learned"]
    assert data["encodings"][2]["lengths"]["methods"].keys() == {"none"}
    assert sum(file.stat().st_size for file in out.glob("*/*")) < 100_000

    import pyarrow.parquet as pq

    records = pq.read_table(out / "records.parquet").to_pylist()
    run = open_runs(out)[0]
    wanted = next(
        row
        for row in records
        if (row["encoding"], row["metric"], row["step"], row["layer"], row["head"]) == ("rope", "r", 20, 1, 0)
    )
    assert wanted["value"] == float(run.records()["r"][-1, 1, 0])
    curves = pq.read_table(out / "curves.parquet").to_pylist()
    assert {row["curve"] for row in curves if row["encoding"] == "alibi"} == set(open_runs(out)[1].after())


def test_summaries(encoding_study):
    out, _ = encoding_study
    rope, alibi, learned = (summarise_run(run) for run in open_runs(out))
    assert rope.best_method in ("none", "sliding-window", "yarn")
    assert learned.best_method == ""
    assert "rise_length" not in learned.ends
    assert 0 < rope.half["loss"] < RECIPE.training.steps
    assert alibi.ends["rise_words"].n == RECIPE.after.perturb_documents


def test_the_command_runs_a_recipe(cli, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.toml", encodings=("rope", "partial"), steps=4)
    text = tmp_path / "text.txt"
    text.write_bytes(b"where and what are not the same thing, " * 500)
    shown = cli("encodings", "run", "--recipe", recipe, "--text", text, "--only", "partial:0", "--device", "cpu")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("partial seed 0: loss")
    assert shown.err == ""
    wrong = cli("encodings", "run", "--recipe", tmp_path / "no.toml")
    assert wrong.code == 2
    assert len(wrong.err.strip().splitlines()) == 1


@pytest.mark.slow
def test_it_runs_without_the_packages_of_tables_and_pages(tmp_path):
    recipe = write_recipe(tmp_path / "recipe.toml", encodings=("rope", "nope"), steps=3)
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pyarrow', 'typer', 'plotly', 'rich', 'polars', 'gguf', 'platformdirs')))\n"
        "from wherewhat_lab.encoding_study.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    given = ["--recipe", str(recipe), "--only", "nope:0", "--device", "cpu", "--out", str(tmp_path)]
    command = [sys.executable, "-c", script, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = open_runs(tmp_path)
    assert not (run.path / "scores.parquet").exists()
