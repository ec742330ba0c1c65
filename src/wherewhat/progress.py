"""Where long work tells how far it is. The command line shows it; as a library wherewhat is silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Progress(Protocol):
    """Somebody who is told how far the work is."""

    @property
    def shown(self) -> bool:
        """Whether anybody sees what is told."""

    def say(self, line: str) -> None:
        """Tell one line; empty lines are not told."""

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Go through ``items`` and tell how far it is."""


class Silent:
    """Tells nobody."""

    shown = False

    def say(self, line: str) -> None:
        """Say nothing."""

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Go through ``items``."""
        return iter(items)
