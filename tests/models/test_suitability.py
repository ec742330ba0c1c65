"""Adversarial: whatever a step of loading does, the caller lives on and raises one line."""

from __future__ import annotations

import os
import subprocess

import pytest

from helpers.hostile_steps import abort, allocate, answer, disk_full, print_lines, refuse, stop_quietly, wait_for_ever
from wherewhat.errors import CaptureError, LoadError
from wherewhat.models import suitability
from wherewhat.models.suitability import attempt, time_limit

OPTIONS = {"spec": "m", "seconds": 20, "limit_memory": True}


def test_a_result_is_returned_and_what_libraries_print_is_not():
    assert attempt(answer, **OPTIONS, number=3) == {"number": 3, "other process": True}
    assert attempt(print_lines, **OPTIONS) == "done"


def test_what_a_step_does_is_one_line(subtests):
    for step, kind, match in (
        (abort, LoadError, "'m' could not be loaded: a library that read it was stopped by signal 6"),
        (stop_quietly, LoadError, "a library that read it was stopped"),
        (allocate, LoadError, "needs more than 4 GiB"),
        (refuse, CaptureError, "^refused with a line of its own$"),
        (disk_full, OSError, "No space left"),
        (answer, LoadError, "TypeError"),
    ):
        with subtests.test(step=step.__name__):
            with pytest.raises(kind, match=match) as caught:
                attempt(step, **OPTIONS, **({"unknown": 1} if step is answer else {}))
            assert "\n" not in str(caught.value)
            assert attempt(answer, **OPTIONS, number=1)["number"] == 1


@pytest.mark.slow
def test_a_step_that_does_not_end_is_stopped_and_the_next_one_runs():
    with pytest.raises(LoadError, match="did not end within 1 s"):
        attempt(wait_for_ever, **{**OPTIONS, "seconds": 1})
    assert attempt(answer, **OPTIONS, number=2)["number"] == 2
    assert (time_limit(0), time_limit(300_000_000)) == (20, 620)  # grows with the files


def test_an_interrupted_step_does_not_answer_the_next_one(monkeypatch):
    def interrupted(self, seconds):
        raise KeyboardInterrupt

    attempt(answer, **OPTIONS, number=0)
    with monkeypatch.context() as patch:
        patch.setattr(suitability._Server, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attempt(answer, **OPTIONS, number=1)
    assert attempt(answer, **OPTIONS, number=2)["number"] == 2


@pytest.mark.slow
def test_one_process_serves_many_trials_and_another_one_a_fork(monkeypatch):
    monkeypatch.setattr(suitability, "subprocess", subprocess)  # a new process, not a fork
    monkeypatch.setattr(suitability, "_server", None)
    attempt(answer, **OPTIONS, number=0)
    first = suitability._server.process.pid
    attempt(answer, **OPTIONS, number=0)
    assert suitability._server.process.pid == first
    server = suitability._server
    monkeypatch.setattr(server, "owner", -1)  # as after a fork
    attempt(answer, **OPTIONS, number=0)
    second = suitability._server
    assert second.process.pid != first
    monkeypatch.undo()
    for one in (server, second):
        one.stop()
        assert one.process.returncode is not None


def test_without_another_process_the_step_runs_here(monkeypatch):
    monkeypatch.setattr(suitability, "_server", None)
    monkeypatch.setattr(suitability.sys, "executable", "")
    assert attempt(answer, **OPTIONS, number=1, here=os.getpid()) == {"number": 1, "other process": False}
