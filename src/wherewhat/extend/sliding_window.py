"""Sliding window (Beltagy et al., arXiv 2004.05150)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.extend.base import LengthMethod, positive


@dataclass(frozen=True)
class SlidingWindow(LengthMethod):
    """A query sees the last L keys, itself among them, at their true distances.

    Attributes:
        window: L; by default the training length.
    """

    name: ClassVar[str] = "sliding-window"
    rotary: ClassVar[bool] = False
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse a window that holds nothing."""
        positive(self.name, window=self.window)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The window is as long as the training."""
        del length
        return self if self.window is not None else replace(self, window=trained)
