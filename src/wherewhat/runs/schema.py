"""The schema of `scores.parquet`: score rows, the table they form, reading and writing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, SupportsFloat

from wherewhat.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


SCHEMA_VERSION = 1
"""Version of the files in a run directory: score columns, profile names and part layout together."""

VERSION_KEY = "wherewhat.schema"
"""Key under which the version stands in the metadata of Parquet and safetensors files."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of `scores.parquet`.

    Attributes:
        name: Column name.
        type: Logical type; strings are stored dictionary-encoded.
        nullable: Whether null may stand in the column.
        key: Whether the column belongs to the key; no two rows share all key columns.
        meaning: One sentence for the documentation.
    """

    name: str
    type: Literal["string", "int32", "int64", "float64"]
    nullable: bool
    key: bool
    meaning: str


def _key(name: str, type_: Literal["string", "int32", "int64"], nullable: bool, meaning: str) -> Column:
    return Column(name=name, type=type_, nullable=nullable, key=True, meaning=meaning)


def _field(name: str, type_: Literal["string", "int64", "float64"], meaning: str) -> Column:
    return Column(name=name, type=type_, nullable=True, key=False, meaning=meaning)


COLUMNS: tuple[Column, ...] = (
    _key("measurement", "string", False, "Name of the measurement that made the row."),
    _key("model", "string", False, "The model as it was asked for."),
    _key("weights", "string", False, "Which weights: `trained`, `random` or `shuffled`."),
    _key("seed", "int64", False, "Seed of the run, which also made random and shuffled weights."),
    _key("document", "string", True, "Name of the document; null when no single document is behind the row."),
    _key("layer", "int32", True, "Layer, from 0; null for the model as a whole."),
    _key("head", "int32", True, "Query head, from 0; null for the layer or the model as a whole."),
    _key("metric", "string", False, "Which number of the measurement this is."),
    _field("value", "float64", "The number; null when it is undefined here, never NaN."),
    _field("low", "float64", "Lower end of the interval around the value; null when there is none."),
    _field("high", "float64", "Upper end of the interval around the value; null when there is none."),
    _field("n", "int64", "Number of observations behind the value; null when counting makes no sense."),
    _field("unit", "string", "Unit of value, low and high, such as `nat` or `token`; null for a pure number."),
)

KEY_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.key)
"""Key columns in sort order: rows are sorted by them, ascending, null last, strings by code point."""


def arrow_schema(*, encoded: bool = True) -> pa.Schema:
    """The Arrow schema of the score table.

    Args:
        encoded: Strings as dictionaries, the way they are stored, or plain, the way they sort and join.
    """
    import pyarrow as pa

    types = {"int32": pa.int32(), "int64": pa.int64(), "float64": pa.float64()}
    types["string"] = pa.dictionary(pa.int32(), pa.string()) if encoded else pa.string()
    fields = [pa.field(column.name, types[column.type], nullable=column.nullable) for column in COLUMNS]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION)})


def check_version(version: object, path: Path) -> None:
    """Refuses what this version cannot read."""
    if not isinstance(version, int) or version < 1:
        raise StoreError(f"cannot read {path}: it has no wherewhat schema version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, newer than {SCHEMA_VERSION} known here: upgrade wherewhat"
        )


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
        values: Sequence[float | None] | Tensor,
        *,
        layer: int,
        low: Sequence[float] | Tensor | None = None,
        high: Sequence[float] | Tensor | None = None,
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
        """
        given, lower, upper = _numbers(values), _numbers(low), _numbers(high)
        lower, upper = (ends or [None] * len(given) for ends in (lower, upper))
        if not len(given) == len(lower) == len(upper):
            raise ValueError(f"{metric}: lengths {len(given)}, {len(lower)}, {len(upper)} of values, low, high")
        return [
            self.score(metric, value, layer=layer, head=head, low=least, high=most, n=n, unit=unit)
            for head, (value, least, most) in enumerate(zip(given, lower, upper, strict=True))
        ]


def _numbers(values: Sequence[float | None] | Tensor | None) -> list[float | None]:
    if values is None:
        return []
    # One transfer from the device for all heads instead of one per head.
    return list(values) if isinstance(values, Sequence) else values.detach().tolist()


def check_score(row: Score) -> None:
    """Checks what the column types cannot: empty names, NaN, negative places, half intervals."""
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


def score_table(scores: Iterable[Score]) -> pa.Table:
    """Checks rows and makes the sorted, dictionary-encoded table of them."""
    import pyarrow as pa

    rows = list(scores)
    for row in rows:
        check_score(row)
    plain = arrow_schema(encoded=False)
    columns = []
    for field in plain:
        try:
            column = pa.array([getattr(row, field.name) for row in rows], field.type)
        except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError) as error:
            reason = str(error).splitlines()[0]
            raise StoreError(f"score column {field.name} is not {field.type} in every row: {reason}") from error
        if column.null_count and not field.nullable:
            raise StoreError(f"score column {field.name} is null in {column.null_count} rows: give it a value")
        columns.append(column)
    return join_tables([pa.Table.from_arrays(columns, schema=plain)])


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Joins score tables into one that depends only on the set of rows, not on their order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    plain = arrow_schema(encoded=False)
    table = pa.concat_tables([table.cast(plain) for table in tables])
    keys = list(KEY_NAMES)
    counts = table.select(keys).group_by(keys, use_threads=False).aggregate([([], "count_all")])
    doubles = counts.filter(pc.greater(counts["count_all"], 1))
    if doubles.num_rows:
        first = doubles.slice(0, 1).to_pylist()[0]
        raise StoreError(f"score rows share one key: {', '.join(f'{k}={first[k]!r}' for k in keys)}")
    order = pc.sort_indices(table, sort_keys=[(key, "ascending") for key in keys])
    # One chunk, so that the dictionaries hold the strings in order of their first row and nothing else.
    return table.take(order).combine_chunks().cast(arrow_schema())


def encode_scores(table: pa.Table) -> bytes:
    """The Parquet file of a score table; equal tables give equal bytes with one version of pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        row_group_size=1 << 20,
        use_dictionary=[column.name for column in COLUMNS if column.type == "string"],
        store_schema=True,
    )
    return bytes(sink.getvalue())


def read_scores(path: Path) -> pa.Table:
    """Reads a score table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Opened as one file, so that names like `a=b` on the way to it are not taken for partitions.
        with path.open("rb") as file:
            table = pq.ParquetFile(file).read()
    except (OSError, pa.ArrowException) as error:
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise StoreError(f"cannot read {path}: {reason}") from error
    version = (table.schema.metadata or {}).get(VERSION_KEY.encode(), b"").decode()
    check_version(int(version) if version.isdecimal() else None, path)
    if not table.schema.equals(arrow_schema()):
        raise StoreError(f"cannot read {path}: its columns are not those of schema {SCHEMA_VERSION}")
    return table
