"""A finished study, made once."""

from __future__ import annotations

import pytest

from cli.conftest import cli  # noqa: F401 - a fixture
from lab.encoding_study.tiny import RECIPE
from wherewhat.lab.encoding_study.study import run_study


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """Folder with finished runs of three encodings, and the lines that were told of them."""
    out, lines = tmp_path_factory.mktemp("study"), []
    run_study(RECIPE, out=out, finished=lines.append)
    return out, lines
