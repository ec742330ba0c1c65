"""End-to-end: a report killed at ten random moments and run again ends with the same scores, byte for byte."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from helpers.command_line import command_process
from helpers.report import TOKENS


@pytest.mark.slow
def test_killed_at_ten_random_moments(made, hostile_model, cli, processes, tmp_path):
    out = tmp_path / "runs"
    words = ["report", hostile_model, "--text", made.text, "--tokens", TOKENS, "--out", out, "--device", "cpu"]
    draw, killed = random.Random(7), 0
    for _ in range(10):
        process = command_process(processes, words, out=tmp_path / "out", err=tmp_path / "err")
        time.sleep(draw.uniform(0.05, 1.5))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed
    done = cli(*words)
    assert done.code == 0, done.err
    for run in made.report.data["models"][0]["runs"]:
        whole = (made.out / run["name"] / "scores.parquet").read_bytes()
        assert (out / run["name"] / "scores.parquet").read_bytes() == whole
    assert Path(done.out.splitlines()[-1]).name == made.path.name
