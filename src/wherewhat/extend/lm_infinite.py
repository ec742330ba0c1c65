"""LM-Infinite (Han et al., arXiv 2308.16137)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.extend.base import LengthMethod, positive


@dataclass(frozen=True)
class LMInfinite(LengthMethod):
    """A query sees the first s keys and the last L (a Λ-shaped mask), and no distance counts as more than L.

    Attributes:
        sinks: s, the first keys that stay visible.
        window: L, the last keys, the query's own among them, and the cap; by default the training length.
    """

    name: ClassVar[str] = "lm-infinite"
    sinks: int = 10
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse a mask that shows nothing."""
        positive(self.name, sinks=self.sinks, window=self.window)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The window is as long as the training."""
        del length
        return self if self.window is not None else replace(self, window=trained)
