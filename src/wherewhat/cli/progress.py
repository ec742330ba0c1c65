"""Progress on the terminal, on standard error, silent where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


class TerminalProgress:
    """Shows lines and bars to a person; keeps quiet in scripts and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def shown(self) -> bool:
        """Whether there is a terminal."""
        return self._console.is_terminal

    def say(self, line: str) -> None:
        """Show one line, if there is anything to say and anyone to see it."""
        if line and self.shown:
            self._console.print(line, style="dim", markup=False, highlight=False)

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Go through ``items`` behind a bar with the time left."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, disable=not self.shown) as bar:
            yield from bar.track(items, description=label)
