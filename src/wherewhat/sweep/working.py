"""What a worker does with a cell: measure it, put the run into the store, and write down last that it is there."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from pathlib import Path

from wherewhat.errors import WherewhatError
from wherewhat.models.paths import cache_root
from wherewhat.pipeline.keeping import LastModel
from wherewhat.pipeline.progress import Silent
from wherewhat.pipeline.request import Request
from wherewhat.store.hashing import text_sha256
from wherewhat.store.layout import COMPLETE, CONFIG, PROFILES, PROVENANCE, SCORES
from wherewhat.sweep.cell import request_from_json
from wherewhat.sweep.engine import Task
from wherewhat.sweep.place import Folder, Remote, open_place
from wherewhat.sweep.records import Record, SweepFolder

_log = logging.getLogger(__name__)
_MODELS = LastModel()
"""One per worker process: cells of one model come in a row."""


def perform(task: Task) -> Record:
    """Run a cell and write its record; a cell that somebody finished meanwhile is left alone.

    Raises:
        StoreError: If the record cannot be written: then nothing of the sweep can be.
    """
    folder = SweepFolder(open_place(task.store), task.sweep)
    known = folder.record(task.cell)
    if known is not None and known.done:
        return known
    import torch

    torch.set_num_threads(task.threads)
    started = time.perf_counter()
    record = Record(state="failed")
    try:
        run = measured(request_from_json(task.request), folder.place)
        record = Record(state="done", run=run)
    except WherewhatError as error:
        record = Record(state="failed", reason=_line(str(error)))
    except (MemoryError, torch.OutOfMemoryError):
        _MODELS.forget()
        record = Record(state="failed", reason="out of memory: ask for fewer tokens, or a smaller dtype")
    except Exception as error:  # noqa: BLE001 - a bug in one cell must not stop the others; it is on record
        _log.exception("%s", task.described)
        record = Record(state="failed", reason=_line(f"{type(error).__name__}: {error}"))
    record = dataclasses.replace(record, seconds=time.perf_counter() - started, attempts=task.attempts + 1)
    folder.write(task.cell, record)
    return record


def measured(request: Request, place: Folder | Remote) -> str:
    """Measure a request into a store.

    Returns:
        Name of the run directory in the store.

    Raises:
        WherewhatError: If anything about the request, the model, the text or the store is wrong.
    """
    from wherewhat.pipeline.running import measure, prepare

    silent = Silent()
    out = place.path if isinstance(place, Folder) else _scratch(place.address)
    prepared = prepare(request, out=out, progress=silent, models=_MODELS)
    name = prepared.directory.path.name
    if isinstance(place, Folder):
        measure(prepared, progress=silent, models=_MODELS)
        return name
    # A finished run that is still here was never seen whole in the store, whatever lies there.
    if prepared.directory.is_complete or place.read(f"{name}/{COMPLETE}") is None:
        directory = measure(prepared, progress=silent, models=_MODELS)
        place.upload(directory.path, [CONFIG, PROVENANCE, SCORES, PROFILES, COMPLETE])
    shutil.rmtree(prepared.directory.path, ignore_errors=True)
    return name


def _scratch(address: str) -> Path:
    """Where runs for a remote store are made: one place per store, so that a killed one goes on where it was."""
    return cache_root() / "sweeps" / text_sha256(address)[:12]


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
