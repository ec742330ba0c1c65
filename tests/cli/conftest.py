"""A tiny model and text on disk, and the command line called in this process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from models.conftest import save_model
from wherewhat.cli.main import run_cli


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capfd, monkeypatch, tmp_path):
    """Call ``wherewhat`` with arguments; its terminal is 100 columns wide and no terminal at all."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments) -> Outcome:
        capfd.readouterr()
        code = run_cli([str(a) for a in arguments])
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a two-layer Llama with 32 positions and ten words."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def text(tmp_path):
    """A file with one document of 30 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on a mat and the dog ran " * 3)
    return path
