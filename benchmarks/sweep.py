"""What engines cost beyond the cells they run, and how long the state of a large sweep takes to tell.

    python benchmarks/sweep.py                  # 200 cells of 0.5 s on 2 local processes and on a Ray cluster of 2 CPUs
    python benchmarks/sweep.py --repeat 3       # alternating, to see the spread
    python benchmarks/sweep.py --tiny           # 500 real cells of a tiny model: overhead, loads and memory
    python benchmarks/sweep.py --status-only    # 10,000 cells

Cells of the first two only sleep and write their record into the store. Times count from the call to the last record,
the start of processes or of the cluster included; the overhead of Ray is its time over that of the local engine.

Cells of --tiny are four measurements of one model on many text sets of one document. The same requests in one process,
one after another with one loaded model, are the cost without a sweep. Costs are CPU time, which depends less on other
work of the machine; that of the engine is what the starting process uses. Memory is what worker processes occupy after
their first job and after their last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from wherewhat.progress import Silent
from wherewhat.runs.execution import LastModel, measure, prepare
from wherewhat.runs.storage import Folder, open_place
from wherewhat.sweep.cells import expand
from wherewhat.sweep.engine import CellTask, Resources
from wherewhat.sweep.execution import Engine, perform, sweep
from wherewhat.sweep.file import SweepFile, read_sweep_file
from wherewhat.sweep.local_engine import run_locally
from wherewhat.sweep.ray_engine import run_on_ray
from wherewhat.sweep.records import Record, SweepFolder, statuses
from wherewhat.sweep.schedule import Job

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
    parser.add_argument("--cells", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--status-only", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        tiny(options.cells or 500, options.workers)
        return
    options.cells = options.cells or 200
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
    tasks = [
        CellTask(cell=f"nap-{i}", described=f"nap {i}", texts=str(i), store=folder, sweep="naps") for i in range(cells)
    ]
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


MEASUREMENTS = ("attention", "axes", "planes", "distance")
TOKENS = 64


def tiny(cells: int, workers: int) -> None:
    """Real cells of a tiny model, without a sweep and on both engines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "tiny")
        letters = random.Random(0)
        texts = [folder / f"{i}.txt" for i in range(cells // len(MEASUREMENTS))]
        for path in texts:
            path.write_text("".join(letters.choices("abcdefghij ", k=2 * TOKENS)))
        values = {"models": [str(folder / "tiny")], "texts": [str(path) for path in texts], "tokens": TOKENS}
        (folder / "sweep.json").write_text(json.dumps({**values, "measurements": MEASUREMENTS, "device": "cpu"}))
        file = read_sweep_file(folder / "sweep.json")
        started = time.perf_counter()
        requests = [cell.request for cell in expand(file)]
        print(f"{len(requests)} cells in {len(texts)} text sets, checked in {time.perf_counter() - started:.1f} s")
        torch.set_num_threads(1)
        models = LastModel()
        for number, request in enumerate(requests):
            if number == 1:  # the first has loaded the model
                started = time.process_time()
            measure(
                prepare(request, out=folder / "alone", progress=Silent(), models=models),
                progress=Silent(),
                models=models,
            )
        alone = (time.process_time() - started) / (len(requests) - 1)
        print(f"without a sweep: {1000 * alone:.0f} ms a cell")
        for engine, count in (("local", 1), ("local", workers), ("ray", workers)):
            swept(file, folder / f"{engine}-{count}", engine, count)


def swept(file: SweepFile, store: Path, engine: Engine, workers: int) -> None:
    """One sweep: its time, loads, CPU time and memory."""
    if engine == "ray":
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    started, used = time.perf_counter(), time.process_time()
    options = {"workers": workers} if engine == "local" else {}
    outcome = sweep(file, watch=Nobody(), store=str(store), engine=engine, work=weighed, **options)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    if engine == "ray":
        ray.shutdown()
    assert not outcome.failed, "every cell is done"
    cells = len(outcome.cells)
    lines = [line.split() for line in Path(f"{store}.weighed").read_text().splitlines()]
    by_worker = {worker: [(float(a), float(b)) for name, a, b in lines if name == worker] for worker, *_ in lines}
    # Without each worker's first job, which imports packages and loads the model.
    measured = sum(times[-1][0] - times[0][0] for times in by_worker.values())
    jobs = sum(len(times) - 1 for times in by_worker.values())
    first, last = (max(times[i][1] for times in by_worker.values()) for i in (0, -1))
    print(
        f"{engine:>6}, {workers} workers: {seconds:.0f} s, {outcome.folder.loads()} loads; a cell costs its worker "
        f"{1000 * measured / jobs / len(MEASUREMENTS):.0f} ms and the engine {1000 * used / cells:.1f} ms; "
        f"a worker occupies {first:.0f} MiB after its first job, {last:.0f} MiB after its last; this process "
        f"{resident():.0f} MiB"
    )


def weighed(job: Job) -> list[Record]:
    """Measure a job, and write down the CPU time and the memory of this process."""
    records = perform(job)
    with Path(f"{job.tasks[0].store}.weighed").open("a") as log:
        log.write(f"{os.getpid()} {time.process_time()} {resident()}\n")
    return records


def resident() -> float:
    """Return the memory that this process occupies, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def write_model(folder: Path) -> None:
    """Write a Llama of two layers with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


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
