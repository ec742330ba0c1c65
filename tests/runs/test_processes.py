"""End-to-end: real processes that work in one run directory at once, or are killed at any moment."""

import os
import signal
from functools import wraps
from pathlib import Path

import pytest

from helpers.runs import KEYS, complete_run, compute, leftovers, open_run, provenance, result_bytes
from wherewhat.errors import StoreError

_CALLS = ("replace", "fsync", "mkdir", "unlink", "rmdir")


def _work(parent, log, met):
    """Finishes the run, and writes the name of every part it computes into a common file.

    The first process goes on when another one waits for it.
    """

    def wait(line):
        with Path(f"{log}.waits").open("a") as file:
            file.write(f"{line}\n")
        met.set()

    run = open_run(Path(parent))
    with run.lock(on_wait=wait):
        for key in KEYS:
            if not run.has(key):
                if key == KEYS[0]:
                    met.wait(60)
                with Path(log).open("a") as file:
                    file.write(f"{key}\n")
                run.save(key, compute(key), document=key, seconds=0.5)
        run.finish(KEYS, provenance=provenance())


def _hold(parent, keys, ready, release):
    """Computes some parts, and keeps the lock until it is released or killed."""
    run = open_run(Path(parent))
    with run.lock():
        for key in keys:
            run.save(key, compute(key), document=key, seconds=0.5)
        ready.set()
        release.wait()


def _die_at(parent, moment):
    """Finishes the run, but is killed right before the n-th call that changes the disk."""
    count = 0

    def step():
        nonlocal count
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def mortal(call):
        @wraps(call)
        def wrapped(*args, **kwargs):
            step()
            return call(*args, **kwargs)

        return wrapped

    for name in _CALLS:
        setattr(os, name, mortal(getattr(os, name)))
    complete_run(Path(parent), KEYS[:2])


def start(processes, target, *args):
    process = processes.Process(target=target, args=args)
    process.start()
    return process


@pytest.mark.parametrize("moments", [(2, 13, 24, 35), pytest.param(range(1000), marks=pytest.mark.slow)], ids=len)
def test_killed_at_any_step_and_resumed_gives_the_same_bytes(tmp_path, processes, moments):
    reference = result_bytes(complete_run(tmp_path / "undisturbed", KEYS[:2])[0])
    for moment in moments:
        parent = tmp_path / str(moment)
        process = start(processes, _die_at, str(parent), moment)
        process.join()
        run, computed = complete_run(parent, KEYS[:2])
        assert result_bytes(run) == reference, moment
        assert run.is_complete
        assert not leftovers(parent)
        if process.exitcode == 0:
            assert computed == []
            break
        assert process.exitcode == -signal.SIGKILL
    assert moment >= 35


def test_processes_at_the_same_time_compute_every_part_once(tmp_path, processes, reference):
    met = processes.Event()
    workers = [start(processes, _work, str(tmp_path / "runs"), str(tmp_path / "log"), met) for _ in range(3)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(KEYS)
    run = open_run(tmp_path / "runs")
    assert run.is_complete
    assert result_bytes(run) == reference
    waits = (tmp_path / "log.waits").read_text().splitlines()
    assert set(waits) == {f"another process works in {run.path}: waiting for it"}


def test_a_waiting_process_takes_over_when_the_worker_is_killed(tmp_path, processes, reference):
    ready, release, met = processes.Event(), processes.Event(), processes.Event()
    first = start(processes, _hold, str(tmp_path / "runs"), KEYS[:2], ready, release)
    assert ready.wait(60)
    second = start(processes, _work, str(tmp_path / "runs"), str(tmp_path / "log"), met)
    assert met.wait(60)
    first.kill()
    first.join()
    second.join()
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    assert (tmp_path / "log").read_text().splitlines() == KEYS[2:]
    assert result_bytes(open_run(tmp_path / "runs")) == reference


def _give_up_or_finish(parent, log, number):
    run = open_run(Path(parent))
    with run.lock():
        if number % 2:
            return  # leaves an empty directory, which is taken away under the others' feet
        for key in KEYS:
            if not run.has(key):
                run.save(key, compute(key), document=key, seconds=0)
        run.finish(KEYS, provenance=provenance())


@pytest.mark.slow
def test_directories_taken_away_do_not_disturb_those_who_wait(tmp_path, processes, reference):
    for round_ in range(5):
        parent = tmp_path / f"{round_}" / "runs"
        workers = [start(processes, _give_up_or_finish, str(parent), "", number) for number in range(6)]
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * 6
        assert result_bytes(open_run(parent)) == reference


def test_waiting_ends_in_one_line_when_the_time_is_up(tmp_path, processes):
    ready, release = processes.Event(), processes.Event()
    holder = start(processes, _hold, str(tmp_path), (), ready, release)
    try:
        assert ready.wait(60)
        run = open_run(tmp_path)
        for timeout in (0, 0.2):
            waits = []
            with pytest.raises(StoreError) as caught, run.lock(timeout=timeout, on_wait=waits.append):
                pass
            assert str(caught.value) == f"another process still works in {run.path} after {timeout:g} s: wait for it"
            assert len(waits) == (1 if timeout else 0)
    finally:
        release.set()
        holder.join()
    assert holder.exitcode == 0
