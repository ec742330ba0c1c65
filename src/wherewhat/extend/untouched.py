"""No method: plain extrapolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wherewhat.capturing import LayerAttention
from wherewhat.extend.base import BLOCK_MIB, LengthMethod


@dataclass(frozen=True)
class Untouched(LengthMethod):
    """Every query sees every key before it at its true distance, as the model itself does."""

    name: ClassVar[str] = "none"
    rotary: ClassVar[bool] = False

    def attend(self, attention: LayerAttention, *, block_mib: int = BLOCK_MIB) -> Tensor | None:
        """Leave the layer alone."""
        del attention, block_mib
        return None
