"""ReRoPE, rectified rotary position embedding (Su, 2023, kexue.fm/archives/9708)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.capturing import LayerAttention
from wherewhat.extend.base import LengthMethod, positive, settled
from wherewhat.extend.far import capped
from wherewhat.extend.sight import Sight, Windowed


@dataclass(frozen=True)
class ReRoPE(LengthMethod):
    """A query sees every key before it, and no distance counts as more than w.

    Attributes:
        window: w; by default half the training length.
    """

    name: ClassVar[str] = "rerope"
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse a window that holds nothing."""
        positive(self.name, window=self.window)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """Half of the distances the model knows stay as they are."""
        del length
        return self if self.window is not None else replace(self, window=max(1, trained // 2))

    def sight(self, attention: LayerAttention) -> Sight | None:
        """See :meth:`LengthMethod.sight`."""
        window = settled(self.name, "window", self.window)
        if attention.m <= window or attention.rotation is None:
            return None
        return Windowed(window, capped(attention.m, window))
