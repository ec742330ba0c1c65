"""No method: plain extrapolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wherewhat.extend.base import LengthMethod


@dataclass(frozen=True)
class Untouched(LengthMethod):
    """Every query sees every key before it at its true distance, as the model itself does."""

    name: ClassVar[str] = "none"
    rotary: ClassVar[bool] = False
