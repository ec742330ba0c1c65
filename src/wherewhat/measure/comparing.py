"""Things that a run measures side by side, such as methods, with a verdict on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Estimate(Protocol):
    """A mean over documents with its 95 % interval; the bounds are None where documents are too few for one."""

    @property
    def mean(self) -> float:
        """The mean."""

    @property
    def low(self) -> float | None:
        """Lower bound."""

    @property
    def high(self) -> float | None:
        """Upper bound."""


@dataclass(frozen=True)
class Compared:
    """One of the things compared.

    Attributes:
        name: Its name.
        metrics: Names of its metrics by title of the column they stand in.
        verdict: What the numbers come to, in words.
    """

    name: str
    metrics: Mapping[str, str]
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """All of them.

    Attributes:
        what: What they are, as the title of a column.
        rows: One entry each, all with the same columns.
        notes: What holds for all of them.
    """

    what: str
    rows: tuple[Compared, ...]
    notes: tuple[str, ...]
