"""A tiny model, a text that tries to break out of the page, and the report of both, made once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.conftest import cli  # noqa: F401 - a fixture
from models.conftest import save_model
from wherewhat.report.page import Report
from wherewhat.report.report import make_report
from wherewhat.runs.request import ModelRequest

HOSTILE = (
    "the cat <script>alert(1)</script> sat </script><img src=x onerror=alert(2)> on a {{DATA}} mat & dog "
    "🐈‍⬛ שלום \u202eran\u202c \u200bthe\u200d \u2028 cat \u2029 &lt;b&gt; <!-- a \\ ' \" `${1}` ]]> "
)
TOKENS = 28


@dataclass(frozen=True)
class Made:
    report: Report
    path: Path
    out: Path
    text: Path


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Folder of a two-layer Llama with 32 positions and ten words; its name is HTML."""
    return save_model(tmp_path_factory.mktemp("model") / "<b onclick=alert(3)>tiny")


@pytest.fixture(scope="session")
def made(model, tmp_path_factory) -> Made:
    """The report of the model on two hostile documents with a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    text = folder / "<img src=x onerror=alert(4)>.jsonl"
    lines = [{"name": f"<i>{number}", "text": HOSTILE * (3 + number)} for number in range(2)]
    text.write_text("\n".join(map(json.dumps, lines)))
    out = folder / "runs"
    report = make_report(ModelRequest(model=model, device="cpu"), out=out, text=[str(text)], tokens=TOKENS)
    return Made(report, report.write(out / f"{report.name}.html"), out, text)
