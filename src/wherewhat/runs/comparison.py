"""Comparison of many runs: group means and trends, with intervals."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherewhat.boundary import check_whole_number, user_path
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import canonical_json
from wherewhat.imports import require
from wherewhat.measures import statistics
from wherewhat.measures.measurement import categories_of, measurements
from wherewhat.options import nearest
from wherewhat.runs.index import FACTS, open_index
from wherewhat.scores import SHARE, UNBOUNDED, share_name

if TYPE_CHECKING:
    import polars as pl

    from wherewhat.scores import Metric


UNITS = ("model", "run", "document")
"""Units that an interval can be over, the coarsest first."""
SHOWN = 3
"""Metrics of each measurement that are compared by default: the first ones it declares."""
_ALONG = ("step", "size")
"""Facts that a trend can be along."""
_CONDITIONS = ("tokens", "documents", "dtype", "options", "software")
"""Facts that a number depends on beside its model: runs that differ in one are not averaged."""


def group_means(values: pl.LazyFrame, by: Sequence[str]) -> pl.DataFrame:
    """Return the mean of every metric in every group, with a Student interval.

    Values are averaged within units before units are averaged: documents within a run, runs within a model. The
    interval is over the coarsest units of which the group has at least two; a group of one value has none.

    Returns:
        Columns ``measurement``, ``metric``, those of ``by``, ``mean``, ``low``, ``high``, ``n``, ``over``, ``runs``.
    """
    import polars as pl

    keys = list(dict.fromkeys(["measurement", "metric", *by]))
    # Scores of all documents together have no document; where single documents have scores too, they would count twice.
    single = values.with_columns(alone=pl.col("document").is_null().all().over("run", "metric"))
    single = single.filter(pl.col("document").is_not_null() | pl.col("alone"))
    # All groups keep the order of rows, so that sums are rounded in the same way every time.
    runs = single.group_by(*keys, "model_", "run_", maintain_order=True).agg(pl.col("value").mean())
    models = runs.group_by(*keys, "model_", maintain_order=True).agg(pl.col("value").mean())
    documents = single.group_by(*keys, "document", maintain_order=True).agg(pl.col("value").mean())
    frames = [
        _moments(frame, keys, "value", over=unit).with_columns(rank=pl.lit(rank))
        for rank, (unit, frame) in enumerate(zip(UNITS, (models, runs, documents), strict=True))
    ]
    # The first unit of which there are two; where there is none, the documents.
    usable = pl.concat(pl.collect_all(frames)).filter((pl.col("n") >= 2) | (pl.col("over") == UNITS[-1]))
    means = usable.sort("rank").unique(keys, keep="first", maintain_order=True)
    counts = runs.group_by(keys, maintain_order=True).agg(runs=pl.len().cast(pl.Int64)).collect()
    means = means.join(counts, on=keys, how="left", nulls_equal=True).rename({"value": "mean"})
    return _bounded(means, "mean").select(*keys, "mean", "low", "high", "n", "over", "runs").sort(keys, nulls_last=True)


def trends(values: pl.LazyFrame, along: str, by: Sequence[str]) -> pl.DataFrame:
    """Return the least-squares slope of every metric per factor of ten of ``along`` (``step`` or ``size``), by group.

    Each document of a model (each document, along the size of models) has its own slope, so that constant differences
    between documents do not affect the trend. The interval is Student's over models where a group has two or more of
    them, else over documents. Step 0 counts as step 1.

    Returns:
        Columns ``measurement``, ``metric``, those of ``by``, ``along``, ``slope``, ``low``, ``high``, ``n``, ``over``,
        ``points`` (different values of ``along``), ``first`` and ``last`` (means at the least and the greatest).
    """
    import polars as pl

    keys = list(
        dict.fromkeys(["measurement", "metric", *(name for name in by if name not in (along, "checkpoint", "run"))])
    )
    inner = [*keys, "document"] if along == "size" else [*keys, "model_", "document"]
    rows = values.filter(pl.col(along).is_not_null()).with_columns(
        x=pl.col(along).clip(lower_bound=1).cast(pl.Float64).log10()
    )
    # One value for each step: several runs there (seeds, texts) are averaged first.
    points = rows.group_by(*inner, "x", maintain_order=True).agg(pl.col("value").mean())
    centred = points.with_columns(dx=pl.col("x") - pl.col("x").mean().over(inner))
    slopes = (
        centred.group_by(inner, maintain_order=True)
        .agg(slope=(pl.col("dx") * pl.col("value")).sum() / (pl.col("dx") ** 2).sum(), points=pl.len())
        .filter(pl.col("points") >= 2)
    )
    moments = _moments(slopes, keys, "slope", over="document").collect()
    if along != "size":
        models = slopes.group_by(*keys, "model_", maintain_order=True).agg(pl.col("slope").mean())
        by_model = _moments(models, keys, "slope", over="model").filter(pl.col("n") >= 2).collect()
        moments = pl.concat([by_model, moments.join(by_model, on=keys, how="anti", nulls_equal=True)])
    means = rows.group_by(*keys, "x", maintain_order=True).agg(pl.col("value").mean()).sort("x")
    ends = means.group_by(keys, maintain_order=True).agg(
        points=pl.len().cast(pl.Int64), first=pl.col("value").first(), last=pl.col("value").last()
    )
    return (
        _bounded(moments, "slope")
        .with_columns(along=pl.lit(along))
        .join(ends.collect(), on=keys, how="left", nulls_equal=True)
        .select(*keys, "along", "slope", "low", "high", "n", "over", "points", "first", "last")
        .sort(keys, nulls_last=True)
    )


def _moments(units: pl.LazyFrame, keys: list[str], column: str, *, over: str) -> pl.LazyFrame:
    """Return mean, standard error and number of units of a column by group."""
    import polars as pl

    value = pl.col(column)
    error = value.std() / pl.len().cast(pl.Float64).sqrt()
    return units.group_by(keys, maintain_order=True).agg(
        value.mean(), error=error, n=pl.len().cast(pl.Int64), over=pl.lit(over)
    )


def _bounded(table: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return a table with the bounds of the 95 % Student interval around a column; null where ``n`` is below 2."""
    import polars as pl

    quantiles = {n: statistics.student(n) if n > 1 else None for n in table["n"].unique().to_list()}
    student = table["n"].replace_strict(quantiles, return_dtype=pl.Float64) if len(table) else 0.0
    reach = student * table["error"]
    return table.with_columns(low=table[column] - reach, high=table[column] + reach)


def within_ranges(table: pl.DataFrame) -> pl.DataFrame:
    """Return groups with intervals inside the declared range of each metric, as they are shown."""
    import polars as pl

    metrics = {
        (name, metric.name): metric.range
        for name in table["measurement"].unique().to_list()
        for metric in known_metrics(name)
    }
    shares = {
        (name, share_name(metric, category))
        for name in table["measurement"].unique().to_list()
        for metric, categories in (categories_of(measurements()[name]) if name in measurements() else {}).items()
        for category in categories
    }
    metrics |= dict.fromkeys(shares, SHARE)
    ranges = [metrics.get(pair, UNBOUNDED) for pair in table.select("measurement", "metric").iter_rows()]
    least, most = (pl.Series([pair[i] for pair in ranges], dtype=pl.Float64) for i in (0, 1))
    return table.with_columns(low=pl.col("low").clip(lower_bound=least), high=pl.col("high").clip(upper_bound=most))


@dataclass(frozen=True)
class RunComparison:
    """Many runs, compared.

    Attributes:
        groups: One row per metric and group, see :func:`group_means`.
        trends: One row per metric and group, see :func:`trends`; empty if there are none.
        by: Facts that runs are grouped by, those of ``apart`` included.
        apart: Facts that were not asked for and in which runs differ, so that they have rows of their own.
        runs: Number of runs.
        stores: Addresses of the stores.
        unreadable: Why a finished run could not be read, by name.
    """

    groups: pl.DataFrame
    trends: pl.DataFrame
    by: tuple[str, ...]
    apart: tuple[str, ...]
    runs: int
    stores: tuple[str, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)


def compare(
    stores: Sequence[str | os.PathLike[str]],
    *,
    by: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    where: Mapping[str, str] | None = None,
) -> RunComparison:
    """Compare all finished runs of one or more stores.

    Runs of one measurement that differ in tokens, documents, dtype or options, or one model's in text, have separate
    rows, also where ``by`` does not ask for it: a noise floor depends on the length, so their mean would mean nothing.

    Args:
        stores: Folders of run directories, or addresses that fsspec opens.
        by: Facts to group by; model and weights by default, and the training step where it varies.
        metrics: Metrics to compare; by default the first few of each measurement.
        where: Compare only runs with these facts.
    """
    require("polars", why="comparing runs", install="'wherewhat[compare]'")
    import polars as pl

    named = [os.fspath(store) for store in stores]
    addresses = list(dict.fromkeys(a.rstrip("/") if "://" in a else str(user_path(a, name="DIR")) for a in named))
    if not addresses:
        raise ConfigError("there is nothing to compare: give at least one folder of run directories")
    for name in [*(by or ()), *(where or {})]:
        if name not in FACTS:
            raise ConfigError(f"runs cannot be grouped by '{name}': {nearest(name, FACTS)}")
    opened = [open_index(address) for address in addresses]
    values = opened[0].values
    if len(opened) > 1:
        # The same run in two stores is one run: its name holds the hash of its configuration.
        values = pl.concat([index.values for index in opened]).unique(["run", "metric", "document"], keep="first")
    values = _where(values, where or {})
    values = _with_metrics(values, metrics)
    unreadable = {name: reason for index in opened for name, reason in index.unreadable.items()}
    listed = values.select("run", "step", "size", "model").unique().collect()
    if not len(listed):
        example = f"; {next(iter(unreadable))}: {next(iter(unreadable.values()))}" if unreadable else ""
        chosen = " that fits --where" if where else ""
        raise StoreError(f"there is no finished run{chosen} in {', '.join(addresses)}{example}")
    if by is None:
        by = ("model", "weights", "step") if listed["step"].drop_nulls().n_unique() > 1 else ("model", "weights")
    # Copies of the columns that intervals are over, which may also be grouped by.
    values = values.with_columns(model_=pl.col("model"), run_=pl.col("run"))
    values = _short_options(values)
    apart = tuple(name for name in _conditions(values) if name not in by and "run" not in by)
    by = (*by, *apart)
    along = next((name for name in _ALONG if name in by), None)
    return RunComparison(
        groups=group_means(values, by),
        trends=pl.DataFrame() if along is None else trends(values, along, by),
        by=tuple(by),
        apart=apart,
        runs=listed["run"].n_unique(),
        stores=tuple(addresses),
        unreadable=unreadable,
    )


def _conditions(values: pl.LazyFrame) -> list[str]:
    """Return the conditions in which runs of one measurement differ; the text only where those of one model do.

    Generated prompts depend on the tokenizer, so the texts of two models may differ where nothing else does.
    """
    import polars as pl

    counts = [pl.col(name).n_unique().alias(name) for name in _CONDITIONS]
    distinct = values.group_by("measurement").agg(counts).collect()
    differing = [name for name in _CONDITIONS if (distinct[name] > 1).any()]
    texts = values.group_by("measurement", "model").agg(pl.col("text").n_unique()).collect()
    return [*differing, "text"] if "documents" not in differing and (texts["text"] > 1).any() else differing


def _short_options(values: pl.LazyFrame) -> pl.LazyFrame:
    """Return values whose options name only what differs between the runs of a measurement."""
    import polars as pl

    listed = values.select("measurement", "options").unique().collect()
    short: dict[str | None, str | None] = {None: None}
    for name in listed["measurement"].unique():
        texts = listed.filter(pl.col("measurement") == name)["options"].drop_nulls().to_list()
        options = {text: json.loads(text) for text in texts}
        names = sorted({key for settings in options.values() for key in settings})
        differing = [key for key in names if len({canonical_json(x.get(key)) for x in options.values()}) > 1]
        for text, settings in options.items():
            short[text] = ", ".join(f"{key}={canonical_json(settings.get(key))}" for key in differing)
    return values.with_columns(pl.col("options").replace_strict(short, return_dtype=pl.String))


def known_metrics(measurement: str) -> Sequence[Metric]:
    """Return the metrics that a measurement declares, most important first; none for an unknown measurement."""
    return measurements()[measurement].metrics if measurement in measurements() else ()


def _of_metric(metric: str, known: Sequence[str]) -> list[str]:
    """Return the metric, or for a category the shares of its values."""
    return [name for name in known if name == metric or name.startswith(f"{metric}=")]


def _where(values: pl.LazyFrame, wanted: Mapping[str, str]) -> pl.LazyFrame:
    import polars as pl

    for name, value in wanted.items():
        constant: Any = value
        if FACTS[name] == "int":
            try:
                constant = int(value)
            except ValueError:
                raise ConfigError(f"--where {name}={value}: {name} is a number, give one such as {name}=1000") from None
            check_whole_number(f"--where {name}", constant)
        values = values.filter(pl.col(name) == constant)
    return values


def _with_metrics(values: pl.LazyFrame, metrics: Sequence[str] | None) -> pl.LazyFrame:
    """Return the rows of the requested metrics, or of the first few of each measurement."""
    import polars as pl

    there = values.select("measurement", "metric").unique().collect()
    known = sorted(set(there["metric"]))
    if metrics:
        wanted = {name: _of_metric(name, known) for name in metrics}
        for name, matches in wanted.items():
            if not matches:
                raise ConfigError(f"no run holds the metric '{name}': {nearest(name, known)}")
        return values.filter(pl.col("metric").is_in([name for names in wanted.values() for name in names]))
    shown = []
    for measurement in sorted(set(there["measurement"].drop_nulls())):
        has = sorted(there.filter(pl.col("measurement") == measurement)["metric"])
        listed = [name for metric in known_metrics(measurement) for name in _of_metric(metric.name, has)] or has
        shown += [{"measurement": measurement, "metric": name} for name in listed[:SHOWN]]
    chosen = pl.LazyFrame(shown, schema={"measurement": pl.String, "metric": pl.String})
    return values.join(chosen, on=["measurement", "metric"], how="semi")
