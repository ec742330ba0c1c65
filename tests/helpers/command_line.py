"""The outcome of a call of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def assert_one_line(outcome, *words):
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("wherewhat: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for word in words:
        assert word in outcome.err, outcome.err
