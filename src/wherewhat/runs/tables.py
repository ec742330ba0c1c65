"""Tables of finished runs: scores of heads and layers, and curves, of a model and its control models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from wherewhat.errors import ConfigError
from wherewhat.imports import require
from wherewhat.options import nearest
from wherewhat.runs.results import StoredRun

if TYPE_CHECKING:
    import pyarrow as pa


FrameKind = Literal["pandas", "polars", "pyarrow"]
"""Library of a table."""


def as_frame(table: pa.Table, kind: FrameKind) -> Any:
    """Return an Arrow table as a table of another library."""
    if kind == "polars":
        return require("polars", why="a polars table", install="'wherewhat[compare]'").from_arrow(table)
    if kind == "pandas":
        require("pandas", why="a pandas table", install="'wherewhat[notebook]', or ask for frame='pyarrow'")
        return table.to_pandas()
    return table


def head_table(runs: Mapping[str, StoredRun], *, tidy: bool) -> pa.Table:
    """Return the scores of single heads of a model and its control models, by weights.

    If `tidy`, there is one row per document, head and metric; otherwise one row per head and one column per metric,
    with means over documents.
    """
    tables = [_tidy_heads(run) if tidy else _wide_heads(run) for run in runs.values()]
    return joined_tables(runs, tables)


def layer_table(runs: Mapping[str, StoredRun], *, tidy: bool) -> pa.Table:
    """Return means over the heads of each layer of a model and its control models, by weights.

    If `tidy`, there is one row per layer and metric, with the 95 % interval over documents; otherwise one row per layer
    and one column per metric.
    """
    import pyarrow as pa

    numbers = [(name, pa.float64()) for name in ("mean", "low", "high")]
    schema = pa.schema([("layer", pa.int32()), ("metric", pa.string()), *numbers])
    tables = []
    for run in runs.values():
        if tidy:
            rows = [
                {"layer": layer, "metric": s.metric.name, "mean": about.mean, "low": about.low, "high": about.high}
                for s in run.summaries
                for layer, about in sorted(s.layers.items())
            ]
            tables.append(pa.Table.from_pylist(rows, schema=schema))
            continue
        layers = sorted({layer for s in run.summaries for layer in s.layers})
        columns: dict[str, Any] = {"layer": pa.array(layers, pa.int32())}
        for s in run.summaries:
            if s.layers:
                means = [s.layers[layer].mean if layer in s.layers else None for layer in layers]
                columns[s.metric.name] = pa.array(means, pa.float64())
        tables.append(pa.table(columns))
    return joined_tables(runs, tables)


def curve_table(runs: Mapping[str, StoredRun], name: str | None) -> pa.Table:
    """Return the curves of a name, or all, one row per value, with a column for each of their dimensions."""
    import pyarrow as pa

    known = sorted({full.rsplit("/", 1)[1] for run in runs.values() for full in run.profiles})
    if name is not None and name not in known:
        raise ConfigError(f"there is no curve '{name}': {nearest(name, known)}")
    tables = []
    for run in runs.values():
        curves = [_curve(run, full) for full in run.profiles if name in (None, full.rsplit("/", 1)[1])]
        tables.append(pa.concat_tables(curves, promote_options="default") if curves else pa.table({}))
    return joined_tables(runs, tables)


def _wide_heads(run: StoredRun) -> pa.Table:
    import pyarrow as pa

    means = {metric: run.head_means(metric) for metric in run.head_metrics}
    places = sorted({(i, h) for layers in means.values() for i, heads in layers.items() for h in range(len(heads))})
    columns: dict[str, Any] = {
        "layer": pa.array([layer for layer, _ in places], pa.int32()),
        "head": pa.array([head for _, head in places], pa.int32()),
    }
    order = [metric.name for metric in run.metrics if metric.name in means]
    for metric in dict.fromkeys([*order, *means]):
        layers = means[metric]
        values = [layers[i][h] if i in layers and h < len(layers[i]) else None for i, h in places]
        columns[metric] = pa.array(values, pa.float64())
    for metric, names in run.categories.items():
        if metric in columns:
            codes = columns[metric].to_pylist()
            columns[metric] = pa.array([None if code is None else names[int(code)] for code in codes], pa.string())
    return pa.table(columns)


def _tidy_heads(run: StoredRun) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    scores = run.directory.scores()
    names = ["document", "layer", "head", "metric", "value", "category"]
    chosen = scores.filter(pc.is_valid(scores["head"])).select(names)
    plain = [column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column for column in chosen.columns]
    return pa.table(dict(zip(chosen.column_names, plain, strict=True)))


def _curve(run: StoredRun, full: str) -> pa.Table:
    """Return one curve of one layer and document as rows."""
    import pyarrow as pa
    import torch

    document, layer, name = full.rsplit("/", 2)
    values = run.profiles[full].double()
    count = values.numel()
    indices = torch.ones(values.shape).nonzero()
    columns: dict[str, Any] = {
        "document": pa.array([None if document == "-" else document] * count, pa.string()),
        "layer": pa.array([None if layer == "-" else int(layer)] * count, pa.int32()),
        "curve": pa.array([name] * count, pa.string()),
    }
    for number, axis in enumerate(run.profiles.axes(full)):
        columns[axis] = pa.array(indices[:, number].numpy(), pa.int32())
    columns["value"] = pa.array(values.flatten().numpy(), pa.float64())
    return pa.table(columns)


def joined_tables(runs: Mapping[str, StoredRun], tables: Sequence[pa.Table], *, keep_empty: bool = False) -> pa.Table:
    """Join the tables of runs, with a column of weights if there are several, without empty columns by default."""
    import pyarrow as pa

    if len(tables) > 1:
        named = zip(runs, tables, strict=True)
        tables = [t.add_column(0, "weights", pa.array([weights] * len(t), pa.string())) for weights, t in named]
    joined = pa.concat_tables(tables, promote_options="default")
    if keep_empty:
        return joined
    empty = [name for name in joined.column_names if len(joined) and joined[name].null_count == len(joined)]
    return joined.drop_columns(empty)
