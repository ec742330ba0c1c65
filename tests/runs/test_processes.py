"""End-to-end: real processes that work in one run directory at once, or are killed at any moment."""

import os
import random
import signal
import time
from functools import wraps
from pathlib import Path

import pytest

from helpers.runs import KEYS, complete_run, compute, leftovers, open_run, provenance, result_bytes
from wherewhat.errors import StoreError

_CALLS = ("replace", "fsync", "mkdir", "unlink", "rmdir")


def _work(parent, log, pause):
    """Finishes the run, and writes the name of every part it computes into a common file."""
    waits = []
    run = open_run(Path(parent))
    with run.lock(on_wait=waits.append):
        for key in KEYS:
            if not run.has(key):
                with Path(log).open("a") as file:
                    file.write(f"{key}\n")
                time.sleep(pause)
                run.save(key, compute(key), seconds=pause)
        run.finish(KEYS, provenance=provenance())
    with Path(f"{log}.waits").open("a") as file:
        file.writelines(f"{line}\n" for line in waits)


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


@pytest.mark.slow
def test_killed_at_every_step_and_resumed_gives_the_same_bytes(tmp_path, processes):
    reference = result_bytes(complete_run(tmp_path / "undisturbed", KEYS[:2])[0])
    moment = 0
    while True:
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
        moment += 1
    assert moment > 40


@pytest.mark.slow
def test_killed_again_and_again_at_random_moments_gives_the_same_bytes(tmp_path, processes, reference):
    generator = random.Random(0)
    killed = 0
    for attempt in range(60):
        process = start(processes, _work, str(tmp_path / "runs"), str(tmp_path / "log"), 0.1)
        process.join(timeout=generator.uniform(0.01, 0.2) if attempt < 12 else None)
        if process.exitcode == 0:
            break
        process.kill()
        process.join()
        killed += 1
    assert killed >= 3
    run, computed = complete_run(tmp_path / "runs")
    assert computed == []
    assert result_bytes(run) == reference
    assert not leftovers(tmp_path)
    # At most the part that was under way is lost with each kill.
    assert len((tmp_path / "log").read_text().splitlines()) <= len(KEYS) + killed


def test_processes_at_the_same_time_compute_every_part_once(tmp_path, processes, reference):
    workers = [start(processes, _work, str(tmp_path / "runs"), str(tmp_path / "log"), 0.05) for _ in range(4)]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(KEYS)
    run = open_run(tmp_path / "runs")
    assert run.is_complete
    assert result_bytes(run) == reference
    waits = (tmp_path / "log.waits").read_text().splitlines()
    assert waits
    assert set(waits) == {f"another process works in {run.path}: waiting for it"}


@pytest.mark.slow
def test_a_waiting_process_takes_over_when_the_worker_is_killed(tmp_path, processes, reference):
    log = tmp_path / "log"
    first = start(processes, _work, str(tmp_path / "runs"), str(log), 0.3)
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        time.sleep(0.01)
    second = start(processes, _work, str(tmp_path / "runs"), str(log), 0)
    time.sleep(0.1)
    first.kill()
    first.join()
    second.join()
    assert second.exitcode == 0
    computed = log.read_text().splitlines()
    assert computed.count(KEYS[0]) == 1
    assert result_bytes(open_run(tmp_path / "runs")) == reference


def _give_up_or_finish(parent, log, number):
    run = open_run(Path(parent))
    with run.lock():
        if number % 2:
            return  # leaves an empty directory, which is taken away under the others' feet
        for key in KEYS:
            if not run.has(key):
                run.save(key, compute(key), seconds=0)
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


def _hold(parent, ready, release):
    run = open_run(Path(parent))
    with run.lock():
        ready.set()
        release.wait()


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_waiting_ends_in_one_line_when_the_time_is_up(timeout, tmp_path, processes):
    ready, release = processes.Event(), processes.Event()
    holder = start(processes, _hold, str(tmp_path), ready, release)
    try:
        assert ready.wait(30)
        run = open_run(tmp_path)
        waits = []
        begin = time.monotonic()
        with pytest.raises(StoreError) as caught, run.lock(timeout=timeout, on_wait=waits.append):
            pass
        assert timeout <= time.monotonic() - begin < timeout + 5
        assert str(caught.value) == f"another process still works in {run.path} after {timeout:g} s: wait for it"
        assert len(waits) == (1 if timeout else 0)
    finally:
        release.set()
        holder.join()
    assert holder.exitcode == 0
