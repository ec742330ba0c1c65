"""Run a sweep from its file to the last cell."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wherewhat.errors import ConfigError, StoreError, WherewhatError
from wherewhat.files import canonical_json, part_folder_name, text_sha256
from wherewhat.imports import require
from wherewhat.models.source import cache_root
from wherewhat.progress import Silent
from wherewhat.runs.directory import COMPLETE, CONFIG, PROFILES, PROVENANCE, SCORES, RunDirectory
from wherewhat.runs.execution import LastModel, measure_together, prepare
from wherewhat.runs.jobs import Prepared, Share
from wherewhat.runs.request import ModelRequest
from wherewhat.runs.storage import Folder, Remote, open_place
from wherewhat.sweep.cells import Cell, expand, located, request_from_json, request_json
from wherewhat.sweep.engine import (
    MOST_PROCESSES,
    CellTask,
    Resources,
    Watch,
    local_slots,
    memory_needed,
    resources_of,
)
from wherewhat.sweep.file import SweepFile
from wherewhat.sweep.local_engine import run_locally
from wherewhat.sweep.ray_engine import run_on_ray
from wherewhat.sweep.records import Record, SweepFolder, finished_elsewhere, sweep_name
from wherewhat.sweep.schedule import Job, Work

_log = logging.getLogger(__name__)
_MODELS = LastModel()
"""One per worker process, which gets the cells of one model in sequence."""


def perform(job: Job) -> list[Record]:
    """Measure the cells of a job, write their records and return them; of a share, measure the documents only.

    Cells that were finished meanwhile are not run again.
    """
    import torch

    _leave_broken_device()
    folder = SweepFolder(open_place(job.tasks[0].store), job.tasks[0].sweep)
    known = {task.cell: folder.record(task.cell) for task in job.tasks}
    records = {cell: record for cell, record in known.items() if record is not None and record.done}
    torch.set_num_threads(job.tasks[0].threads)
    started = time.perf_counter()
    for task, record in _measured([task for task in job.tasks if task.cell not in records], folder, share=job.share):
        if job.share is None:  # else the job that finishes the cell meets the same error, and records it
            now = time.perf_counter()
            records[task.cell] = dataclasses.replace(record, seconds=now - started, attempts=task.attempts + 1)
            folder.write(task.cell, records[task.cell])
            started = now
            if not record.done and len(records) < len(job.tasks):
                _leave_broken_device()
    return [records[task.cell] for task in job.tasks] if job.share is None else []


def _leave_broken_device() -> None:
    """End this process if its GPU does not work any more after an error: only a new process can use it again."""
    import torch

    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


def _measured(
    tasks: Sequence[CellTask], folder: SweepFolder, *, share: Share | None
) -> Iterator[tuple[CellTask, Record]]:
    """Measure cells of one model on the same texts, and yield each with its record as soon as it ends."""
    place = folder.place
    # Runs for a remote store are made in one local folder per store, so that a killed one is resumed.
    local = cache_root() / "sweeps" / text_sha256(place.address)[:12]
    out = place.path if isinstance(place, Folder) else local
    prepared: dict[int, Prepared] = {}
    for number, task in enumerate(tasks):
        try:
            prepared[number] = cell = _prepared(task, folder, out)
            name = cell.directory.path.name
            # A finished run that still exists locally was not verified after its upload.
            if isinstance(place, Folder) or task.again or cell.directory.is_complete:
                continue
            if place.read(f"{name}/{COMPLETE}") is not None:
                del prepared[number]
                shutil.rmtree(cell.directory.path, ignore_errors=True)
                yield task, Record(state="done", run=name)
            elif share is None:
                _receive(cell, folder, place)
        except Exception as error:  # noqa: BLE001 - an error in one cell must not stop the others; it is recorded
            prepared.pop(number, None)
            yield task, _failure(error, task)
    again = any(task.again for task in tasks)
    for number, outcome in _outcomes(prepared, again=again, share=share):
        task = tasks[number]
        name = prepared[number].directory.path.name
        record = _failure(outcome, task) if isinstance(outcome, Exception) else Record(state="done", run=name)
        del outcome  # an error holds the tensors of the functions that it left
        if isinstance(place, Remote):
            try:
                _send(prepared[number], folder, place, share, done=record.done)
            except StoreError as error:
                record = _failure(error, task)
        yield task, record


def _send(cell: Prepared, folder: SweepFolder, place: Remote, share: Share | None, *, done: bool) -> None:
    """Move what was measured to a remote store: the parts of a share, or the finished run."""
    directory = cell.directory
    parts = folder.parts(directory.path.name)
    if share is not None:
        with directory.lock():
            for name in filter(directory.has, cell.inputs):
                for file, content in directory.part_files(name).items():
                    place.write(f"{parts}/{part_folder_name(name)}/{file}", content)
                directory.remove_part(name)
    elif done:
        place.upload(directory.path, [CONFIG, PROVENANCE, SCORES, PROFILES, COMPLETE])
        shutil.rmtree(directory.path, ignore_errors=True)
        with suppress(StoreError):  # what is left there is not used again
            place.remove(parts)


def _receive(cell: Prepared, folder: SweepFolder, place: Remote) -> None:
    """Add the parts that other workers have measured to a run in the local cache."""
    directory = cell.directory
    parts = folder.parts(directory.path.name)
    sent = set(place.names(parts))
    names = [name for name in cell.inputs if part_folder_name(name) in sent]
    if not names:
        return
    with directory.lock():
        for name in names:
            if not directory.has(name):
                at = f"{parts}/{part_folder_name(name)}"
                files = place.read_many(f"{at}/{file}" for file in place.names(at))
                directory.add_part(name, {path.rpartition("/")[2]: content for path, content in files.items()})


def _prepared(task: CellTask, folder: SweepFolder, out: Path) -> Prepared:
    """Return the cell with its model, which is loaded unless this process has it; each load is noted in the store."""
    loads, started = _MODELS.loads, time.perf_counter()
    try:
        return prepare(request_from_json(task.request), out=out, progress=Silent(), models=_MODELS)
    finally:
        if _MODELS.loads > loads:
            worker = f"{platform.node()}:{os.getpid()}"
            folder.write_load(model=task.model, worker=worker, seconds=time.perf_counter() - started)


def _outcomes(
    prepared: Mapping[int, Prepared], *, again: bool, share: Share | None
) -> Iterator[tuple[int, RunDirectory | Exception]]:
    """Measure runs of one model in shared passes, and yield each when it ends.

    An unexpected error does not tell whose it is: the runs that have not ended are then measured one by one.

    Args:
        prepared: The runs by number.
        again: Measure anew what is finished.
        share: Batches to measure, without finishing the runs; None for all that are missing.
    """
    left = list(prepared)
    numbers, runs = tuple(left), list(prepared.values())
    try:
        for index, outcome in measure_together(runs, progress=Silent(), models=_MODELS, again=again, share=share):
            left.remove(numbers[index])
            yield numbers[index], outcome
    except Exception as error:  # noqa: BLE001 - an error in one cell must not stop the others; it is recorded
        if len(numbers) == 1:
            yield numbers[0], error
            return
    if left:
        _leave_broken_device()
    for number in left:
        yield from _outcomes({number: prepared[number]}, again=again, share=share)


def _failure(error: Exception, task: CellTask) -> Record:
    """Return the record of a failed cell."""
    import torch

    reason = str(error) if isinstance(error, WherewhatError) else f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        reason = "out of memory: ask for fewer tokens, or a smaller dtype"
    elif not isinstance(error, WherewhatError):
        _log.error("%s", task.described, exc_info=error)
    return Record(state="failed", reason=" ".join(reason.split())[:500])


Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Outcome:
    """The state of every cell when a sweep ends.

    Attributes:
        folder: The sweep's folder in the store.
        cells: All cells by name.
        records: Records of the cells that ended.
    """

    folder: SweepFolder
    cells: Mapping[str, Cell]
    records: Mapping[str, Record]

    @property
    def failed(self) -> dict[str, Record]:
        """Records of failed cells."""
        return {cell: record for cell, record in self.records.items() if not record.done}


def sweep(
    file: SweepFile,
    *,
    watch: Watch,
    store: str | None = None,
    engine: Engine = "local",
    address: str | None = None,
    workers: int | None = None,
    retry_failed: bool = False,
    again: bool = False,
    work: Work = perform,
) -> Outcome:
    """Run the cells of a sweep that are not done yet.

    Args:
        file: The sweep file.
        watch: Receiver of events.
        store: Folder or address of the results; that of the file by default.
        engine: ``local`` for the devices of this machine, ``ray`` for a Ray cluster.
        address: The Ray cluster; by default one is started on this machine.
        workers: Local worker processes; by default one per GPU, or as many as cores and memory allow.
        retry_failed: Also run cells that failed before.
        again: Run all cells, and measure anew what is finished.
        work: Function that a worker applies to a job.
    """
    if engine not in ("local", "ray"):
        raise ConfigError(f"there is no engine '{engine}': use local or ray")
    if engine == "local" and address is not None:
        raise ConfigError(f"--address {address} is that of a Ray cluster: add --engine ray")
    if engine == "ray":
        require("ray", why="--engine ray", install="'wherewhat[ray]'")
    if workers is not None and not 1 <= workers <= MOST_PROCESSES:
        raise ConfigError(f"--workers is {workers}: give 1 to {MOST_PROCESSES:,}")
    resources = resources_of(file)
    cells = {cell.id: cell for cell in expand(file)}
    place = open_place(store or file.store)
    place.check()
    folder = SweepFolder(place, sweep_name(cells))
    folder.begin({name: cell.json() for name, cell in cells.items()}, title=file.path.stem, file_sha256=file.sha256)
    if again:  # if this process is killed, the next sweep runs what is left
        folder.forget(cells)
    records = folder.records(cells)
    for name, record in finished_elsewhere(place, cells.keys() - records.keys(), but=folder.name).items():
        folder.write(name, record)
        records[name] = record
    missing = [name for name in cells if name not in records or (retry_failed and not records[name].done)]
    tasks = [_task(cells[name], folder, resources, again=again) for name in missing]
    if not tasks:
        return Outcome(folder, cells, records)
    kept = [record for name, record in records.items() if name not in set(missing)]
    watch.planned(left=len(missing), done=sum(r.done for r in kept), failed=sum(not r.done for r in kept))
    if engine == "ray":
        run_on_ray(tasks, address=address, resources=resources, work=work, watch=watch)
    else:
        memory = max(task.memory for task in tasks)
        slots = local_slots([cells[n] for n in missing], cpus=resources.cpus, memory=memory, workers=workers)
        run_locally(tasks, slots=slots, work=work, watch=watch, retries=resources.retries)
    return Outcome(folder, cells, folder.records(cells))


def _task(cell: Cell, folder: SweepFolder, resources: Resources, *, again: bool) -> CellTask:
    request = request_json(located(cell.request))
    model = {field.name: request[field.name] for field in dataclasses.fields(ModelRequest)}
    texts = {name: value for name, value in request.items() if name not in ("measurement", "options")}
    gib = resources.memory_gib
    return CellTask(
        cell=cell.id,
        described=cell.described,
        request=request,
        model=canonical_json(model),
        texts=canonical_json(texts),
        # Results are removed only once if they are measured anew, by the worker that measures the whole cell.
        documents=1 if again else cell.documents,
        store=folder.place.address,
        sweep=folder.name,
        threads=resources.cpus,
        memory=memory_needed(cell) if gib is None else int(gib * 2**30),
        again=again,
    )
