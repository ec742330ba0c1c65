"""Tables and lines on the terminal."""

from __future__ import annotations

from typing import Any

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult

from wherewhat.errors import printable, printable_lines


class Table(table.Table):
    """A table with titles on the left, whose narrow columns wrap instead of truncating numbers.

    Control characters of names are shown by their code; a cell or a caption may have several lines.
    """

    def __init__(self, **options: Any) -> None:
        """Create it as rich's table, with other defaults."""
        super().__init__(**{"title_justify": "left", "caption_justify": "left", **options})

    def add_column(self, *args: Any, **options: Any) -> None:
        """Add a column as rich's table, with ``overflow="fold"`` by default."""
        super().add_column(*map(_printable, args), **{"overflow": "fold", **options})

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row as rich's table."""
        super().add_row(*map(_printable, cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.title, self.caption = _printable(self.title), _printable(self.caption)
        return super().__rich_console__(console, options)


def print_line(console: Console, line: object, *, wrap: bool = False, style: str | None = None) -> None:
    """Print a line without markup, with control characters shown by their code.

    Args:
        console: Where to print.
        line: The line.
        wrap: Whether to wrap it at words. Paths are not, so that they can be copied or read by a script.
        style: Style of the line.
    """
    console.print(printable(str(line)), soft_wrap=not wrap, markup=False, highlight=False, style=style)


def _printable(value: Any) -> Any:
    return printable_lines(value) if isinstance(value, str) else value
