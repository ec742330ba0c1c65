"""Workers that measure real cells, log what they save, and meet others or stop at chosen moments."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from wherewhat.runs.directory import RunDirectory

_PATIENCE = 60


def home_of(job) -> Path:
    return Path(job.tasks[0].store.removeprefix("file://")).parent


def perform(job, after=None):
    """As a worker does; every part that is saved is written into a common log, and then ``after`` is called."""
    from wherewhat.sweep import execution as working

    home, save = home_of(job), RunDirectory.save

    def logged_save(self, key, scores, **options):
        save(self, key, scores, **options)
        with (home / "log").open("a") as log:
            log.write(f"{os.getpid()} {self.path.name} {key!r}\n")
        if after is not None:
            after()

    RunDirectory.save = logged_save
    try:
        return working.perform(job)
    finally:
        RunDirectory.save = save


def meeting(job):
    """Measure a share only while all shares of its cells are measured at the same time."""
    if job.share is not None:
        index, count = job.share
        folder = home_of(job) / "shares"
        folder.mkdir(exist_ok=True)
        (folder / f"{job.tasks[0].cell}-{index}").touch()
        wait_for(lambda: len(list(folder.glob(f"{job.tasks[0].cell}-*"))) == count)
    return perform(job)


def distant(job):
    """As ``meeting``, and every worker is as on another machine: the store has an address, and each its own cache."""
    os.environ["WHEREWHAT_CACHE"] = str(home_of(job) / "cache" / str(os.getpid()))
    return meeting(job)


def dying(job):
    """Kill the first worker of each share and of each other job after its first document, in the middle of a batch."""
    mark = home_of(job) / "deaths" / f"{job.tasks[0].cell}-{job.share}"

    def die():
        if not mark.exists():
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return perform(job, after=die)


def doomed(job):
    """Stop for ever on the node whose name is in ``doomed``, when a document is saved there."""
    import ray

    home = home_of(job)

    def stop():
        if (home / "doomed").read_text() == ray.get_runtime_context().get_node_id():
            (home / "stopped").touch()
            time.sleep(10 * _PATIENCE)

    return perform(job, after=stop)


def faulty(job):
    """Fail to measure axes."""
    from wherewhat.runs import jobs

    measure_pass = jobs.measure_pass

    def broken(subject, texts, wanted):
        if any(measurement.name == "axes" for measurement, _ in wanted):
            raise ZeroDivisionError("nothing to divide by")
        return measure_pass(subject, texts, wanted)

    jobs.measure_pass = broken
    try:
        return perform(job)
    finally:
        jobs.measure_pass = measure_pass


def slow(job):
    """Measure, with a pause after each part."""
    return perform(job, after=lambda: time.sleep(0.5))


def wait_for(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
