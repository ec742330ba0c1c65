"""End-to-end: a report killed at ten random moments and run again ends with the same scores, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import wherewhat
from helpers.report import TOKENS

# Importing takes longer than measuring a tiny model, so one process imports everything and its children are killed.
SCRIPT = """
import os, random, signal, sys, time
import plotly.offline, pyarrow.parquet, transformers
from transformers.models.llama import modeling_llama
from wherewhat.cli.main import run_cli
import wherewhat.report

draw, killed = random.Random(7), 0
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(run_cli(sys.argv[1:]))
    time.sleep(draw.uniform(0.05, 1.5))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed += os.WIFSIGNALED(status)
sys.stderr.write(f"{killed} killed")
sys.exit(run_cli(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_killed_at_ten_random_moments(made, hostile_model, tmp_path):
    out = tmp_path / "runs"
    words = ["report", hostile_model, "--text", made.text, "--tokens", TOKENS, "--out", out, "--device", "cpu"]
    source = str(Path(wherewhat.__file__).parents[1])
    surroundings = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "WHEREWHAT_CACHE": str(tmp_path / "c")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split(" killed")[0].split()[-1]) >= 1
    for run in made.report.data["models"][0]["runs"]:
        whole = (made.out / run["name"] / "scores.parquet").read_bytes()
        assert (out / run["name"] / "scores.parquet").read_bytes() == whole
    assert Path(done.stdout.splitlines()[-1]).name == made.path.name
