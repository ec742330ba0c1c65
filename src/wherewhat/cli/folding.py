"""Tables that keep all their digits in a narrow terminal."""

from __future__ import annotations

from typing import Any

from rich import table


class Table(table.Table):
    """A table whose columns go on in the next line where they are too narrow, in place of cutting numbers off."""

    def add_column(self, *args: Any, **options: Any) -> None:
        """As rich's own, with ``overflow="fold"`` unless something else is asked for."""
        super().add_column(*args, **{"overflow": "fold", **options})
