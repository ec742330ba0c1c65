"""Workers that measure real cells and are killed at the worst moments, each cell at one of its own."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path
from types import SimpleNamespace

from wherewhat.runs.directory import RunDirectory
from wherewhat.sweep.records import SweepFolder

MOMENTS = ("before", "part written", "run finished", "record written", "never")


def moment_of(described: str) -> str:
    """A cell's moment, by what it is and not by its hash, which knows the time of the model's files."""
    return MOMENTS[zlib.crc32(described.encode()) % len(MOMENTS)]


def die_once(task, moment: str) -> None:
    """Kill this process if it is the cell's moment and has not come yet."""
    mark = Path(task.store).parent / "deaths" / task.cell
    if moment_of(task.described) == moment and not mark.exists():
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def perform(job):
    """As a worker does, but mortal; every part that is computed is written into a common log."""
    (task,) = job.tasks
    save, write = RunDirectory.save, SweepFolder.write

    def logged_save(self, key, scores, **options):
        save(self, key, scores, **options)
        with (Path(task.store).parent / "log").open("a") as log:
            log.write(f"{self.path.name} {key!r}\n")
        die_once(task, "part written")

    def late_write(self, cell, record):
        die_once(task, "run finished")
        write(self, cell, record)
        die_once(task, "record written")

    die_once(task, "before")
    from wherewhat.models import suitability
    from wherewhat.sweep import execution as working  # imports torch, which a worker that dies before does not need

    suitability.sys = SimpleNamespace(executable="")  # no trial process for a worker that dies soon
    RunDirectory.save, SweepFolder.write = logged_save, late_write
    try:
        return working.perform(job)
    finally:
        RunDirectory.save, SweepFolder.write = save, write
