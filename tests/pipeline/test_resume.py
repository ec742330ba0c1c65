"""End-to-end: killed at any moment, the same command goes on and ends with the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.conftest import save_model

DOCUMENTS = 6


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("resume")
    model = save_model(folder / "tiny")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "."]
    generator = random.Random(0)
    arguments = [sys.executable, "-m", "wherewhat", "attention", str(model), "--tokens", "24", "--no-control"]
    for index in range(DOCUMENTS):
        path = folder / f"text{index}.txt"
        path.write_text(" ".join(generator.choices(words, k=40)))
        arguments += ["--text", str(path)]
    return arguments


def finish(command: list[str], out: Path) -> dict[str, bytes]:
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, timeout=120)
    (folder,) = out.iterdir()
    return {name: (folder / name).read_bytes() for name in ("scores.parquet", "profiles.safetensors", "config.json")}


@pytest.fixture(scope="module")
def expected(command, tmp_path_factory) -> dict[str, bytes]:
    return finish(command, tmp_path_factory.mktemp("whole"))


def test_killed_and_resumed_gives_the_same_bytes(command, expected, tmp_path):
    out = tmp_path / "killed"
    generator = random.Random(1)
    kills = 0
    for _ in range(3):
        process = subprocess.Popen(
            [*command, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Wait until it writes, then kill it somewhere in the middle of that.
        while process.poll() is None and not list(out.glob("*/parts/*")):
            time.sleep(0.002)
        time.sleep(generator.random() * 0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills
    assert finish(command, out) == expected


def test_same_command_twice_at_once(command, expected, tmp_path):
    out = tmp_path / "both"
    arguments = [*command, "--out", str(out)]
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen(arguments, stdout=quiet, stderr=quiet) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert finish(command, out) == expected
