"""Position and content parts of queries, keys and logits: options."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.measures.measurement import check_minimum
from wherewhat.options import option

LEAST_DOCUMENTS = 3
"""Smallest number of documents: the mean of two others has an estimate of its noise."""


@dataclass(frozen=True)
class SplitConfig:
    """Options of the split measurement."""

    skip: int = option(1, "number of first tokens to leave out (the first is often the same in every document)")

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 0, "skip")
