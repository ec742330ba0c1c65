"""Tables and lines on the terminal."""

from __future__ import annotations

from typing import Any

from rich import table
from rich.console import Console


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
