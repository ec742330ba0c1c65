"""Tables and progress bars on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich import table
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Table(table.Table):
    """A table whose columns go on in the next line where they are too narrow, in place of cutting numbers off."""

    def add_column(self, *args: Any, **options: Any) -> None:
        """As rich's own, with ``overflow="fold"`` unless something else is asked for."""
        super().add_column(*args, **{"overflow": "fold", **options})


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
