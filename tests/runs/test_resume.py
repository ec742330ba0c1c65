"""End-to-end: killed at any moment, the same command goes on and ends with the same bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.models import save_model
from wherewhat.cli.main import run_cli

DOCUMENTS = 6


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("resume")
    model = save_model(folder / "tiny")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "."]
    generator = random.Random(0)
    arguments = ["attention", str(model), "--tokens", "24", "--no-control"]
    for index in range(DOCUMENTS):
        path = folder / f"text{index}.txt"
        path.write_text(" ".join(generator.choices(words, k=40)))
        arguments += ["--text", str(path)]
    return arguments


def work(arguments: list[str]) -> None:
    """A process of its own."""
    sys.exit(run_cli(arguments))


def finish(command: list[str], out: Path) -> dict[str, bytes]:
    assert run_cli([*command, "--out", str(out)]) == 0
    return written(out)


def written(out: Path) -> dict[str, bytes]:
    (folder,) = (path for path in out.iterdir() if not path.name.startswith("."))
    return {name: (folder / name).read_bytes() for name in ("scores.parquet", "profiles.safetensors", "config.json")}


@pytest.fixture(scope="module")
def expected(command, tmp_path_factory) -> dict[str, bytes]:
    """What a process leaves that was started as a user does."""
    out = tmp_path_factory.mktemp("whole")
    process = [sys.executable, "-m", "wherewhat", *command, "--out", str(out)]
    subprocess.run(process, check=True, capture_output=True, timeout=120)
    return written(out)


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_bytes(command, expected, tmp_path, processes):
    out = tmp_path / "killed"
    generator = random.Random(1)
    kills = 0
    for _ in range(3):
        process = processes.Process(target=work, args=([*command, "--out", str(out)],))
        process.start()
        # Wait until it writes, then kill it somewhere in the middle of that.
        while process.is_alive() and not list(out.glob("*/parts/*")):
            time.sleep(0.002)
        time.sleep(generator.random() * 0.05)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills
    assert finish(command, out) == expected


@pytest.mark.slow
def test_same_command_twice_at_once(command, expected, tmp_path, processes):
    out = tmp_path / "both"
    both = [processes.Process(target=work, args=([*command, "--out", str(out)],)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=120)
    assert [process.exitcode for process in both] == [0, 0]
    assert finish(command, out) == expected
