"""Progress of long work, on a terminal, in a notebook, or nowhere; time spans and numbers in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from wherewhat.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress messages."""

    @property
    def shown(self) -> bool:
        """Whether messages are displayed."""

    def say(self, line: str) -> None:
        """Show one line; ignore an empty one."""

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Iterate over ``items`` and show how many are done."""


class Silent:
    """Progress that shows nothing."""

    shown = False

    def say(self, line: str) -> None:
        """Ignore the line."""

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Iterate over ``items``."""
        return iter(items)


class TerminalProgress:
    """Progress on a terminal (standard error by default), in a notebook without bars; silent in scripts and logs."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)

    @property
    def shown(self) -> bool:
        """Whether the output is a terminal or a notebook."""
        return self._console.is_terminal or self._console.is_jupyter

    def say(self, line: str) -> None:
        """Show one line, unless it is empty or nobody would see it."""
        if line and self.shown:
            self._console.print(printable(line), style="dim", markup=False, highlight=False)

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Iterate over ``items`` with a progress bar and the remaining time."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            yield from bar.track(items, description=printable(label))


def duration(seconds: float) -> str:
    """Return a time span in words: ``40 s``, ``3 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def counted(count: int, word: str) -> str:
    """Return a number with its noun, such as ``2 layers``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
