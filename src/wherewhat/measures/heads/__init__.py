"""Positional and symbolic scores of heads, and attention patterns: options."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.boundary import MOST_TOKENS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import check_minimum
from wherewhat.measures.swaps import SINK, TAU
from wherewhat.options import option


@dataclass(frozen=True)
class AttentionConfig:
    """Options of the attention measurement."""

    sink_tokens: int = option(1, "number of first tokens that count as attention sink")
    block_mib: int = option(32, "memory for one block of attention weights, in MiB")

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 1, "sink_tokens", "block_mib")


@dataclass(frozen=True)
class PatternConfig(AttentionConfig):
    """Options of the pattern statistics."""

    max_lag: int = option(256, "largest distance between query and key at which slashes are searched")

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_minimum(self, 1, "max_lag")


@dataclass(frozen=True)
class HeadsConfig(PatternConfig):
    """Options of the heads measurement."""

    queries: int = option(16, "number of queries, spread evenly up to the last; 1 for the last alone, 0 for all")
    positions: tuple[int, ...] = option((), "positions of the queries instead; negative ones count from the end")
    tau: float = option(TAU, "temperature of the swap weights")
    block: int = option(1, "tokens per swapped block")
    skip: int = option(0, "number of first keys that are never swapped (attention sinks)")
    gamma: float = option(0.1, "heads are pure with one score of at least 1 - gamma and the other at most gamma")
    sink_threshold: float = option(
        SINK, "heads are sinks with at least this much more attention on the first tokens than uniform attention"
    )
    taus: tuple[float, ...] = option((1e-3, 1e-2, 1e-1), "other temperatures, for the sensitivity")
    blocks: tuple[int, ...] = option((2, 8, 32), "other block sizes, for the sensitivity")
    rerun: bool = option(True, "run layers whose keys depend on several tokens once per swap; else leave them out")

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_minimum(self, 0, "queries", "skip")
        if any(tau <= 0 for tau in (self.tau, *self.taus)):
            raise ConfigError(f"tau={min((self.tau, *self.taus)):g} must be positive: it divides weight differences")
        if any(block < 1 for block in (self.block, *self.blocks)):
            raise ConfigError(f"block={min((self.block, *self.blocks))}: a block has at least 1 token")
        check_at_most(MOST_TOKENS, block=self.block, blocks=self.blocks, positions=self.positions)
        if not 0 < self.gamma < 0.5:
            raise ConfigError(f"gamma={self.gamma:g} must be between 0 and 0.5")
        if not 0 < self.sink_threshold < 1:
            raise ConfigError(f"sink_threshold={self.sink_threshold:g} must be between 0 and 1: it is a share")


PAIRS = {
    "corr_pos_sym_no_sink": ("s_pos_no_sink", "s_sym_no_sink"),
    "corr_pos_frequency_softmax_no_sink": ("s_pos_no_sink", "mean_frequency_softmax"),
    "corr_sym_frequency_softmax_no_sink": ("s_sym_no_sink", "mean_frequency_softmax"),
    "corr_pos_sym": ("s_pos", "s_sym"),
    "corr_pos_frequency_softmax": ("s_pos", "mean_frequency_softmax"),
    "corr_sym_frequency_softmax": ("s_sym", "mean_frequency_softmax"),
    "corr_pos_frequency": ("s_pos", "mean_frequency"),
    "corr_sym_frequency": ("s_sym", "mean_frequency"),
    "corr_pos_distance": ("s_pos", "r_a"),
    "corr_sym_key": ("s_sym", "r_c"),
    "corr_pos_r": ("s_pos", "r"),
}
"""Correlations over heads, by name."""
