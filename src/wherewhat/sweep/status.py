"""How far the sweeps of a store are, from one listing and the small files it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wherewhat.sweep.place import Place
from wherewhat.sweep.records import Record, sweep_folders


@dataclass(frozen=True)
class Status:
    """How far a sweep is.

    Attributes:
        name: What the sweep is called: the name of its file.
        folder: Name of its folder in the store.
        cells: Its cells, as in ``sweep.json``.
        records: How those ended that did.
        file_sha256: Hash of the sweep file it was started from.
    """

    name: str
    folder: str
    cells: Mapping[str, Mapping[str, Any]]
    records: Mapping[str, Record]
    file_sha256: str

    @property
    def done(self) -> int:
        """Cells whose numbers are in the store."""
        return sum(record.done for record in self.records.values())

    @property
    def failed(self) -> list[tuple[str, str]]:
        """Cells that failed, in words, and why; cells that differ only in options have the same words."""
        failed = [(cell, record) for cell, record in self.records.items() if not record.done]
        return [(str(self.cells[cell].get("described", cell)), record.reason or "") for cell, record in failed]


def statuses(place: Place, *, file_sha256: str | None = None) -> list[Status]:
    """How far the sweeps of a store are.

    Args:
        place: The store.
        file_sha256: Only those that were started from the sweep file with this hash.

    Raises:
        StoreError: If the store cannot be read.
    """
    found = []
    for folder in sweep_folders(place):
        content = folder.content()
        if file_sha256 in (None, content["file_sha256"]):
            cells = content["cells"]
            records = folder.records(cells)
            found.append(Status(content["name"], folder.name, cells, records, content["file_sha256"]))
    return found
