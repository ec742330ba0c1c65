"""``wherewhat sweep``: many models, checkpoints, texts and measurements, into one store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape

from wherewhat.cli.folding import Table

if TYPE_CHECKING:
    from wherewhat.sweep.running import Engine
    from wherewhat.sweep.status import Status

_SHOWN = 20

_File = Annotated[Path | None, typer.Argument(metavar="FILE", help="The sweep file: TOML, YAML or JSON.")]
_Engine = Annotated[str, typer.Option(help="local (this machine's devices) or ray (a Ray cluster).")]
_Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="A Ray cluster that is running; else one is started here.")
]
_Workers = Annotated[
    int | None, typer.Option(help="Local worker processes (default: one per GPU, or what CPU and memory allow).")
]
_Store = Annotated[
    str | None, typer.Option("--store", metavar="DIR", help="Folder or fsspec address of the results (default: runs).")
]
_ShowStatus = Annotated[bool, typer.Option("--status", help="Show how far the sweep is, or all sweeps of the store.")]
_RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Also run cells that failed before.")]


def sweep(
    file: _File = None,
    engine: _Engine = "local",
    address: _Address = None,
    workers: _Workers = None,
    store: _Store = None,
    status: _ShowStatus = False,
    retry_failed: _RetryFailed = False,
) -> int:
    """Measure every combination of models, weights, checkpoints, texts, measurements and seeds of a sweep file.

    Everything in the file is checked before the first cell runs. Cells that are in the store already are skipped; a
    cell that fails is recorded with its reason and does not stop the others. The same command goes on with what is
    missing. Exit code 1 says that cells failed.
    """
    console = Console()
    if status:
        _show_status(console, file, store)
        return 0
    if file is None:
        raise typer.BadParameter("FILE is missing: give a sweep file, or --status")
    from wherewhat.cli.sweep_view import SweepView
    from wherewhat.sweep.file import read_sweep_file
    from wherewhat.sweep.running import sweep as run_sweep

    with SweepView(Console(stderr=True)) as view:
        outcome = run_sweep(
            read_sweep_file(file),
            watch=view,
            store=store,
            engine=cast("Engine", engine),
            address=address,
            workers=workers,
            retry_failed=retry_failed,
        )
    failed = [(outcome.cells[cell].described, record.reason or "") for cell, record in outcome.failed.items()]
    _show_failed(console, failed)
    done = sum(record.done for record in outcome.records.values())
    console.print(f"{done} of {len(outcome.cells)} cells done, {len(failed)} failed", highlight=False)
    console.print(outcome.folder.place.address, soft_wrap=True, markup=False, highlight=False)
    return 1 if failed else 0


def _show_status(console: Console, file: Path | None, store: str | None) -> None:
    from wherewhat.errors import StoreError
    from wherewhat.sweep.file import DEFAULT_STORE, read_sweep_file
    from wherewhat.sweep.place import open_place
    from wherewhat.sweep.status import statuses

    read = None if file is None else read_sweep_file(file)
    place = open_place(store or (read.store if read else DEFAULT_STORE))
    found = statuses(place, file_sha256=read.sha256 if read else None)
    if not found:
        of = f"of {file} as it is now" if file else "at all"
        raise StoreError(f"the store {place.address} has no sweep {of}: start it with wherewhat sweep FILE")
    console.print(_table(found))
    for one in found:
        _show_failed(console, one.failed)


def _table(found: list[Status]) -> Table:
    table = Table()
    for column in ("sweep", "folder"):
        table.add_column(column)
    for column in ("cells", "done", "failed", "left"):
        table.add_column(column, justify="right")
    for one in found:
        numbers = (len(one.cells), one.done, len(one.failed), len(one.cells) - len(one.records))
        table.add_row(escape(one.name), escape(one.folder), *(f"{number:,}" for number in numbers))
    return table


def _show_failed(console: Console, failed: Sequence[tuple[str, str]]) -> None:
    for described, reason in failed[:_SHOWN]:
        console.print(f"failed: {described}: {reason}", soft_wrap=True, markup=False, highlight=False)
    if len(failed) > _SHOWN:
        console.print(f"… and {len(failed) - _SHOWN} more failed", highlight=False)
