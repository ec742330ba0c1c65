"""A sweep on the terminal: cells done, running and failed, the time left, and where Ray's dashboard is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from wherewhat.sweep.engine import Task
    from wherewhat.sweep.records import Record

_RUNNING_SHOWN, _FAILED_SHOWN = 8, 3


class SweepView:
    """Shows a sweep to a person; keeps quiet where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._shown = console.is_terminal
        self._total = self._done = self._failed = self._ended = 0
        self._started = time.monotonic()
        self._workers = ""
        self._dashboard: str | None = None
        self._running: Sequence[str] = ()
        self._failures: list[str] = []
        # It asks for what to show at once, so it comes last.
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self.render)

    def __enter__(self) -> SweepView:
        """Begin to show."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the view away."""
        if self._shown:
            self._live.stop()

    def planned(self, *, left: int, done: int, failed: int) -> None:
        """So many cells will be run; so many ended earlier."""
        self._total, self._done, self._failed = left + done + failed, done, failed

    def begin(self, *, workers: str, dashboard: str | None) -> None:
        """The workers are there."""
        self._workers, self._dashboard, self._started = workers, dashboard, time.monotonic()

    def running(self, cells: Sequence[str]) -> None:
        """These cells are under way."""
        self._running = cells

    def finished(self, task: Task, record: Record) -> None:
        """A cell has ended."""
        self._ended += 1
        self._done += record.done
        self._failed += not record.done
        if not record.done:
            self._failures.append(f"{task.described}: {record.reason}")

    def time_left(self) -> float | None:
        """Seconds until the last cell ends, at the pace so far; None before the first one has."""
        if not self._ended:
            return None
        left = self._total - self._done - self._failed
        return left * (time.monotonic() - self._started) / self._ended

    def render(self) -> Group:
        """The view as it is now."""
        from wherewhat.pipeline.estimate import duration

        left = self.time_left()
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row(
            Text(f"{self._done:,} of {self._total:,} done", style="green"),
            Text(f"{len(self._running):,} running", style="cyan"),
            Text(f"{self._failed:,} failed", style="red" if self._failed else "dim"),
            Text("time left unknown" if left is None else f"about {duration(left)} left"),
            Text(self._workers, style="dim"),
        )
        lines: list[ProgressBar | Table | Text] = [
            ProgressBar(total=max(1, self._total), completed=self._done + self._failed),
            numbers,
        ]
        for cell in self._running[:_RUNNING_SHOWN]:
            if cell:
                lines.append(Text(f"  {cell}", style="cyan", overflow="ellipsis", no_wrap=True))
        for line in self._failures[-_FAILED_SHOWN:]:
            lines.append(Text(f"  failed: {line}", style="red", overflow="ellipsis", no_wrap=True))
        if self._dashboard:
            lines.append(Text(f"  Ray's dashboard: {self._dashboard}", style="dim"))
        return Group(*lines)
