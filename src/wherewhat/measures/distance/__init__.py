"""Controlled distance: logits recomputed at dummy distances; options."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.boundary import MOST_TOKENS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import check_minimum
from wherewhat.options import check_seed, option

_MOST_TIMES = 1 << 20


@dataclass(frozen=True)
class DistanceConfig:
    """Options of the distance measurement."""

    queries: int = option(16, "number of queries, evenly spaced in the second half of the text")
    per_octave: int = option(1, "dummy distances per octave; 1 gives 0, 1, 2, 4, … and the longest in the text")
    beyond: tuple[int, ...] = option((), "also dummy distances at these multiples of the text length, such as 2,4")
    reference: int = option(0, "dummy distance whose key profile the others are compared with, besides the real one")
    block_mib: int = option(64, "memory for one block of key profiles, in MiB")
    keep_mean: bool = option(False, "give random phases in the control only to deviations from the mean key")
    seed: int = option(0, "seed of the control's random phases")

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 1, "queries", "per_octave", "block_mib")
        if self.per_octave > 64:
            raise ConfigError(f"per_octave is {self.per_octave}: more than 64 gives the same distances again")
        check_at_most(_MOST_TIMES, beyond=self.beyond)
        check_at_most(MOST_TOKENS, reference=abs(self.reference))
        if any(times < 2 for times in self.beyond):
            raise ConfigError(f"beyond is {list(self.beyond)}: each must be at least 2 times the text")
        check_seed(self.seed)
