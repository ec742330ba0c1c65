"""``wherewhat sweep``, and its live view."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from wherewhat.boundary import user_path
from wherewhat.cli import options
from wherewhat.cli.tables import Table, print_line
from wherewhat.errors import printable

if TYPE_CHECKING:
    from wherewhat.sweep.engine import CellTask
    from wherewhat.sweep.execution import Engine
    from wherewhat.sweep.records import Record, Status


_RUNNING_SHOWN, _FAILED_SHOWN, _SHOWN = 8, 3, 20


class SweepView:
    """Live view of a sweep on a terminal; silent elsewhere."""

    def __init__(self, console: Console) -> None:
        self._shown = console.is_terminal
        self._total = self._done = self._failed = self._ended = 0
        self._started = time.monotonic()
        self._workers = ""
        self._dashboard: str | None = None
        self._running: Sequence[str] = ()
        self._failures: list[str] = []
        # Renders at once, so it is created last.
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self.render)

    def __enter__(self) -> SweepView:
        """Start the view."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the view."""
        if self._shown:
            self._live.stop()

    def planned(self, *, left: int, done: int, failed: int) -> None:
        """Set the number of cells to run, and of cells that ended earlier."""
        self._total, self._done, self._failed = left + done + failed, done, failed

    def begin(self, *, workers: str, dashboard: str | None) -> None:
        """Set the description of the workers."""
        self._workers, self._dashboard, self._started = workers, dashboard, time.monotonic()

    def running(self, cells: Sequence[str]) -> None:
        """Set the running cells."""
        self._running = cells

    def finished(self, task: CellTask, record: Record) -> None:
        """Count a finished cell."""
        self._ended += 1
        self._done += record.done
        self._failed += not record.done
        if not record.done:
            self._failures.append(f"{task.described}: {record.reason}")

    def time_left(self) -> float | None:
        """Return the estimated seconds until the last cell ends; None before the first one ended."""
        if not self._ended:
            return None
        left = self._total - self._done - self._failed
        return left * (time.monotonic() - self._started) / self._ended

    def render(self) -> Group:
        """Return the current view."""
        from wherewhat.progress import duration

        left = self.time_left()
        numbers = Grid.grid(padding=(0, 2))
        numbers.add_row(
            Text(f"{self._done:,} of {self._total:,} done", style="green"),
            Text(f"{len(self._running):,} running", style="cyan"),
            Text(f"{self._failed:,} failed", style="red" if self._failed else "dim"),
            Text("time left unknown" if left is None else f"about {duration(left)} left"),
            Text(self._workers, style="dim"),
        )
        lines: list[ProgressBar | Grid | Text] = [
            ProgressBar(total=max(1, self._total), completed=self._done + self._failed),
            numbers,
        ]
        for cell in self._running[:_RUNNING_SHOWN]:
            if cell:
                lines.append(Text(printable(f"  {cell}"), style="cyan", overflow="ellipsis", no_wrap=True))
        for line in self._failures[-_FAILED_SHOWN:]:
            lines.append(Text(printable(f"  failed: {line}"), style="red", overflow="ellipsis", no_wrap=True))
        if self._dashboard:
            lines.append(Text(f"  Ray's dashboard: {self._dashboard}", style="dim"))
        return Group(*lines)


_File = Annotated[str | None, typer.Argument(metavar="FILE", help="The sweep file: TOML, YAML or JSON.")]
_Engine = Annotated[str, typer.Option(help="local (this machine's devices) or ray (a Ray cluster).")]
_Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="A running Ray cluster (default: start one on this machine).")
]
_Workers = Annotated[
    int | None, typer.Option(help="Local worker processes (default: one per GPU, or what CPU and memory allow).")
]
_Store = Annotated[
    str | None, typer.Option("--store", metavar="DIR", help="Folder or fsspec address of the results (default: runs).")
]
_ShowStatus = Annotated[bool, typer.Option("--status", help="Show the progress of the sweep, or of all in the store.")]
_RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Also run cells that failed before.")]


def sweep(
    file: _File = None,
    engine: _Engine = "local",
    address: _Address = None,
    workers: _Workers = None,
    store: _Store = None,
    status: _ShowStatus = False,
    retry_failed: _RetryFailed = False,
    again: options.Again = False,
) -> int:
    """Measure every combination of models, weights, checkpoints, texts, measurements and seeds of a sweep file.

    $ wherewhat sweep study.toml

    The whole file is checked before the first cell runs. Cells that are already in the store are skipped; a cell that
    fails is recorded with its reason and does not stop the others. The same command resumes an interrupted sweep. Exit
    code 1 means that cells failed.
    """
    console = Console()
    if status:
        _show_status(console, file, store)
        return 0
    if file is None:
        raise typer.BadParameter("FILE is missing: give a sweep file, or --status")
    from wherewhat.sweep.execution import sweep as run_sweep
    from wherewhat.sweep.file import read_sweep_file

    with SweepView(Console(stderr=True)) as view:
        outcome = run_sweep(
            read_sweep_file(user_path(file, name="FILE")),
            watch=view,
            store=store,
            engine=cast("Engine", engine),
            address=address,
            workers=workers,
            retry_failed=retry_failed,
            again=again,
        )
    failed = [(outcome.cells[cell].described, record.reason or "") for cell, record in outcome.failed.items()]
    _show_failed(console, failed)
    done = sum(record.done for record in outcome.records.values())
    console.print(f"{done} of {len(outcome.cells)} cells done, {len(failed)} failed", highlight=False)
    print_line(console, outcome.folder.place.address)
    return 1 if failed else 0


def _show_status(console: Console, file: str | None, store: str | None) -> None:
    from wherewhat.errors import StoreError
    from wherewhat.runs.storage import open_place
    from wherewhat.sweep.file import DEFAULT_STORE, read_sweep_file
    from wherewhat.sweep.records import statuses

    read = None if file is None else read_sweep_file(user_path(file, name="FILE"))
    place = open_place(store or (read.store if read else DEFAULT_STORE))
    sweeps = statuses(place, file_sha256=read.sha256 if read else None)
    if not sweeps:
        of = f"of {file} as it is now" if file else "at all"
        raise StoreError(f"the store {place.address} has no sweep {of}: start it with wherewhat sweep FILE")
    console.print(_table(sweeps))
    for status in sweeps:
        _show_failed(console, status.failed)


def _table(statuses: list[Status]) -> Table:
    table = Table()
    for column in ("sweep", "folder", "cells", "done", "failed", "left", "loads"):
        table.add_column(column, justify="left" if column in ("sweep", "folder") else "right")
    for status in statuses:
        left = len(status.cells) - len(status.records)
        numbers = (len(status.cells), status.done, len(status.failed), left, status.loads)
        table.add_row(escape(status.name), escape(status.folder), *(f"{number:,}" for number in numbers))
    return table


def _show_failed(console: Console, failed: Sequence[tuple[str, str]]) -> None:
    for described, reason in failed[:_SHOWN]:
        print_line(console, f"failed: {described}: {reason}")
    if len(failed) > _SHOWN:
        console.print(f"… and {len(failed) - _SHOWN} more failed", highlight=False)
