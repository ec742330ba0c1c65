"""Options of the heads measurement."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measure.base import option
from wherewhat.measure.patterns import PatternConfig
from wherewhat.measure.swaps.scores import TAU


@dataclass(frozen=True)
class HeadsConfig(PatternConfig):
    """Options of the heads measurement."""

    queries: int = option(16, "number of queries, spread evenly up to the last; 1 is the last alone, 0 all")
    positions: tuple[int, ...] = option((), "positions of the queries instead; negative ones count from the end")
    tau: float = option(TAU, "temperature of the weights of swaps")
    block: int = option(1, "tokens per swapped block")
    skip: int = option(0, "leave the first so many keys where they are (attention sinks)")
    gamma: float = option(0.1, "pure is a score of at least 1 - gamma beside one of at most gamma")
    taus: tuple[float, ...] = option((1e-3, 1e-2, 1e-1), "other temperatures, to show the sensitivity")
    blocks: tuple[int, ...] = option((2, 8, 32), "other block sizes, to show the sensitivity")
    rerun: bool = option(True, "run layers once per swap whose keys are not made token by token; else leave them out")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        if self.queries < 0:
            raise ConfigError(f"queries is {self.queries}: give a number of queries, or 0 for all")
        if any(tau <= 0 for tau in (self.tau, *self.taus)):
            raise ConfigError(f"tau={min((self.tau, *self.taus)):g} must be positive: it divides the weights of swaps")
        if any(block < 1 for block in (self.block, *self.blocks)):
            raise ConfigError(f"block={min((self.block, *self.blocks))}: a block has at least 1 token")
        if not 0 < self.gamma < 0.5:
            raise ConfigError(f"gamma={self.gamma:g} must be between 0 and 0.5")
        if self.skip < 0:
            raise ConfigError(f"skip={self.skip} must not be negative")
