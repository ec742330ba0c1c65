"""Methods with a window: none, sliding window, StreamingLLM, LM-Infinite, ReRoPE, SelfExtend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError
from wherewhat.extend.attention import FarKeys
from wherewhat.extend.method import LengthMethod, required
from wherewhat.extend.visibility import Visibility, Windowed


@dataclass(frozen=True)
class Untouched(LengthMethod):
    """Every query sees every key before it at its true distance, as the model itself does."""

    name: ClassVar[str] = "none"
    rotary: ClassVar[bool] = False


@dataclass(frozen=True)
class SlidingWindow(LengthMethod):
    """A query sees the last L keys, itself among them, at their true distances.

    Attributes:
        window: L; by default the training length.
    """

    name: ClassVar[str] = "sliding-window"
    rotary: ClassVar[bool] = False
    window: int | None = None


@dataclass(frozen=True)
class StreamingLLM(LengthMethod):
    """A query sees the first s keys and the last L as if nothing had been between: places are counted in the cache.

    The query at index i is at position ``min(i, s + L - 1)``, first key j at position j: their distance is constant
    once the cache is full, and differs between first keys.

    Attributes:
        sinks: s, the first keys that are kept.
        window: L, the last keys, the query's own among them; by default the training length minus s.
    """

    name: ClassVar[str] = "streaming-llm"
    sinks: int = 4
    window: int | None = None

    def default_window(self, trained: int) -> int:
        """Return the window that makes the cache as long as the training length."""
        return max(1, trained - self.sinks)

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        if attention.m <= window + self.sinks:
            return None
        last = self.sinks + window - 1
        return Windowed(window, FarKeys(count=self.sinks, query=lambda i: i.clamp(max=last), key=lambda j: j))


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


@dataclass(frozen=True)
class ReRoPE(LengthMethod):
    """A query sees every key before it, and no distance counts as more than w.

    Attributes:
        window: w; by default half the training length.
    """

    name: ClassVar[str] = "rerope"
    window: int | None = None

    def default_window(self, trained: int) -> int:
        """Return half the training length."""
        return max(1, trained // 2)

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        if attention.m <= window or attention.rotation is None:
            return None
        return Windowed(window, FarKeys.capped(attention.m, window))


@dataclass(frozen=True)
class SelfExtend(LengthMethod):
    """Distances below w are true, and from w on key j is ``⌊i/G⌋ - ⌊j/G⌋ + w - ⌊w/G⌋`` away from query i.

    Attributes:
        window: w; by default a quarter of the training length.
        group: G; by default the smallest for which all distances of the text are below the training length.
        trained: Training length, needed without a group.
    """

    name: ClassVar[str] = "self-extend"
    window: int | None = None
    group: int | None = None
    trained: int | None = None

    def __post_init__(self) -> None:
        """Refuse invalid parameters, and a window that covers the training length."""
        super().__post_init__()
        if self.group is None and self.window is not None and self.trained is not None and self.window >= self.trained:
            raise ConfigError(
                f"{self.name} with window={self.window} leaves no distance below the training length {self.trained} "
                "for groups: give a smaller window, or a group"
            )

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """See :meth:`LengthMethod.fitted`."""
        known = replace(self, window=self.window or max(1, trained // 4), trained=self.trained or trained)
        return known if length is None else replace(known, group=known.group_for(length))

    def group_for(self, length: int) -> int:
        """Return the group size for a text of ``length`` tokens."""
        if self.group is not None:
            return self.group
        window = required(self.name, "window", self.window)
        trained = required(self.name, "training length", self.trained)
        # The largest distance is ⌊(length - 1)/G⌋ + w - ⌊w/G⌋ and must stay below the training length.
        group = max(1, -(-(length - window) // (trained - window)))
        while (length - 1) // group + window - window // group >= trained and group < length:
            group += 1
        return group

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """See :meth:`LengthMethod.visibility`."""
        window = required(self.name, "window", self.window)
        group = self.group_for(attention.m)
        if attention.m <= window or group == 1 or attention.rotation is None:
            return None
        shift = window - window // group
        far = FarKeys(count=attention.m, query=lambda i: i // group + shift, key=lambda j: j // group)
        return Windowed(window, far)
