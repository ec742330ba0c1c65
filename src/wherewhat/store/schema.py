"""The contract of `scores.parquet`: its columns, their types and what they mean.

Raise `SCHEMA_VERSION` whenever a reader of an older file could misread a newer one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wherewhat.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

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


def arrow_schema(*, encoded: bool = True) -> "pa.Schema":
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
    """Refuses what this version cannot read.

    Raises:
        StoreError: `version` is not a schema version, or newer than this package knows.
    """
    if not isinstance(version, int) or version < 1:
        raise StoreError(f"cannot read {path}: it has no wherewhat schema version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, newer than {SCHEMA_VERSION} known here: upgrade wherewhat"
        )
