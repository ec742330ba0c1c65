"""Run a sweep from its file to the last cell."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wherewhat.errors import ConfigError, WherewhatError
from wherewhat.files import canonical_json, text_sha256
from wherewhat.imports import require
from wherewhat.models.source import cache_root
from wherewhat.progress import Silent
from wherewhat.runs.directory import COMPLETE, CONFIG, PROFILES, PROVENANCE, SCORES
from wherewhat.runs.execution import LastModel, measure, prepare
from wherewhat.runs.request import Request
from wherewhat.runs.storage import Folder, Place, open_place
from wherewhat.sweep.cells import Cell, expand, located, request_from_json, request_json
from wherewhat.sweep.engine import (
    MOST_PROCESSES,
    CellTask,
    Resources,
    Watch,
    Work,
    local_slots,
    memory_needed,
    resources_of,
)
from wherewhat.sweep.file import SweepFile
from wherewhat.sweep.local_engine import run_locally
from wherewhat.sweep.ray_engine import run_on_ray
from wherewhat.sweep.records import Record, SweepFolder, finished_elsewhere, sweep_name

_log = logging.getLogger(__name__)
_MODELS = LastModel()
"""One per worker process, which gets cells of one model in sequence."""


def perform(task: CellTask) -> Record:
    """Run a cell and write its record; a cell that was finished meanwhile is not run again."""
    folder = SweepFolder(open_place(task.store), task.sweep)
    known = folder.record(task.cell)
    if known is not None and known.done:
        return known
    import torch

    torch.set_num_threads(task.threads)
    started = time.perf_counter()
    try:
        name = _measured(request_from_json(task.request), folder.place, again=task.again)
        record = Record(state="done", run=name)
    except WherewhatError as error:
        record = Record(state="failed", reason=_line(str(error)))
    except (MemoryError, torch.OutOfMemoryError):
        _MODELS.forget()
        record = Record(state="failed", reason="out of memory: ask for fewer tokens, or a smaller dtype")
    except Exception as error:  # noqa: BLE001 - a bug in one cell must not stop the others; it is recorded
        _log.exception("%s", task.described)
        record = Record(state="failed", reason=_line(f"{type(error).__name__}: {error}"))
    record = dataclasses.replace(record, seconds=time.perf_counter() - started, attempts=task.attempts + 1)
    folder.write(task.cell, record)
    return record


def _measured(request: Request, place: Place, *, again: bool) -> str:
    """Measure a request into a store, and return the name of its run directory."""
    silent = Silent()
    # Runs for a remote store are made in one local folder per store, so that a killed one is resumed.
    local = cache_root() / "sweeps" / text_sha256(place.address)[:12]
    out = place.path if isinstance(place, Folder) else local
    prepared = prepare(request, out=out, progress=silent, models=_MODELS)
    name = prepared.directory.path.name
    if isinstance(place, Folder):
        measure(prepared, progress=silent, models=_MODELS, again=again)
        return name
    # A finished run that still exists locally was not verified after its upload.
    if again or prepared.directory.is_complete or place.read(f"{name}/{COMPLETE}") is None:
        directory = measure(prepared, progress=silent, models=_MODELS, again=again)
        place.upload(directory.path, [CONFIG, PROVENANCE, SCORES, PROFILES, COMPLETE])
    shutil.rmtree(prepared.directory.path, ignore_errors=True)
    return name


def _line(text: str) -> str:
    return " ".join(text.split())[:500]


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
        work: Function that a worker applies to a cell.
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
    model = {name: request[name] for name in ("model", "weights", "seed", "revision", "device", "dtype", "device_map")}
    gib = resources.memory_gib
    return CellTask(
        cell=cell.id,
        described=cell.described,
        request=request,
        model=canonical_json(model),
        store=folder.place.address,
        sweep=folder.name,
        threads=resources.cpus,
        memory=memory_needed(cell) if gib is None else int(gib * 2**30),
        again=again,
    )
