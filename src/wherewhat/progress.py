"""Progress of long work. The command line shows it; the library is silent by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

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
