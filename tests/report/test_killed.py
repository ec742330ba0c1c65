"""End-to-end: a report that is killed and run again by the same command ends with the same scores, byte for byte.

The process kills itself before it measures a given text, so that the moment does not depend on the machine.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.command_line import command_process
from helpers.report import TOKENS


@pytest.fixture
def words(made, hostile_model, tmp_path):
    """The command of the report, into a folder of its own."""
    given = ("--text", made.text, "--tokens", TOKENS, "--out", tmp_path / "runs", "--device", "cpu")
    return ["report", hostile_model, *given]


def killed(words, processes, tmp_path, batch):
    """Run the command until it is about to measure a batch of texts, counted from 0 over all measurements."""
    stop = ([batch], signal.SIGKILL)
    process = command_process(processes, words, out=tmp_path / "out", err=tmp_path / "err", signal_at=stop)
    process.join()
    return process.exitcode == -signal.SIGKILL


def assert_same_report(cli, words, made, tmp_path):
    done = cli(*words)
    assert done.code == 0, done.err
    for run in made.report.data["models"][0]["runs"]:
        whole = (made.out / run["name"] / "scores.parquet").read_bytes()
        assert (tmp_path / "runs" / run["name"] / "scores.parquet").read_bytes() == whole
    assert Path(done.out.splitlines()[-1]).name == made.path.name
    assert "random is one untrained model" in " ".join(done.out.split())


def test_killed_once_between_two_measurements(made, words, cli, processes, tmp_path):
    assert killed(words, processes, tmp_path, 3)
    assert_same_report(cli, words, made, tmp_path)


@pytest.mark.slow
def test_killed_again_and_again(made, words, cli, processes, tmp_path):
    """Each time after one more batch of texts."""
    moments = [0, 0, *[1] * 5]
    assert all(killed(words, processes, tmp_path, batch) for batch in moments)
    assert_same_report(cli, words, made, tmp_path)
