"""What engines cost beyond the cells they run, and how long the state of a large sweep takes to tell.

    python benchmarks/sweep.py                  # 200 cells of 0.5 s on 2 local processes and on a Ray cluster of 2 CPUs
    python benchmarks/sweep.py --repeat 3       # alternating, to see the spread
    python benchmarks/sweep.py --status-only    # 10,000 cells

Cells here only sleep and write their record into the store. Times count from the call to the last record, the start of
processes or of the cluster included; the overhead of Ray is its time over that of the local engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from wherewhat.runs.storage import Folder, open_place
from wherewhat.sweep.engine import CellTask, Resources
from wherewhat.sweep.local_engine import run_locally
from wherewhat.sweep.ray_engine import run_on_ray
from wherewhat.sweep.records import Record, SweepFolder, statuses

SECONDS = 0.5


class Nobody:
    """Watches and says nothing, but knows when the engine was up."""

    def __init__(self) -> None:
        self.up = 0.0

    def planned(self, *, left: int, done: int, failed: int) -> None:
        """Nothing."""

    def begin(self, *, workers: str, dashboard: str | None) -> None:
        """The engine is up."""
        self.up = time.perf_counter()

    def running(self, cells: Sequence[str]) -> None:
        """Nothing."""

    def finished(self, task: CellTask, record: Record) -> None:
        """Nothing."""


def nap(job: Job) -> list[Record]:
    """Cells that sleep."""
    record = Record(state="done", run="none", seconds=SECONDS)
    for task in job.tasks:
        time.sleep(SECONDS)
        SweepFolder(open_place(task.store), task.sweep).write(task.cell, record)
    return [record] * len(job.tasks)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Cost of sweeps beyond their cells.")
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--status-only", action="store_true")
    options = parser.parse_args()
    if not options.status_only:
        engines(options)
    status(10_000)


def engines(options: argparse.Namespace) -> None:
    """Both engines on the same cells, in turn."""
    times: dict[str, list[float]] = {"local": [], "ray": []}
    after: dict[str, list[float]] = {"local": [], "ray": []}
    for _ in range(options.repeat):
        for engine in times:
            with tempfile.TemporaryDirectory() as folder:
                whole, working = timed(engine, options.cells, options.workers, folder)
            times[engine].append(whole)
            after[engine].append(working)
    ideal = options.cells * SECONDS / options.workers
    print(f"{options.cells} cells of {SECONDS} s, {options.workers} workers: {ideal:.1f} s if nothing else took time")
    for engine in times:
        print(
            f"{engine:>6} {statistics.median(times[engine]):7.2f} s, {statistics.median(after[engine]):7.2f} s of it up"
        )
    ratio = statistics.median(times["ray"]) / statistics.median(times["local"]) - 1
    up = statistics.median(after["ray"]) / statistics.median(after["local"]) - 1
    print(f"overhead of Ray over the local engine: {100 * ratio:+.1f} %, without its start {100 * up:+.1f} %")


def timed(engine: str, cells: int, workers: int, folder: str) -> tuple[float, float]:
    """Seconds of a sweep, and those of them in which the engine was up."""
    tasks = [CellTask(cell=f"nap-{i}", described=f"nap {i}", store=folder, sweep="naps") for i in range(cells)]
    watch = Nobody()
    started = time.perf_counter()
    if engine == "local":
        run_locally(tasks, slots=[{}] * workers, work=nap, watch=watch, retries=3)
    else:
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        run_on_ray(tasks, address=None, resources=Resources(), work=nap, watch=watch)
    ended = time.perf_counter()
    if engine == "ray":
        ray.shutdown()
    written = SweepFolder(Folder(Path(folder)), "naps").records(task.cell for task in tasks)
    assert len(written) == cells, "every cell has its record"
    return ended - started, ended - watch.up


def status(cells: int) -> None:
    """How long telling the state of a sweep takes."""
    with tempfile.TemporaryDirectory() as folder:
        place = Folder(Path(folder))
        sweep = SweepFolder(place, "large")
        names = [f"attention-model-{i:05d}-trained-{i:012x}" for i in range(cells)]
        request = {"options": {"sink_tokens": 1}, "tokens": 512, "documents": 4, "dtype": "float32"}
        content = {name: {**request, "model": f"models/{name}", "described": name} for name in names}
        sweep.begin(content, title="large", file_sha256="0" * 64)
        (Path(folder) / "sweeps/large/cells").mkdir()
        for number, name in enumerate(names):
            state = "failed" if number % 100 == 0 else "done"
            record = f'{{"state": "{state}", "run": "{name}", "reason": null, "seconds": 1.5, "attempts": 1}}'
            (Path(folder) / f"sweeps/large/cells/{name}.json").write_text(record)
        started = time.perf_counter()
        (found,) = statuses(place)
        seconds = time.perf_counter() - started
        assert (found.done, len(found.failed)) == (cells - cells // 100, cells // 100)
        print(f"status of {cells:,} cells: {seconds:.2f} s")


if __name__ == "__main__":
    main()
