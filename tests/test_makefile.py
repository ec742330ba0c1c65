"""Identity: what `make` installs for a report and for tests, and with which program."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def commands(target, venv, **variables):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "UV")}
    given = [f"{name}={value}" for name, value in variables.items()]
    line = ["make", "-n", target, f"VENV={venv}", *given]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_report_installs_no_tools(tmp_path):
    report, test = (commands(target, tmp_path / "venv", UV="") for target in ("report", "test"))
    for steps in (report, test):
        assert "pip install --quiet --quiet --disable-pip-version-check -c constraints.txt torch" in steps
        assert "1.5 GB" in steps.split("-m venv")[0]
    assert "[dev]" not in report
    assert test.index("-e .\n") < test.index("-e '.[dev]'") < test.index("-m pytest")


def test_uv_is_used_where_it_is_installed(tmp_path):
    steps = commands("test", tmp_path / "venv", UV="/opt/uv")
    assert " -m pip " not in steps
    assert steps.count("/opt/uv pip install") == 4
