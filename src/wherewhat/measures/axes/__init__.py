"""The additive decomposition of logits into distance, query and key terms: options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wherewhat.measures.measurement import check_minimum
from wherewhat.options import option

Method = Literal["auto", "linear", "blocked"]
"""How the fit is computed: in linear time, in blocks of queries, or whichever is faster."""


HIGH_R = 0.9
"""r above which a head counts as nearly additive."""


@dataclass(frozen=True)
class AxesConfig:
    """Options of the axes measurement."""

    skip: int = option(0, "number of first keys to leave out (attention sinks)")
    min_distance: int = option(0, "leave out smaller distances")
    method: Method = option("auto", "linear, blocked, or auto for the faster one that applies")
    curves: bool = option(True, "store the curves a, b and c of every head")

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 0, "skip", "min_distance")
