"""Scores and curves of a run, and the files that store them: `scores.parquet` and `profiles.safetensors`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from wherewhat.errors import StoreError
from wherewhat.files import explain, open_regular, write_file
from wherewhat.hashes import canonical_json

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


SCHEMA_VERSION = 2
"""Version of the files in a run directory: score columns, profile names and part layout together."""

VERSION_KEY = "wherewhat.schema"
"""Key of the version in the metadata of Parquet and safetensors files."""


@dataclass(frozen=True)
class Column:
    """One column of `scores.parquet`.

    Attributes:
        name: Column name.
        type: Logical type; strings are stored dictionary-encoded.
        nullable: Whether the column may hold null.
        key: Whether the column belongs to the key; no two rows share all key columns.
        meaning: One sentence for the documentation.
    """

    name: str
    type: Literal["string", "int32", "int64", "float64"]
    nullable: bool
    key: bool
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column("measurement", "string", False, True, "Name of the measurement."),
    Column("model", "string", False, True, "Name of the model, as requested."),
    Column("weights", "string", False, True, "Which weights: `trained`, `random` or `shuffled`."),
    Column("seed", "int64", False, True, "Seed of the run, also of random and shuffled weights."),
    Column("document", "string", True, True, "Name of the document; null for all documents together."),
    Column("layer", "int32", True, True, "Layer, from 0; null for the model as a whole."),
    Column("head", "int32", True, True, "Query head, from 0; null for the layer or the model as a whole."),
    Column("metric", "string", False, True, "Name of the metric."),
    Column("value", "float64", True, False, "The number; null where it is undefined, never NaN."),
    Column("unit", "string", True, False, "Unit of the value, such as `nats` or `tokens`; null for a pure number."),
)

KEY_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.key)
"""Key columns in sort order: rows are sorted by them, ascending, null last, strings by code point."""


def arrow_schema(*, encoded: bool = True) -> pa.Schema:
    """Return the Arrow schema of the score table; strings are dictionary-encoded, as stored, or plain, as they sort."""
    import pyarrow as pa

    types = {"int32": pa.int32(), "int64": pa.int64(), "float64": pa.float64()}
    types["string"] = pa.dictionary(pa.int32(), pa.string()) if encoded else pa.string()
    fields = [pa.field(column.name, types[column.type], nullable=column.nullable) for column in COLUMNS]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION)})


def is_current(version: object, path: Path) -> bool:
    """Return whether a file has the schema version of this package, or an older one; raise for a newer one."""
    if not isinstance(version, int) or version < 1:
        raise StoreError(f"cannot read {path}: it has no wherewhat schema version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, newer than {SCHEMA_VERSION} known here: upgrade wherewhat"
        )
    return version == SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class ScoreSource:
    """The columns that all rows of one part share.

    Examples:
        >>> source = ScoreSource(measurement="entropy", model="smollm2", weights="trained", seed=0)
        >>> [row.value for row in source.heads("mean", [1.5, 2.0], layer=0, unit="nats")]
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
        unit: str | None = None,
    ) -> Score:
        """Return one row; the value may be a Python, NumPy or zero-dimensional torch number."""
        number = None if value is None else float(value)
        return Score(**vars(self), metric=metric, value=number, layer=layer, head=head, unit=unit)

    def heads(
        self, metric: str, values: Sequence[float | None] | Tensor, *, layer: int, unit: str | None = None
    ) -> list[Score]:
        """Return one row per query head of a layer, from values of shape ``(heads,)``; None where undefined."""
        # One transfer from the device for all heads instead of one per head.
        given = values if isinstance(values, Sequence) else values.detach().tolist()
        return [self.score(metric, value, layer=layer, head=head, unit=unit) for head, value in enumerate(given)]


@dataclass(frozen=True, kw_only=True)
class Score(ScoreSource):
    """One row of `scores.parquet`; :data:`COLUMNS` says what each field means."""

    metric: str
    value: float | None
    layer: int | None = None
    head: int | None = None
    unit: str | None = None


def _problem(row: Score) -> str | None:
    """Return what is wrong with a row that the column types cannot express: empty names, NaN, negative indices."""
    for name in ("measurement", "model", "weights", "metric"):
        if not getattr(row, name):
            return f"{name} is empty"
    if row.document == "":
        return "document is empty; use None for all documents together"
    for name in ("layer", "head"):
        number = getattr(row, name)
        if number is not None and number < 0:
            return f"{name} is negative"
    if row.head is not None and row.layer is None:
        return "a head needs a layer"
    if row.value is not None and math.isnan(row.value):
        return "value is NaN; use None where a number is undefined"
    return None


def score_table(scores: Iterable[Score]) -> pa.Table:
    """Check rows and return them as a sorted, dictionary-encoded table."""
    import pyarrow as pa

    rows = list(scores)
    for row in rows:
        if problem := _problem(row):
            key = ", ".join(f"{name}={getattr(row, name)!r}" for name in KEY_NAMES)
            raise StoreError(f"score row with {key}: {problem}")
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
    """Join score tables into one that depends only on the set of rows, not on their order."""
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
    """Return a score table as a Parquet file; equal tables give equal bytes with one version of pyarrow."""
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
    """Read a score table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Opened as one file, so that folders named like `a=b` are not taken for partitions.
        with open_regular(path) as file:
            table = pq.ParquetFile(file).read()
    except (OSError, pa.ArrowException) as error:
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise StoreError(f"cannot read {path}: {reason}") from error
    version = (table.schema.metadata or {}).get(VERSION_KEY.encode(), b"").decode()
    if not is_current(int(version) if version.isdecimal() else None, path):
        raise StoreError(f"{path} has schema version {version}, older than {SCHEMA_VERSION}: run its command again")
    if not table.schema.equals(arrow_schema()):
        raise StoreError(f"cannot read {path}: its columns are not those of schema {SCHEMA_VERSION}")
    return table


# One metadata entry for everything: safetensors writes several in no fixed order, and bytes must be reproducible.
_METADATA_KEY = "wherewhat"
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class Profile:
    """A curve, or several curves, of one layer.

    Attributes:
        values: Tensor with one dimension per axis. NaN marks an empty bin.
        axes: What each dimension is, such as `("head", "distance")`.
    """

    values: Tensor
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != len(self.axes):
            raise ValueError(f"{len(self.axes)} axes {self.axes} for shape {tuple(self.values.shape)}")


def profile_name(document: str | None, layer: int | None, curve: str) -> str:
    """Return the name of a curve: `<document>/<layer>/<curve>`, with `-` for no document and for no layer."""
    if not curve or "/" in curve:
        raise StoreError(f"the curve name {curve!r} is empty or holds a slash: choose another")
    return f"{'-' if document is None else document}/{'-' if layer is None else layer}/{curve}"


def write_profiles(path: Path, profiles: Mapping[str, Profile]) -> None:
    """Write curves atomically; the bytes depend on names, axes and values alone."""
    from safetensors.torch import save

    tensors = {}
    for name in sorted(profiles):
        _check_name(name)
        tensor = profiles[name].values.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise StoreError(f"the curve {name!r} has type {dtype}: use one of {', '.join(_DTYPES)}")
        # A copy where two curves may share memory, which safetensors refuses.
        tensors[name] = tensor.clone() if tensor is profiles[name].values else tensor
    axes = {name: list(profiles[name].axes) for name in tensors}
    metadata = {_METADATA_KEY: canonical_json({"axes": axes, VERSION_KEY: SCHEMA_VERSION})}
    write_file(path, save(tensors, metadata))


def join_profiles(path: Path, sources: Sequence[Path]) -> None:
    """Join curve files into one, atomically."""
    joined: dict[str, Profile] = {}
    for source in sources:
        file = ProfileFile(source)
        for name in file:
            if name in joined:
                raise StoreError(f"two parts hold the curve {name!r}: give every curve its own name")
            joined[name] = Profile(file[name], file.axes(name))
    write_profiles(path, joined)


def _check_name(name: str) -> None:
    document, layer, curve = ["", "", "", *name.rsplit("/", 2)][-3:]
    if not (document and curve and (layer == "-" or layer.isdecimal())):
        raise StoreError(f"the curve name {name!r} is not <document>/<layer>/<curve>: use profile_name()")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise StoreError(f"the curve name {name!r} is not valid Unicode: rename the document")


class ProfileFile(Mapping[str, "Tensor"]):
    """The curves of a run by name, each read from the file on access."""

    def __init__(self, path: Path) -> None:
        """Open a file that `write_profiles` or `join_profiles` wrote."""
        self.path = path
        with self._open() as file:
            try:
                details = json.loads((file.metadata() or {})[_METADATA_KEY])
                self._axes = {name: tuple(details["axes"][name]) for name in sorted(file.keys())}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StoreError(f"cannot read {path}: it is not a file of wherewhat profiles") from error
        is_current(details.get(VERSION_KEY), path)  # curves are the same in older versions

    def __getitem__(self, name: str) -> Tensor:
        """The curve `name`; its dimensions are `axes(name)`."""
        if name not in self._axes:
            raise KeyError(name)
        with self._open() as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def axes(self, name: str) -> tuple[str, ...]:
        """What each dimension of the curve `name` is."""
        return self._axes[name]

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            open_regular(self.path).close()  # safetensors would wait for the writer of a pipe
            return safe_open(self.path, framework="pt")
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {explain(error)}") from error
        except SafetensorError as error:
            raise StoreError(f"cannot read {self.path}: it is not a file of wherewhat profiles") from error
