"""Identity: the command a page gives, read by the command line, asks for the same report."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

import wherewhat.report.report
from wherewhat.cli.main import run_cli
from wherewhat.errors import ConfigError
from wherewhat.report.measurements import GivenText
from wherewhat.report.report import _command
from wherewhat.runs.request import ModelRequest

EVERYTHING = {
    "seed": 3,
    "device": "cpu",
    "dtype": "bfloat16",
    "device_map": "auto",
    "offline": True,
    "trust_remote_code": True,
    "revision": "step1",
    "attn_implementation": "eager",
}
MODELS = [
    [ModelRequest(model=Path("a b"))],
    [ModelRequest(model=name, weights=kind) for name in "ab" for kind in ("trained", "random")],
    [ModelRequest(model=name, **EVERYTHING) for name in "ab"],
]


def command(models):
    return _command(models, GivenText(("t.txt",), []), documents=2, tokens=64, quick=False, training=[Path("study")])


def test_command_line_reads_what_the_page_gives(monkeypatch):
    assert {*EVERYTHING, "model", "weights"} == {field.name for field in fields(ModelRequest)}
    asked = []

    def make_report(requests, **options):
        asked.append((requests, options))
        raise ConfigError("enough")

    monkeypatch.setattr(wherewhat.report.report, "make_report", make_report)
    for models in MODELS:
        asked.clear()
        assert run_cli(shlex.split(command(models))[1:]) == 2
        ((requests, options),) = asked
        assert [str(one.model) for one in requests] == [str(one.model) for one in models]
        assert [vars(one) | {"model": ""} for one in requests] == [vars(one) | {"model": ""} for one in models]
        assert (options["files"], options["documents"], options["tokens"]) == (("t.txt",), 2, 64)
        assert options["training"] == (Path("study"),)


def test_what_the_command_line_cannot_say_has_no_command():
    for models in (
        [ModelRequest(model="a"), ModelRequest(model="b", weights="random")],
        [ModelRequest(model="a"), ModelRequest(model="b", revision="step1")],
        [ModelRequest(model="a", weights=kind) for kind in ("trained", "random")] + [ModelRequest(model="b")],
    ):
        assert command(models) is None, models
