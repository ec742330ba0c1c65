"""StreamingLLM (Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.capturing import LayerAttention
from wherewhat.extend.base import LengthMethod, positive, settled
from wherewhat.extend.far import Far
from wherewhat.extend.sight import Sight, Windowed


@dataclass(frozen=True)
class StreamingLLM(LengthMethod):
    """A query sees the first s keys and the last L as if nothing had been between: places are counted in the cache.

    The query at index i stands at place ``min(i, s + L - 1)``, first key j at place j: their distance stops growing
    once the cache is full, and differs between first keys.

    Attributes:
        sinks: s, the first keys that are kept.
        window: L, the last keys, the query's own among them; by default what the training length leaves beside s.
    """

    name: ClassVar[str] = "streaming-llm"
    sinks: int = 4
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse a cache that holds nothing."""
        positive(self.name, sinks=self.sinks, window=self.window)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The cache is as long as the training."""
        del length
        return self if self.window is not None else replace(self, window=max(1, trained - self.sinks))

    def sight(self, attention: LayerAttention) -> Sight | None:
        """See :meth:`LengthMethod.sight`."""
        window = settled(self.name, "window", self.window)
        if attention.m <= window + self.sinks:
            return None
        last = self.sinks + window - 1
        far = Far(count=self.sinks, query=lambda i: i.clamp(max=last), key=lambda j: j)
        return Windowed(window, far)
