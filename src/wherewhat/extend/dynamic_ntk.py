"""Dynamic NTK scaling (emozilla, 2023; described in Peng et al., arXiv 2309.00071, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from wherewhat.capturing import LayerAttention
from wherewhat.extend.base import LengthMethod, positive, settled
from wherewhat.extend.ntk import ntk_rotation
from wherewhat.extend.rescaled import Turned
from wherewhat.extend.sight import Sight


@dataclass(frozen=True)
class DynamicNTK(LengthMethod):
    """Each query sees its keys with NTK-aware frequencies for the text up to it, unchanged up to the training length.

    The factor of the query at index i is ``(i + 1) / trained``, with the excess over the training length rounded up to
    whole steps. It depends on what has been read and not on what is still to come, so that reading a text at once and
    writing it token by token agree; implementations that take the length of the whole pass do not have this property.

    Attributes:
        step: Tokens after which the frequencies change; 1 follows the rule to the letter and is slow.
        trained: Training length.
    """

    name: ClassVar[str] = "dynamic-ntk"
    step: int = 64
    trained: int | None = None

    def __post_init__(self) -> None:
        """Refuse steps that do not go on."""
        positive(self.name, step=self.step, trained=self.trained)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The training length is the model's."""
        del length
        return self if self.trained is not None else replace(self, trained=trained)

    def sight(self, attention: LayerAttention) -> Sight | None:
        """See :meth:`LengthMethod.sight`."""
        trained = settled(self.name, "training length", self.trained)
        if attention.rotation is None or attention.m <= trained:
            return None
        first, start = attention.m - attention.n, 0
        pieces = []
        while start < attention.n:
            steps = max(0, -(-(first + start + 1 - trained) // self.step))
            length = trained + steps * self.step
            rows = slice(start, min(attention.n, length - first))
            pieces.append((rows, ntk_rotation(attention.rotation, length / trained)))
            start = rows.stop
        return Turned(tuple(pieces))
