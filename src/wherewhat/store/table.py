"""The Parquet table of scores: made from rows, joined from parts, written and read."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wherewhat.errors import StoreError
from wherewhat.store.schema import (
    COLUMNS,
    KEY_NAMES,
    SCHEMA_VERSION,
    VERSION_KEY,
    arrow_schema,
    check_version,
)
from wherewhat.store.scores import Score, check_score

if TYPE_CHECKING:
    import pyarrow as pa


def score_table(scores: Iterable[Score]) -> "pa.Table":
    """Checks rows and makes the sorted, dictionary-encoded table of them.

    Raises:
        StoreError: A row breaks the schema; the line names the first such row.
    """
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


def join_tables(tables: "Sequence[pa.Table]") -> "pa.Table":
    """Joins score tables into one that depends only on the set of rows, not on their order.

    Raises:
        StoreError: Two rows have the same key.
    """
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


def encode_scores(table: "pa.Table") -> bytes:
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


def read_scores(path: Path) -> "pa.Table":
    """Reads a score table.

    Raises:
        StoreError: The file is missing, is no score table, or has a newer schema.
    """
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
