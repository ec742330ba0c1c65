"""End-to-end: real processes whose output goes somewhere odd, or that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import command_process
from helpers.models import llama_config, save_model
from wherewhat.cli import main
from wherewhat.cli.main import run_cli


@pytest.fixture(scope="module")
def attention(tmp_path_factory) -> list[str]:
    """A command that prints a table with ± of a tiny model; what it measures is there already.

    Its texts are so long that they are measured one at a time.
    """
    folder = tmp_path_factory.mktemp("terminals")
    model = save_model(folder / "tiny", llama_config(max_position_embeddings=256))
    texts = [folder / f"{name}.txt" for name in ("one", "two")]
    for index, text in enumerate(texts):
        text.write_text("the cat sat on a mat and the dog ran " * (20 + index))
    given = [word for text in texts for word in ("--text", str(text))]
    command = ["attention", str(model), "--tokens", "160", "--no-control", "--out", str(folder / "out"), *given]
    assert run_cli(command) == 0
    return command


@pytest.mark.slow
def test_a_terminal_that_cannot_show_everything_shows_the_numbers(attention):
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "wherewhat", *attention]
    done = subprocess.run(command, capture_output=True, env=ascii_only, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"entropy" in done.stdout
    assert b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(attention, processes, tmp_path):
    process = command_process(processes, attention, out=None, err=tmp_path / "err")
    process.join(timeout=120)
    assert process.exitcode == 0
    assert (tmp_path / "err").read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_on_a_full_disk_is_one_line(attention, processes, tmp_path):
    process = command_process(processes, attention, out="/dev/full", err=tmp_path / "err")
    process.join(timeout=120)
    assert process.exitcode == 2
    error = (tmp_path / "err").read_bytes()
    assert error.count(b"\n") == 1
    assert b"could not be written" in error


def test_interrupted_while_it_measures(attention, processes, tmp_path):
    out = tmp_path / "interrupted"
    arguments = [*attention, "--out", str(out)]
    stop = ([1], signal.SIGINT)
    process = command_process(processes, arguments, out=os.devnull, err=tmp_path / "err", signal_at=stop)
    process.join(timeout=120)
    assert process.exitcode == 130
    error = (tmp_path / "err").read_text()
    assert error.splitlines()[-1].endswith("interrupted; the same command resumes the work")
    assert "Traceback" not in error
    assert list(out.iterdir())


def test_a_first_line_comes_before_torch_is_imported(monkeypatch):
    said = []
    monkeypatch.setattr(main.TerminalProgress, "say", lambda _, line: said.append(line))
    for arguments in (["heads", "none"], ["head", "none", "L0H0"], ["check", "none"], ["heads", "--help"], ["compare"]):
        main._say_start(arguments)
    assert said == ["wherewhat heads: starting", "wherewhat head: starting", "wherewhat check: starting"]
