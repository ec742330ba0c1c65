"""Records of a sweep in its store, and its status."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from wherewhat.errors import StoreError
from wherewhat.files import HASH_DIGITS, JSON, canonical_json, parse_object, readable_json, text_sha256
from wherewhat.runs.storage import Place

SWEEPS = "sweeps"
SWEEP = "sweep.json"
CELLS = "cells"
LOADS = "loads"
PARTS = "parts"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """The outcome of a cell.

    Attributes:
        state: ``done`` or ``failed``.
        run: Name of its run directory in the store; None where it failed.
        reason: Why it failed, in one line.
        seconds: Wall time of the last attempt; loading counts for the first cell of a job.
        attempts: Number of attempts; those in which the worker died together with other cells are not counted.
    """

    state: Literal["done", "failed"]
    run: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    attempts: int = 1

    @property
    def done(self) -> bool:
        """Whether its scores are in the store."""
        return self.state == "done"


class SweepFolder:
    """``sweeps/<hash>/`` in a store.

    Attributes:
        place: The store.
        name: Hash of the names of all cells.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name

    def begin(self, cells: Mapping[str, Mapping[str, Any]], *, title: str, file_sha256: str) -> None:
        """Write the list of cells."""
        content: dict[str, Any] = {"schema": SCHEMA, "name": title, "file_sha256": file_sha256, "cells": dict(cells)}
        self.place.write(self._path(SWEEP), canonical_json(content).encode() + b"\n")

    def content(self) -> dict[str, Any]:
        """Return the content of ``sweep.json``."""
        content = parse_object(self.place.read(self._path(SWEEP)) or b"")
        where = f"{self.place.address}/{self._path(SWEEP)}"
        cells: Any = content.get("cells") if content is not None else None
        if content is None or not isinstance(cells, dict) or not all(isinstance(cell, dict) for cell in cells.values()):
            raise StoreError(f"{where} is missing or damaged: start its sweep again, finished cells are kept")
        if content.get("schema") != SCHEMA:
            raise StoreError(f"{where} has version {content.get('schema')}, not {SCHEMA}: upgrade wherewhat")
        return dict(content)

    def records(self, cells: Iterable[str]) -> dict[str, Record]:
        """Return the records of cells that have one, with one listing and one read of existing files."""
        wanted = {f"{cell}.json": cell for cell in cells}
        there = [name for name in self.place.names(self._path(CELLS)) if name in wanted]
        contents = self.place.read_many(self._path(f"{CELLS}/{name}") for name in there)
        records = {wanted[path.rpartition("/")[2]]: _record(content) for path, content in contents.items()}
        return {cell: record for cell, record in records.items() if record is not None}

    def record(self, cell: str) -> Record | None:
        """Return the record of one cell; None if it has none."""
        content = self.place.read(self._path(f"{CELLS}/{cell}.json"))
        return None if content is None else _record(content)

    def write(self, cell: str, record: Record) -> None:
        """Write the record of a cell."""
        self.place.write(self._path(f"{CELLS}/{cell}.json"), readable_json(asdict(record)))

    def parts(self, run: str) -> str:
        """Return the folder of finished parts of a run that workers of a remote store exchange."""
        return self._path(f"{PARTS}/{run}")

    def write_load(self, **facts: JSON) -> None:
        """Write that a worker loaded a model."""
        self.place.write(self._path(f"{LOADS}/{secrets.token_hex(8)}.json"), readable_json(facts))

    def loads(self) -> int:
        """Return how often workers loaded a model."""
        return len(self.place.names(self._path(LOADS)))

    def forget(self, cells: Iterable[str]) -> None:
        """Mark cells as not run, in this sweep and in all others of the store that have a record of them."""
        wanted = list(cells)
        for folder in sweep_folders(self.place):
            for cell in folder.records(wanted):
                self.place.write(folder._path(f"{CELLS}/{cell}.json"), readable_json({"state": "again"}))

    def _path(self, name: str) -> str:
        return f"{SWEEPS}/{self.name}/{name}"


def sweep_name(cells: Iterable[str]) -> str:
    """Return the name of the folder of a sweep with these cells, in any order."""
    return text_sha256(canonical_json(sorted(cells)))[:HASH_DIGITS]


def sweep_folders(place: Place) -> list[SweepFolder]:
    """Return all sweeps of a store."""
    return [SweepFolder(place, name) for name in place.names(SWEEPS)]


def finished_elsewhere(place: Place, cells: Iterable[str], *, but: str) -> dict[str, Record]:
    """Return records of cells that other sweeps of the store have done, for a sweep file that was extended."""
    missing = set(cells)
    finished: dict[str, Record] = {}
    for folder in sweep_folders(place):
        if folder.name != but and missing:
            finished |= {cell: record for cell, record in folder.records(missing).items() if record.done}
            missing -= set(finished)
    return finished


def _record(content: bytes) -> Record | None:
    """Return a record from its file; None if it is damaged, so that the cell is run again."""
    values = parse_object(content)
    if values is None or values.get("state") not in ("done", "failed"):
        return None
    try:
        return Record(**values)  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclass(frozen=True)
class Status:
    """The progress of a sweep.

    Attributes:
        name: Name of the sweep file.
        folder: Name of its folder in the store.
        cells: Its cells, as in ``sweep.json``.
        records: Records of the cells that ended.
        file_sha256: Hash of the sweep file it was started from.
        loads: How often its workers loaded a model.
    """

    name: str
    folder: str
    cells: Mapping[str, Mapping[str, Any]]
    records: Mapping[str, Record]
    file_sha256: str
    loads: int

    @property
    def done(self) -> int:
        """Number of cells whose scores are in the store."""
        return sum(record.done for record in self.records.values())

    @property
    def failed(self) -> list[tuple[str, str]]:
        """Descriptions of failed cells with their reasons; cells that differ in options only share a description."""
        failed = [(cell, record) for cell, record in self.records.items() if not record.done]
        return [(str(self.cells[cell].get("described", cell)), record.reason or "") for cell, record in failed]


def statuses(place: Place, *, file_sha256: str | None = None) -> list[Status]:
    """Return the progress of the sweeps of a store: of all, or of those started from the file with this hash."""
    folders = []
    for folder in sweep_folders(place):
        content = folder.content()
        if file_sha256 in (None, content.get("file_sha256")):
            cells = content["cells"]
            records = folder.records(cells)
            name, sha256 = str(content.get("name")), str(content.get("file_sha256"))
            folders.append(Status(name, folder.name, cells, records, sha256, folder.loads()))
    return folders
