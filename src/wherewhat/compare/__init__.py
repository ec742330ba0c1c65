"""Everything in one or more stores, side by side: means by model, size, checkpoint, weights or encoding, and trends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.lazily import lazy_names

if TYPE_CHECKING:
    from wherewhat.compare.comparing import Comparison, compare

_HOMES = {"Comparison": "wherewhat.compare.comparing", "compare": "wherewhat.compare.comparing"}

__all__ = ["Comparison", "compare"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
