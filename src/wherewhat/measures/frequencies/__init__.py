"""Which RoPE frequencies a head uses: options."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wherewhat.boundary import MOST_REPEATS
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import check_minimum
from wherewhat.measures.swaps import TAU
from wherewhat.options import option

BANDS = 4


@dataclass(frozen=True)
class FrequenciesConfig:
    """Options of the frequencies measurement."""

    queries: int = option(2, "number of queries, spread evenly up to the last; 0 for all")
    tau: float = option(TAU, "temperature of the swap weights")
    bands: int = option(BANDS, "number of bands of the planes, sorted by frequency; band 1 is the fastest")
    masking: bool = option(True, "also measure the model with each band removed, and with only that band")
    heads: tuple[str, ...] = option((), "heads to mask, as layer.head, such as 3.1,5.0; all if empty")
    sink_tokens: int = option(1, "number of first tokens that count as attention sink")
    block_mib: int = option(64, "memory for one block of logits, in MiB")
    unrotate: bool = option(
        False,
        "also measure the model with planes un-rotated (angle 0), and the plane with the largest norm",
        later=True,
    )
    massive: bool = option(
        False,
        "also measure massive values of queries and keys, and the model with these replaced by their means",
        later=True,
    )
    retrieval: bool = option(
        False,
        "also measure which heads read planted sequences, and how much is read with their slowest planes changed",
        later=True,
    )

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 0, "queries")
        check_minimum(self, 1, "sink_tokens")
        check_minimum(self, 1, "bands", "block_mib", most=MOST_REPEATS)
        if not self.tau > 0:
            raise ConfigError(f"tau is {self.tau}: it must be positive, because it divides weight differences")
        for head in self.heads:
            if not re.fullmatch(r"[0-9]{1,6}\.[0-9]{1,6}", head):
                raise ConfigError(f"heads holds {head!r}: give layer.head, such as 3.1 for head 1 of layer 3")
