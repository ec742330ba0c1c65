"""Identity: the command a page gives, read by the command line, asks for the same report."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

import pytest

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
MODELS = {
    "one": [ModelRequest(model=Path("a b"))],
    "twins": [ModelRequest(model=name, weights=kind) for name in "ab" for kind in ("trained", "random")],
    "options": [ModelRequest(model=name, **EVERYTHING) for name in "ab"],
}


def command(models):
    return _command(models, GivenText(("t.txt",), []), documents=2, tokens=64, training=[Path("study")])


def test_every_option_is_tried():
    assert {*EVERYTHING, "model", "weights"} == {field.name for field in fields(ModelRequest)}


@pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)
def test_command_line_reads_what_the_page_gives(models, monkeypatch):
    asked = []

    def make_report(requests, **options):
        asked.append((requests, options))
        raise ConfigError("enough")

    monkeypatch.setattr(wherewhat.report.report, "make_report", make_report)
    assert run_cli(shlex.split(command(models))[1:]) == 2
    ((requests, options),) = asked
    assert [str(one.model) for one in requests] == [str(one.model) for one in models]
    assert [vars(one) | {"model": ""} for one in requests] == [vars(one) | {"model": ""} for one in models]
    assert (options["text"], options["documents"], options["tokens"]) == (("t.txt",), 2, 64)
    assert options["training"] == (Path("study"),)


@pytest.mark.parametrize(
    "models",
    [
        [ModelRequest(model="a"), ModelRequest(model="b", weights="random")],
        [ModelRequest(model="a"), ModelRequest(model="b", revision="step1")],
        [ModelRequest(model="a", weights=kind) for kind in ("trained", "random")] + [ModelRequest(model="b")],
    ],
)
def test_what_the_command_line_cannot_say_has_no_command(models):
    assert command(models) is None
