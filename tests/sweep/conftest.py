"""A tiny model with checkpoints, texts, sweep files, and one Ray cluster of two workers for all tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cli.conftest import cli  # noqa: F401 - a fixture
from models.conftest import llama_config, save_model
from wherewhat.sweep.file import SweepFile, read_sweep_file


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    save_model(folder / "tiny")
    save_model(folder / "grown/step-9")
    save_model(folder / "grown/step-10", llama_config(hidden_size=32))
    (folder / "a.txt").write_text("the cat sat on a mat and the dog ran " * 3)
    (folder / "b.txt").write_text("a dog and a cat ran on the mat . " * 4)
    return folder


@pytest.fixture
def sweep_file(tmp_path, home, monkeypatch):
    """Write a sweep file beside the models and read it."""
    monkeypatch.chdir(home)

    def write(values, name="sweep.json") -> SweepFile:
        path = tmp_path / name
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return read_sweep_file(path)

    return write


@pytest.fixture(scope="session")
def ray_cluster():
    """Two workers with one CPU each."""
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    # Workers find the tests' own modules where this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # Ray starts its workers at the lowest priority, where they would wait for all other tests.
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=2, _system_config={"worker_niceness": 0}, **quiet)
    yield ray
    ray.shutdown()
