"""Per-plane contributions to the logits: options."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.options import option


@dataclass(frozen=True)
class PlanesConfig:
    """Options of the planes measurement."""

    curves: bool = option(True, "store the statistics of every plane")
