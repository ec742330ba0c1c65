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

T = TypeVar("T")


class Table(table.Table):
    """A table with titles on the left, whose narrow columns wrap instead of truncating numbers."""

    def __init__(self, **options: Any) -> None:
        """Create it as rich's table, with other defaults."""
        super().__init__(**{"title_justify": "left", "caption_justify": "left", **options})

    def add_column(self, *args: Any, **options: Any) -> None:
        """Add a column as rich's table, with ``overflow="fold"`` by default."""
        super().add_column(*args, **{"overflow": "fold", **options})


def print_line(console: Console, line: object) -> None:
    """Print a line without markup and without wrapping, so that paths can be copied or read by a script."""
    console.print(str(line), soft_wrap=True, markup=False, highlight=False)


class TerminalProgress:
    """Progress on a terminal; silent in scripts and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def shown(self) -> bool:
        """Whether the output is a terminal."""
        return self._console.is_terminal

    def say(self, line: str) -> None:
        """Show one line, unless it is empty or the output is not a terminal."""
        if line and self.shown:
            self._console.print(line, style="dim", markup=False, highlight=False)

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Iterate over ``items`` with a progress bar and the remaining time."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, disable=not self.shown) as bar:
            yield from bar.track(items, description=label)
