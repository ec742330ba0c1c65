"""End-to-end: killed in the middle, the same command goes on and ends with the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.models import WORDS, llama_config, save_model
from wherewhat.cli.main import run_cli
from wherewhat.runs.directory import RunDirectory

DOCUMENTS = 4


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("resume")
    model = save_model(folder / "tiny", llama_config(max_position_embeddings=256))
    generator = random.Random(0)
    # On a CPU, longer texts than these are measured one at a time.
    arguments = ["attention", str(model), "--tokens", "200", "--no-control"]
    for index in range(DOCUMENTS):
        path = folder / f"text{index}.txt"
        path.write_text(" ".join(generator.choices(WORDS, k=220)))
        arguments += ["--text", str(path)]
    return arguments


def work(arguments: list[str], parts: int | None = None) -> None:
    """A process of its own, which is killed when it has saved some parts."""
    save, saved = RunDirectory.save, []

    def mortal(self, *given, **options):
        save(self, *given, **options)
        saved.append(given)
        if len(saved) == parts:
            os.kill(os.getpid(), signal.SIGKILL)

    RunDirectory.save = mortal
    sys.exit(run_cli(arguments))


def finish(command: list[str], out: Path) -> dict[str, bytes]:
    assert run_cli([*command, "--out", str(out)]) == 0
    (folder,) = (path for path in out.iterdir() if not path.name.startswith("."))
    return {name: (folder / name).read_bytes() for name in ("scores.parquet", "profiles.safetensors", "config.json")}


@pytest.fixture(scope="module")
def expected(command, tmp_path_factory) -> dict[str, bytes]:
    """What an undisturbed command leaves."""
    return finish(command, tmp_path_factory.mktemp("whole"))


def test_killed_and_resumed_gives_the_same_bytes(command, expected, tmp_path, processes, monkeypatch):
    process = processes.Process(target=work, args=([*command, "--out", str(tmp_path)], 2))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    save, saved = RunDirectory.save, []
    monkeypatch.setattr(RunDirectory, "save", lambda *a, **k: saved.append(a) or save(*a, **k))
    assert finish(command, tmp_path) == expected
    assert len(saved) == DOCUMENTS - 2


@pytest.mark.slow
def test_same_command_twice_at_once_and_as_a_user_starts_it(command, expected, tmp_path, processes):
    both = [processes.Process(target=work, args=([*command, "--out", str(tmp_path / "both")],)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert finish(command, tmp_path / "both") == expected
    process = [sys.executable, "-m", "wherewhat", *command, "--out", str(tmp_path / "user")]
    subprocess.run(process, check=True, capture_output=True)
    assert finish(command, tmp_path / "user") == expected
