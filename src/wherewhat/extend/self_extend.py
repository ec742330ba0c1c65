"""SelfExtend (Jin et al., arXiv 2401.01325)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.capturing import LayerAttention
from wherewhat.errors import ConfigError
from wherewhat.extend.base import LengthMethod, positive, settled
from wherewhat.extend.far import Far
from wherewhat.extend.sight import Sight, Windowed


@dataclass(frozen=True)
class SelfExtend(LengthMethod):
    """Distances below w are true, and from w on key j is ``⌊i/G⌋ - ⌊j/G⌋ + w - ⌊w/G⌋`` away from query i.

    Attributes:
        window: w; by default a quarter of the training length.
        group: G; by default the smallest that keeps every distance of the text within the training length.
        trained: Training length, needed where the group is left open.
    """

    name: ClassVar[str] = "self-extend"
    window: int | None = None
    group: int | None = None
    trained: int | None = None

    def __post_init__(self) -> None:
        """Refuse groups and windows that hold nothing."""
        positive(self.name, window=self.window, group=self.group, trained=self.trained)
        if self.group is None and self.window is not None and self.trained is not None and self.window >= self.trained:
            raise ConfigError(
                f"{self.name} with window={self.window} leaves no distance below the training length {self.trained} "
                "for groups: give a smaller window, or a group"
            )

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """A quarter of the distances the model knows stay as they are, the rest is shared by groups."""
        known = replace(self, window=self.window or max(1, trained // 4), trained=self.trained or trained)
        return known if length is None else replace(known, group=known.group_for(length))

    def group_for(self, length: int) -> int:
        """The group size for a text of that length."""
        if self.group is not None:
            return self.group
        window = settled(self.name, "window", self.window)
        trained = settled(self.name, "training length", self.trained)
        # The largest distance is ⌊(length - 1)/G⌋ + w - ⌊w/G⌋ and must stay below the training length.
        group = max(1, -(-(length - window) // (trained - window)))
        while (length - 1) // group + window - window // group >= trained and group < length:
            group += 1
        return group

    def sight(self, attention: LayerAttention) -> Sight | None:
        """See :meth:`LengthMethod.sight`."""
        window = settled(self.name, "window", self.window)
        group = self.group_for(attention.m)
        if attention.m <= window or group == 1 or attention.rotation is None:
            return None
        far = Far(
            count=attention.m,
            query=lambda i: i // group + window - window // group,
            key=lambda j: j // group,
        )
        return Windowed(window, far)
