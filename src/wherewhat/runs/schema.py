"""The files that store scores and curves: `scores.parquet` and `profiles.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wherewhat.errors import StoreError
from wherewhat.files import JSON, explain, open_regular, plain_json, write_parts
from wherewhat.scores import MODEL, Column, Metric, Scores

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


SCHEMA_VERSION = 3
"""Version of the files in a run directory: score columns, profile names and part layout together."""

VERSION_KEY = "wherewhat.schema"
"""Key of the version in the metadata of Parquet and safetensors files."""


@dataclass(frozen=True)
class StoredColumn:
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


COLUMNS: tuple[StoredColumn, ...] = (
    StoredColumn("measurement", "string", False, True, "Name of the measurement."),
    StoredColumn("model", "string", False, True, "Name of the model, as requested."),
    StoredColumn("weights", "string", False, True, "Which weights: `trained`, `random` or `shuffled`."),
    StoredColumn("seed", "int64", False, True, "Seed of the run, also of random and shuffled weights."),
    StoredColumn("document", "string", True, True, "Name of the document; null for all documents together."),
    StoredColumn("layer", "int32", True, True, "Layer, from 0; null for the model as a whole."),
    StoredColumn("head", "int32", True, True, "Query head, from 0; null for the layer or the model as a whole."),
    StoredColumn("metric", "string", False, True, "Name of the metric."),
    StoredColumn("value", "float64", True, False, "The number; null where it is undefined, never NaN."),
    StoredColumn("unit", "string", True, False, "Unit, such as `nats` or `tokens`; null for a pure number."),
    StoredColumn("category", "string", True, False, "Name of a value that is a category; null for numbers."),
)

KEY_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS if column.key)
"""Key columns in sort order: rows are sorted by them, ascending, null last, strings by code point."""


def arrow_schema() -> pa.Schema:
    """Return the Arrow schema of the score table, as stored: strings are dictionary-encoded."""
    import pyarrow as pa

    types = {"int32": pa.int32(), "int64": pa.int64(), "float64": pa.float64()}
    types["string"] = pa.dictionary(pa.int32(), pa.string())
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


def score_table(scores: Mapping[str | None, Scores], source: Mapping[str, JSON]) -> pa.Table:
    """Return checked scores by document as one sorted table; nothing is done per number.

    Of several documents it is what :func:`join_tables` returns of their tables.

    Args:
        scores: What :meth:`~wherewhat.scores.Scores.checked` returned, by document; under None of all together.
        source: The columns that all rows share: measurement, model, weights and seed.
    """
    import numpy as np
    import pyarrow as pa
    import torch

    documents = sorted((name for name in scores if scores[name].names), key=_null_last)
    declared = {name: metric for part in scores.values() for name, metric in part.metrics.items()}

    def content(place: tuple[int, Scores]) -> tuple[list[str], list[str], int]:
        """Return the metrics of heads, those of the whole, and the number of heads."""
        part = place[1]
        return sorted(part.heads), sorted(part.whole), len(next(iter(part.heads.values()), ()))

    places = [(number, part) for number, name in enumerate(documents) for part in scores[name]]
    # Layers mostly have the same rows, sorted by head and then metric; those of the layer as a whole come last.
    groups = [(*rows, [*alike]) for rows, alike in groupby(places, key=content)]
    names = [*dict.fromkeys(name for named, whole, count, _ in groups for name in [*(named if count else ()), *whole])]
    if len(scores) == 1:  # as in the files of single documents, whose bytes stay the same
        names.sort()
    codes = {name: code for code, name in enumerate(names)}
    values, keys = [np.empty(0)], [np.empty((4, 0), np.int32)]
    for named, whole, count, alike in groups:
        group = [part for _, part in alike]
        numbers = [np.array([[part.whole[name] for name in whole] for part in group], np.float64)]
        if named:
            by_metric = torch.stack([part.heads[name] for part in group for name in named])
            numbers.insert(0, by_metric.view(len(group), len(named), count).mT.reshape(len(group), -1).numpy())
        values.append(np.concatenate(numbers, 1).ravel())
        rows = np.empty((4, len(group), count * len(named) + len(whole)), np.int32)
        rows[:2] = np.array([(number, part.layer) for number, part in alike]).T[..., None]
        rows[2] = [*np.repeat(np.arange(count), len(named)), *[MODEL] * len(whole)]
        rows[3] = [codes[name] for name in [*named * count, *whole]]
        keys.append(rows.reshape(4, -1))
    value = np.concatenate(values)
    document, layer, head, metric = np.concatenate(keys, 1)
    category = _categories(declared, codes, metric, value)
    columns = {
        "document": _in_order(_encoded(document, documents)),
        "layer": pa.array(layer, mask=layer == MODEL),
        "head": pa.array(head, mask=head == MODEL),
        "metric": _encoded(metric, names),
        "value": pa.array(value, mask=np.isnan(value)),
        "unit": _encoded(metric, [declared[name].unit or None for name in names]),
        "category": category if len(scores) == 1 else _in_order(category),
    }
    for column in COLUMNS:
        if column.name in source:
            columns[column.name] = _constant(source[column.name], column, len(value))
    return pa.Table.from_arrays([columns[column.name] for column in COLUMNS], schema=arrow_schema())


def _null_last(name: str | None) -> tuple[bool, str]:
    """Return the place of a document among others."""
    return name is None, name or ""


def _encoded(codes: Any, names: Sequence[str | None]) -> pa.Array:
    """Return strings by their codes, dictionary-encoded; None is null."""
    import numpy as np

    words = list(dict.fromkeys(name for name in names if name is not None))
    places = {name: place for place, name in enumerate(words)}
    chosen = np.array([MODEL if name is None else places[name] for name in names], np.int32)[codes]
    try:
        return _dictionary(chosen, words)
    except UnicodeEncodeError as error:
        raise StoreError(f"{error.object!r} is not valid Unicode: choose another name") from error


def _categories(metrics: Mapping[str, Metric], codes: Mapping[str, int], metric: Any, value: Any) -> pa.Array:
    """Return the name of each value that is a category; null for numbers and undefined categories."""
    import numpy as np

    names: list[str | None] = [None]
    indices = np.zeros(len(value), np.int64)
    for name, code in codes.items():
        if categories := metrics[name].categories:
            rows = (metric == code) & (value >= 0)
            indices[rows] = len(names) + value[rows].astype(np.int64)
            names += categories
    return _encoded(indices, names)


def _constant(value: JSON, column: StoredColumn, count: int) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    if column.type == "string":
        return _encoded(np.zeros(count, np.int64), [None if value is None else str(value)])
    return pa.array(np.full(count, value, column.type))


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Join score tables into one that depends only on the set of rows, not on their order."""
    import numpy as np
    import pyarrow as pa

    def place(table: pa.Table) -> list[tuple[bool, str]]:
        return [_null_last(name) for name in table["document"].slice(0, 1).to_pylist()]

    # Tables of single documents are sorted, so that together they are in the order of their names.
    table = pa.concat_tables(sorted(tables, key=place)).unify_dictionaries().combine_chunks()
    keys = [_ranks(table[name].combine_chunks()) for name in KEY_NAMES]
    same = _ties(keys)
    if same is None:
        order = np.lexsort(keys[::-1])
        table, keys = table.take(pa.array(order)), [key[order] for key in keys]
        same = _ties(keys)
    if same.any():
        first = table.slice(int(same.argmax()), 1).to_pylist()[0]
        raise StoreError(f"score rows share one key: {', '.join(f'{k}={first[k]!r}' for k in KEY_NAMES)}")
    columns = [column.combine_chunks() for column in table.columns]
    columns = [_in_order(column) if pa.types.is_dictionary(column.type) else column for column in columns]
    return pa.Table.from_arrays(columns, schema=arrow_schema())


def _ties(keys: Sequence[Any]) -> Any:
    """Return for each row but the first whether its keys are those of the row before; None if rows are not sorted."""
    import numpy as np

    same = np.ones(max(0, len(keys[0]) - 1), bool)
    for key in keys:
        if (same & (key[1:] < key[:-1])).any():
            return None
        same &= key[1:] == key[:-1]
    return same


def _in_order(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return the same strings with a dictionary that holds them in order of their first row, and nothing else."""
    import numpy as np
    import pyarrow.compute as pc

    words = column.dictionary.to_pylist()
    if len(words) < 2 and column.null_count == (0 if words else len(column)):  # all rows are the same
        return column
    codes = pc.fill_null(column.indices, len(words)).to_numpy()
    first = np.full(len(words) + 1, len(codes))
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # of equal codes the last one stays: their first row
    present = [place for place in np.argsort(first[:-1], kind="stable") if first[place] < len(codes)]
    places = np.full(len(words) + 1, MODEL, np.int32)
    places[present] = np.arange(len(present), dtype=np.int32)
    return _dictionary(places[codes], [words[place] for place in present])


def _dictionary(places: Any, words: Sequence[str]) -> pa.DictionaryArray:
    """Return strings by their places among words; :data:`MODEL` is null."""
    import pyarrow as pa

    missing = places == MODEL
    indices = pa.array(places, mask=missing if missing.any() else None)  # without nulls there is no copy
    return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))


def _ranks(column: pa.Array) -> Any:
    """Return numbers in the order of a key column's values, strings by code point; null comes last."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        words = column.dictionary.to_pylist()
        ranks = {word: rank for rank, word in enumerate(sorted(words))}
        order = np.array([*(ranks[word] for word in words), len(words)])
        return order[pc.fill_null(column.indices, len(words)).to_numpy()]
    return pc.fill_null(column, pa.scalar(np.iinfo(np.int32).max, column.type)).to_numpy()


def stored_scores(table: pa.Table | None, profiles: ProfileFile | None = None) -> dict[str | None, Scores]:
    """Return the scores of a sorted table by document, and curves if given; undefined values are NaN."""
    by_document = {} if table is None else _stored_numbers(table)
    for title, curves in ({} if profiles is None else profiles.columns()).items():
        layers = by_document.setdefault(title, {})
        for index, named in curves.items():
            layers[index] = replace(layers.get(index, Scores(layer=index)), curves=named)
    return {
        title: replace(
            layers.get(MODEL, Scores()), layers=[layers[index] for index in sorted(layers) if index != MODEL]
        )
        for title, layers in by_document.items()
    }


class TableArrays(NamedTuple):
    """A score table as NumPy arrays.

    Attributes:
        documents: Names of documents; None, for all documents together, is the last.
        metrics: Names of metrics.
        document: Index of the document of each row.
        layer: Its layer; :data:`~wherewhat.scores.MODEL` for the model as a whole.
        head: Its head; :data:`~wherewhat.scores.MODEL` for the layer as a whole.
        metric: Index of its metric.
        value: Its value; NaN where it is undefined.
    """

    documents: list[str | None]
    metrics: list[str]
    document: Any
    layer: Any
    head: Any
    metric: Any
    value: Any


def table_arrays(table: pa.Table) -> TableArrays:
    """Return the rows of a score table as arrays."""
    import pyarrow.compute as pc

    table = table.unify_dictionaries()
    metrics, titles = (table[name].combine_chunks() for name in ("metric", "document"))
    documents = [*titles.dictionary.to_pylist(), None]
    document = pc.fill_null(titles.indices, len(documents) - 1).to_numpy()
    layer, head = (pc.fill_null(table[name], MODEL).to_numpy() for name in ("layer", "head"))
    value = pc.fill_null(table["value"], float("nan")).to_numpy()
    return TableArrays(
        documents, metrics.dictionary.to_pylist(), document, layer, head, metrics.indices.to_numpy(), value
    )


def _stored_numbers(table: pa.Table) -> dict[str | None, dict[int, Scores]]:
    """Return the scores of a sorted table by document and layer."""
    import numpy as np
    import torch

    titles, names, document, layer, head, metric, value = table_arrays(table)
    # Rows of one layer of one document, and of its heads or of itself, are neighbours.
    group = np.stack([document, layer, head == MODEL])
    starts = np.flatnonzero((group[:, 1:] != group[:, :-1]).any(0)) + 1
    by_document: dict[str | None, dict[int, Scores]] = {}
    for rows in map(slice, [0, *starts] if len(value) else [], [*starts, len(value)]):
        layers, index = by_document.setdefault(titles[document[rows.start]], {}), int(layer[rows.start])
        layer_scores = layers.get(index, Scores(layer=index))
        if head[rows.start] == MODEL:
            whole = dict(zip([names[code] for code in metric[rows]], value[rows].tolist(), strict=True))
            layers[index] = replace(layer_scores, whole=whole)
            continue
        count = int(head[rows][-1]) + 1
        codes = metric[rows].reshape(count, -1) if not len(metric[rows]) % count else metric[rows][:, None]
        if len(codes) != count or (codes != codes[0]).any():
            raise StoreError(f"layer {index} has other metrics for some of its {count} heads: run the command again")
        columns = torch.from_numpy(value[rows].reshape(count, -1).T.copy()).unbind()
        layers[index] = replace(layer_scores, heads=dict(zip((names[code] for code in codes[0]), columns, strict=True)))
    return by_document


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
        write_statistics=False,
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
_DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""Types of curves, and their names in safetensors."""

_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL")
"""The order in which safetensors stores types."""


_BLOCK = 2**23
"""Most bytes of curves that are copied to be written at once."""


def profile_name(document: str | None, layer: int, curve: str) -> str:
    """Return the name of a curve: `<document>/<layer>/<curve>`, with `-` for no document and for the whole model."""
    if not curve or "/" in curve:
        raise StoreError(f"the curve name {curve!r} is empty or holds a slash: choose another")
    return f"{'-' if document is None else document}/{'-' if layer == MODEL else layer}/{curve}"


def score_profiles(scores: Scores, document: str | None) -> dict[str, Column]:
    """Return the curves of one document by the names under which they are stored."""
    return {profile_name(document, part.layer, name): curve for part in scores for name, curve in part.curves.items()}


def write_profiles(path: Path, profiles: Mapping[str, Column]) -> dict[str, JSON]:
    """Write curves atomically, as safetensors does, and return the file's fingerprint."""
    return write_parts(path, encode_profiles(profiles))


def encode_profiles(profiles: Mapping[str, Column]) -> Iterator[Any]:
    """Return curves as the blocks of bytes of a safetensors file, each of which is made when it is asked for.

    The bytes depend on names, axes and values alone.
    """
    ordered: list[tuple[int, str, str, Tensor]] = []
    for name, column in profiles.items():
        _check_name(name)
        values = column.values.detach().cpu()
        kind = str(values.dtype).removeprefix("torch.")
        if kind not in _DTYPES:
            raise StoreError(f"the curve {name!r} has type {kind}: use one of {', '.join(_DTYPES)}")
        ordered.append((_ORDER.index(_DTYPES[kind]), name, _DTYPES[kind], values))
    ordered.sort(key=lambda entry: entry[:2])
    axes = {name: list(column.axes) for name, column in profiles.items()}
    first: dict[str, str] = {}  # thousands of curves have a few axes, which are checked once each
    for name, of_curve in axes.items():
        first.setdefault(repr(of_curve), name)
    plain_json({"axes": {name: axes[name] for name in first.values()}})
    content = {"axes": axes, VERSION_KEY: SCHEMA_VERSION}
    details = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    header: dict[str, Any] = {"__metadata__": {_METADATA_KEY: details}}
    end = 0
    for _, name, dtype, values in ordered:
        start, end = end, end + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return chain([len(encoded).to_bytes(8, "little") + encoded], _blocks([entry[-1] for entry in ordered]))


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the bytes of tensors, small ones joined: a thread waits for others after every call."""
    import numpy as np
    import torch

    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if not groups or size > _BLOCK:
            groups.append([])
            size = tensor.nbytes
        groups[-1].append(tensor)
    for group in groups:
        block = [tensor.resolve_neg().reshape(-1).contiguous().view(torch.uint8).numpy() for tensor in group]
        yield np.concatenate(block) if len(block) > 1 else block[0]


def stored_curves(file: ProfileFile) -> dict[str, Column]:
    """Return all curves of a file by name."""
    return {name: Column(values, file.axes(name)) for name, values in file.items()}


def join_curves(parts: Iterable[Mapping[str, Column]]) -> dict[str, Column]:
    """Return the curves of several parts, each of which must have its own name."""
    joined: dict[str, Column] = {}
    for part in parts:
        shared = next((name for name in part if name in joined), None)
        if shared is not None:
            raise StoreError(f"two parts hold the curve {shared!r}: give every curve its own name")
        joined |= part
    return joined


def _check_name(name: str) -> None:
    document, layer, curve = ["", "", "", *name.rsplit("/", 2)][-3:]
    if not (document and curve and (layer == "-" or layer.isdecimal())):
        raise StoreError(f"the curve name {name!r} is not <document>/<layer>/<curve>: use profile_name()")
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise StoreError(f"the curve name {name!r} is not valid Unicode: rename the document")


class ProfileFile(Mapping[str, "Tensor"]):
    """The curves of a run by name, each read from the file on access."""

    def __init__(self, path: Path) -> None:
        """Open a file that `write_profiles` wrote."""
        self.path = path
        try:
            details = json.loads((self._file.metadata() or {})[_METADATA_KEY])
            self._axes = {name: tuple(details["axes"][name]) for name in sorted(self._file.keys())}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"cannot read {path}: it is not a file of wherewhat profiles") from error
        is_current(details.get(VERSION_KEY), path)  # curves are the same in older versions

    def __getitem__(self, name: str) -> Tensor:
        """The curve `name`; its dimensions are `axes(name)`."""
        if name not in self._axes:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def axes(self, name: str) -> tuple[str, ...]:
        """What each dimension of the curve `name` is."""
        return self._axes[name]

    def columns(self) -> dict[str | None, dict[int, dict[str, Column]]]:
        """Return all curves by document, layer and name; the model as a whole is the layer :data:`MODEL`."""
        by_document: dict[str | None, dict[int, dict[str, Column]]] = {}
        for full, values in self.items():
            document, layer, name = full.rsplit("/", 2)
            layers = by_document.setdefault(None if document == "-" else document, {})
            curves = layers.setdefault(MODEL if layer == "-" else int(layer), {})
            curves[name] = Column(values, self.axes(full))
        return by_document

    @cached_property
    def _file(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            open_regular(self.path).close()  # safetensors would wait for the writer of a pipe
            return safe_open(self.path, framework="pt")
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {explain(error)}") from error
        except SafetensorError as error:
            raise StoreError(f"cannot read {self.path}: it is not a file of wherewhat profiles") from error
