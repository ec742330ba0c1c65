"""The study's numbers as two tables that any program reads."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from wherewhat.encodings.runs import EncodingRun
from wherewhat.store.atomic import write_file

RECORDS_TABLE = "records.parquet"
CURVES_TABLE = "curves.parquet"

Row = tuple[Any, ...]


def write_parquet(folder: Path, runs: Sequence[EncodingRun]) -> list[Path]:
    """Write both tables into a folder.

    ``records.parquet`` has one row per encoding, seed, step, metric and what it belongs to (layer, head, plane, window,
    document or repeat); ``curves.parquet`` one per encoding, seed, curve, document and place on the curve.

    Raises:
        StoreError: If a run's files are damaged, or the tables cannot be written.
    """
    records = [row for run in runs for row in _record_rows(run)]
    curves = [row for run in runs for row in _curve_rows(run)]
    first = ("encoding", "seed", "step", "metric", "layer", "head", "other", "value")
    second = ("encoding", "seed", "curve", "document", "place", "column", "value")
    paths = [folder / RECORDS_TABLE, folder / CURVES_TABLE]
    for path, names, rows in zip(paths, (first, second), (records, curves), strict=True):
        write_file(path, _parquet(names, rows))
    return paths


def _record_rows(run: EncodingRun) -> Iterator[Row]:
    found = run.records()
    for name in sorted(found.values):
        axes = found.axes[name]
        for (at, *index), value in _entries(found.values[name]):
            where = dict(zip(axes, index, strict=True))
            layer, head = where.pop("layer", None), where.pop("head", None)
            other = next(iter(where.values()), None)
            yield run.encoding, run.seed, int(found.steps[at]), name, layer, head, other, value


def _curve_rows(run: EncodingRun) -> Iterator[Row]:
    for name, table in sorted(run.after().items()):
        per_document = table.axes[0] == "document"
        for index, value in _entries(table.values):
            document, rest = (index[0], index[1:]) if per_document else (None, index)
            place, column = (*rest, None, None)[:2]
            yield run.encoding, run.seed, name, document, place, column, value


def _entries(values: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    return zip(itertools.product(*map(range, values.shape)), values.flatten().tolist(), strict=True)


def _parquet(names: Sequence[str], rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"encoding": pa.string(), "metric": pa.string(), "curve": pa.string(), "value": pa.float32()}
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, kinds.get(name, pa.int32())) for name, column in zip(names, columns, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays, list(names)), buffer, compression="zstd")
    return buffer.getvalue()
