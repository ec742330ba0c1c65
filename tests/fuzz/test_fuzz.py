"""End-to-end: hostile input of every kind works or ends in one line and exit code 2; planted faults are found."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from fuzz.cases import GENERATED, PLANTED
from fuzz.known import KNOWN
from fuzz.server import LONG_LIMIT, Server, remove

pytestmark = pytest.mark.slow

SEED = 0
CASES = {
    "command": 10, "name": 10, "file": 10, "text": 8, "model": 16, "gguf": 16, "safetensors": 12, "run": 8, "kill": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with Server() as started:
        yield started


def run(server, kind, indexes):
    """Run cases and show those that broke a promise."""
    outcomes = [server.run(kind, index, SEED, limit=LONG_LIMIT) for index in indexes]  # other tests run beside it
    broken = [str(outcome) for outcome in outcomes if outcome.problems]
    assert not broken, "\n\n".join([f"{len(broken)} of {len(outcomes)} cases:", *broken])


def test_inputs_that_broke_a_promise_once(server):
    run(server, "known", range(len(KNOWN)))


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_inputs(server, kind):
    run(server, kind, range(CASES[kind]))


FOUND = {
    "traceback": "KeyError in fuzz/calls.py _planted",
    "exit code": "exit code 3",
    "abort": "SIGABRT in fuzz/calls.py _planted",
    "control character": "control character",
    "warning": "noise",
    "memory": "memory",
    "unfinished file": "unfinished file",
    "two lines": "not one line",
    "silent use": "silent use",
}


def test_planted_faults_are_found_and_cases_repeat_exactly(server):
    assert sorted(PLANTED) == sorted([*FOUND, "process", "nothing"])
    for fault, expected in FOUND.items():
        outcome = server.run("planted", PLANTED.index(fault), SEED)
        assert [what.startswith(expected) for what, _ in outcome.problems] == [True], fault
        assert f"make fuzz SEED={SEED} CASE=planted:{PLANTED.index(fault)}" in str(outcome)
    assert not server.run("planted", PLANTED.index("nothing"), SEED).problems

    outcome = server.run("planted", PLANTED.index("process"), SEED, keep=True)
    assert not outcome.problems
    process = int(Path(outcome.folder, "work", "process").read_text())
    with contextlib.suppress(ProcessLookupError):  # processes end with their case
        os.kill(process, 0)
        # Ended, but nobody has asked for its status yet.
        assert Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    remove(Path(outcome.folder))

    for kind in ("command", "model"):
        first, second = (server.run(kind, 1, SEED) for _ in range(2))
        assert first.notes == second.notes
        assert [(step.words, step.code) for step in first.steps] == [(step.words, step.code) for step in second.steps]
