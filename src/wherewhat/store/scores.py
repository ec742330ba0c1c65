"""Score rows: what a measurement hands to the store."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsFloat

from wherewhat.errors import StoreError
from wherewhat.store.schema import KEY_NAMES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One row of `scores.parquet`; `schema.COLUMNS` says what each field means."""

    measurement: str
    model: str
    weights: str
    seed: int
    metric: str
    value: float | None
    document: str | None = None
    layer: int | None = None
    head: int | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreSource:
    """What all rows of one part have in common, and a short way to write them.

    Examples:
        >>> source = ScoreSource(measurement="entropy", model="smollm2", weights="trained", seed=0)
        >>> [row.value for row in source.heads("mean", [1.5, 2.0], layer=0, unit="nat")]
        [1.5, 2.0]
    """

    measurement: str
    model: str
    weights: str
    seed: int
    document: str | None = None

    def score(
        self,
        metric: str,
        value: SupportsFloat | None,
        *,
        layer: int | None = None,
        head: int | None = None,
        low: SupportsFloat | None = None,
        high: SupportsFloat | None = None,
        n: int | None = None,
        unit: str | None = None,
    ) -> Score:
        """One row; numbers may be Python, numpy or zero-dimensional torch numbers."""
        return Score(
            measurement=self.measurement,
            model=self.model,
            weights=self.weights,
            seed=self.seed,
            document=self.document,
            layer=layer,
            head=head,
            metric=metric,
            value=None if value is None else float(value),
            low=None if low is None else float(low),
            high=None if high is None else float(high),
            n=n,
            unit=unit,
        )

    def heads(
        self,
        metric: str,
        values: "Sequence[float | None] | Tensor",
        *,
        layer: int,
        low: "Sequence[float] | Tensor | None" = None,
        high: "Sequence[float] | Tensor | None" = None,
        n: int | None = None,
        unit: str | None = None,
    ) -> list[Score]:
        """One row per head of a layer.

        Args:
            metric: Name of the number.
            values: One number per query head, shape `(heads,)`; None where it is undefined.
            layer: The layer, from 0.
            low: Lower ends of the intervals, shape `(heads,)`.
            high: Upper ends of the intervals, shape `(heads,)`.
            n: Number of observations behind each value.
            unit: Unit of the values.

        Raises:
            ValueError: The shapes differ.
        """
        given, lower, upper = _numbers(values), _numbers(low), _numbers(high)
        lower, upper = (ends or [None] * len(given) for ends in (lower, upper))
        if not len(given) == len(lower) == len(upper):
            raise ValueError(f"{metric}: lengths {len(given)}, {len(lower)}, {len(upper)} of values, low, high")
        return [
            self.score(metric, value, layer=layer, head=head, low=least, high=most, n=n, unit=unit)
            for head, (value, least, most) in enumerate(zip(given, lower, upper, strict=True))
        ]


def _numbers(values: "Sequence[float | None] | Tensor | None") -> list[float | None]:
    if values is None:
        return []
    # One transfer from the device for all heads instead of one per head.
    return list(values) if isinstance(values, Sequence) else values.detach().tolist()


def check_score(row: Score) -> None:
    """Checks what the column types cannot: empty names, NaN, negative places, half intervals.

    Raises:
        StoreError: The row breaks the schema; the line gives the row's key.
    """
    if problem := _problem(row):
        key = ", ".join(f"{name}={getattr(row, name)!r}" for name in KEY_NAMES)
        raise StoreError(f"score row with {key}: {problem}")


def _problem(row: Score) -> str | None:
    for name in ("measurement", "model", "weights", "metric"):
        if not getattr(row, name):
            return f"{name} is empty"
    if row.document == "":
        return "document is empty; use None when no single document is behind the row"
    for name in ("layer", "head", "n"):
        number = getattr(row, name)
        if number is not None and number < 0:
            return f"{name} is negative"
    if row.head is not None and row.layer is None:
        return "a head needs a layer"
    for name in ("value", "low", "high"):
        number = getattr(row, name)
        if number is not None and math.isnan(number):
            return f"{name} is NaN; use None where a number is undefined"
    if (row.low is None) != (row.high is None):
        return "low and high come together or not at all"
    if row.low is not None and row.high is not None and row.low > row.high:
        return "low is above high"
    return None
