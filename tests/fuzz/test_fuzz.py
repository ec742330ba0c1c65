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
PARTS = 4


@pytest.fixture(scope="module")
def server():
    with Server() as started:
        yield started


def run(server, kind, indexes):
    """Run cases and show those that broke a promise."""
    outcomes = [server.run(kind, index, SEED, limit=LONG_LIMIT) for index in indexes]  # other tests run beside it
    broken = [str(outcome) for outcome in outcomes if outcome.problems]
    assert not broken, "\n\n".join([f"{len(broken)} of {len(outcomes)} cases:", *broken])


@pytest.mark.parametrize("part", range(PARTS))
def test_inputs_that_broke_a_promise_once(server, part):
    run(server, "known", range(part, len(KNOWN), PARTS))


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_inputs(server, kind):
    run(server, kind, range(CASES[kind]))


FOUND = {
    "traceback": "KeyError in fuzz/calls.py _planted",
    "exit code": "exit code 3",
    "hang": "hang in fuzz/calls.py _planted",
    "abort": "SIGABRT in fuzz/calls.py _planted",
    "control character": "control character",
    "warning": "noise",
    "memory": "memory",
    "unfinished file": "unfinished file",
    "two lines": "not one line",
    "silent use": "silent use",
    "process": None,
    "nothing": None,
}


@pytest.mark.parametrize("fault", FOUND)
def test_planted_faults_are_found(server, fault):
    outcome = server.run("planted", PLANTED.index(fault), SEED, limit=2 if fault == "hang" else None)
    expected = FOUND[fault]
    if expected is None:
        assert not outcome.problems
    else:
        assert len(outcome.problems) == 1
        assert outcome.problems[0][0].startswith(expected)
        assert f"make fuzz SEED={SEED} CASE=planted:{PLANTED.index(fault)}" in str(outcome)


def test_processes_end_with_their_case(server):
    outcome = server.run("planted", PLANTED.index("process"), SEED, keep=True)
    process = int(Path(outcome.folder, "work", "process").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        # Ended, but nobody has asked for its status yet.
        assert Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    remove(Path(outcome.folder))


@pytest.mark.parametrize("kind", ["command", "model"])
def test_a_case_repeats_exactly(server, kind):
    first, second = (server.run(kind, 1, SEED) for _ in range(2))
    assert (first.notes, [step.words for step in first.steps]) == (second.notes, [step.words for step in second.steps])
    assert [step.code for step in first.steps] == [step.code for step in second.steps]
