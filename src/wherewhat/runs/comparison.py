"""Group means and trends over many runs, with intervals."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherewhat.errors import ConfigError, StoreError
from wherewhat.measures import statistics as intervals
from wherewhat.options import nearest
from wherewhat.runs.index import FACTS, check_polars, open_index, paths_of

if TYPE_CHECKING:
    import polars as pl

    from wherewhat.measures.measurement import Metric


UNITS = ("model", "run", "document")
"""What an interval can be over, the coarsest first: documents of one model say nothing about other models."""


def group_means(values: pl.LazyFrame, by: Sequence[str]) -> pl.DataFrame:
    """Mean of every metric in every group, with a Student interval.

    Values are averaged within units before units are averaged: documents within a run, runs within a model. The
    interval is over the coarsest units of which the group has at least two; a group of one value has none.

    Args:
        values: Rows of the index.
        by: Facts to group by.

    Returns:
        Columns ``measurement``, ``metric``, those of ``by``, ``mean``, ``low``, ``high``, ``n``, ``over``, ``runs``.
    """
    import polars as pl

    keys = list(dict.fromkeys(["measurement", "metric", *by]))
    # Numbers over all documents together have no document of their own; where there are others they would count twice.
    single = values.with_columns(alone=pl.col("document").is_null().all().over("run", "metric"))
    single = single.filter(pl.col("document").is_not_null() | pl.col("alone"))
    runs = single.group_by(*keys, "model_", "run_").agg(pl.col("value").mean())
    models = runs.group_by(*keys, "model_").agg(pl.col("value").mean())
    documents = single.group_by(*keys, "document").agg(pl.col("value").mean())
    frames = pl.collect_all([_moments(frame, keys) for frame in (models, runs, documents)])
    return _chosen(dict(zip(UNITS, frames, strict=True)), keys)


def with_units(values: pl.LazyFrame) -> pl.LazyFrame:
    """Copies of the columns that intervals are over, which may also be grouped by."""
    import polars as pl

    return values.with_columns(model_=pl.col("model"), run_=pl.col("run"))


def student(n: pl.Series) -> pl.Series:
    """97.5 % quantile of Student's distribution for samples of ``n``; null where ``n`` is below 2."""
    import polars as pl

    quantiles = {k: intervals.student(k) if k > 1 else None for k in n.unique().to_list()}
    return n.replace_strict(quantiles, return_dtype=pl.Float64) if len(n) else n.cast(pl.Float64)


def _moments(units: pl.LazyFrame, keys: list[str]) -> pl.LazyFrame:
    import polars as pl

    value = pl.col("value")
    return units.group_by(keys).agg(
        mean=value.mean(), error=value.std() / pl.len().cast(pl.Float64).sqrt(), n=pl.len().cast(pl.Int64)
    )


def _chosen(by_unit: dict[str, pl.DataFrame], keys: list[str]) -> pl.DataFrame:
    """Of each group the coarsest unit of which there are two."""
    import polars as pl

    joined = by_unit["model"].select(keys)
    for unit, frame in by_unit.items():
        joined = joined.join(
            frame.rename({name: f"{name}_{unit}" for name in ("mean", "error", "n")}),
            on=keys,
            nulls_equal=True,
            how="left",
        )
    several = {unit: pl.col(f"n_{unit}") >= 2 for unit in UNITS}

    def pick(name: str) -> Any:
        chain = pl.when(several["model"]).then(pl.col(f"{name}_model"))
        return chain.when(several["run"]).then(pl.col(f"{name}_run")).otherwise(pl.col(f"{name}_document"))

    over = pl.when(several["model"]).then(pl.lit("model")).when(several["run"]).then(pl.lit("run"))
    # Numbers over all documents together stand under no document, and are then one value.
    mean, error, n = pick("mean"), pick("error"), pick("n")
    found = joined.select(
        *keys, mean=mean, error=error, n=n, over=over.otherwise(pl.lit("document")), runs=pl.col("n_run")
    )
    reach = student(found["n"]) * found["error"]
    return (
        found.with_columns(low=found["mean"] - reach, high=found["mean"] + reach)
        .select(*keys, "mean", "low", "high", "n", "over", "runs")
        .sort(keys, nulls_last=True)
    )


ALONG = ("step", "size")
"""What a trend can be along."""


def trends(values: pl.LazyFrame, along: str, by: Sequence[str]) -> pl.DataFrame:
    """Least-squares rise of every metric for each tenfold of ``along``, by group.

    Each document of a model (each model, along its size each document) has a slope of its own, so that what documents
    differ in from the start does not blur the trend. The interval is Student's over models where a group has two or
    more of them, else over documents. Step 0 counts as step 1.

    Args:
        values: Rows of the index.
        along: ``step`` or ``size``.
        by: Facts to group by besides.

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
    points = rows.group_by(*inner, "x").agg(pl.col("value").mean())
    centred = points.with_columns(dx=pl.col("x") - pl.col("x").mean().over(inner))
    slopes = (
        centred.group_by(inner)
        .agg(slope=(pl.col("dx") * pl.col("value")).sum() / (pl.col("dx") ** 2).sum(), points=pl.len())
        .filter(pl.col("points") >= 2)
    )
    by_document = _slope_moments(slopes, keys, "document").collect()
    found = by_document
    if along != "size":
        models = slopes.group_by(*keys, "model_").agg(pl.col("slope").mean())
        by_model = _slope_moments(models, keys, "model").filter(pl.col("n") >= 2).collect()
        rest = by_document.join(by_model, on=keys, how="anti", nulls_equal=True)
        found = pl.concat([by_model, rest])
    means = rows.group_by(*keys, "x").agg(pl.col("value").mean()).sort("x")
    ends = means.group_by(keys, maintain_order=True).agg(
        points=pl.len().cast(pl.Int64), first=pl.col("value").first(), last=pl.col("value").last()
    )
    reach = student(found["n"]) * found["error"]
    return (
        found.with_columns(low=found["slope"] - reach, high=found["slope"] + reach, along=pl.lit(along))
        .join(ends.collect(), on=keys, how="left", nulls_equal=True)
        .select(*keys, "along", "slope", "low", "high", "n", "over", "points", "first", "last")
        .sort(keys, nulls_last=True)
    )


def _slope_moments(slopes: pl.LazyFrame, keys: list[str], over: str) -> pl.LazyFrame:
    import polars as pl

    error = pl.col("slope").std() / pl.len().cast(pl.Float64).sqrt()
    return slopes.group_by(keys).agg(
        slope=pl.col("slope").mean(), error=error, n=pl.len().cast(pl.Int64), over=pl.lit(over)
    )


SHOWN = 3
"""Metrics of each measurement that are compared unless others are asked for: those it lists first."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        groups: One row per metric and group, see :func:`~wherewhat.runs.comparison.group_means`.
        trends: One row per metric and group, see :func:`~wherewhat.runs.comparison.trends`; empty if there are none.
        by: What runs are grouped by.
        runs: How many runs are compared.
        stores: Where they are.
        unreadable: Name and reason of finished runs that could not be read.
    """

    groups: pl.DataFrame
    trends: pl.DataFrame
    by: tuple[str, ...]
    runs: int
    stores: tuple[str, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)


def compare(
    stores: Sequence[str | os.PathLike[str]],
    *,
    by: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    where: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare all finished runs of one or more stores.

    Args:
        stores: Folders of run directories, or addresses that fsspec opens.
        by: Facts to group by; model and weights by default, and the training step where it varies.
        metrics: Metrics to compare; by default the first few of each measurement.
        where: Only runs with these facts.
    """
    check_polars()
    import polars as pl

    addresses = paths_of([os.fspath(store) for store in stores])
    if not addresses:
        raise ConfigError("there is nothing to compare: give at least one folder of run directories")
    for name in [*(by or ()), *(where or {})]:
        if name not in FACTS:
            raise ConfigError(f"runs cannot be told apart by '{name}': {nearest(name, FACTS)}")
    opened = [open_index(address) for address in addresses]
    values = opened[0].values
    if len(opened) > 1:
        # The same run in two stores is one run: its name says what it is of.
        values = pl.concat([index.values for index in opened]).unique(["run", "metric", "document"], keep="first")
    values = _where(values, where or {})
    values = _with_metrics(values, metrics)
    unreadable = {name: reason for index in opened for name, reason in index.unreadable.items()}
    listed = values.select("run", "step", "size", "model").unique().collect()
    if not len(listed):
        some = f"; {next(iter(unreadable))}: {next(iter(unreadable.values()))}" if unreadable else ""
        chosen = " that fits --where" if where else ""
        raise StoreError(f"there is no finished run{chosen} in {', '.join(addresses)}{some}")
    if by is None:
        by = ("model", "weights", "step") if listed["step"].drop_nulls().n_unique() > 1 else ("model", "weights")
    values = with_units(values)
    along = "step" if "step" in by else "size" if "size" in by else None
    found = trends(values, along, by) if along in ALONG else pl.DataFrame()
    return Comparison(
        groups=group_means(values, by),
        trends=found,
        by=tuple(by),
        runs=listed["run"].n_unique(),
        stores=tuple(addresses),
        unreadable=unreadable,
    )


def words(measurement: str) -> Sequence[Metric]:
    """What is known of the metrics of a measurement, the most important first; nothing for those of other programs."""
    from wherewhat.measures.registry import measurements

    return measurements()[measurement].metrics if measurement in measurements() else ()


def _where(values: pl.LazyFrame, wanted: Mapping[str, str]) -> pl.LazyFrame:
    import polars as pl

    for name, value in wanted.items():
        if FACTS[name] == "int" and not value.lstrip("-").isdecimal():
            raise ConfigError(f"--where {name}={value}: {name} is a number, give one such as {name}=1000")
        constant: Any = int(value) if FACTS[name] == "int" else value
        values = values.filter(pl.col(name) == constant)
    return values


def _with_metrics(values: pl.LazyFrame, metrics: Sequence[str] | None) -> pl.LazyFrame:
    """Rows of the metrics asked for, or of the first few of each measurement."""
    import polars as pl

    there = values.select("measurement", "metric").unique().collect()
    known = sorted(set(there["metric"]))
    if metrics:
        for name in metrics:
            if name not in known:
                raise ConfigError(f"no run holds the metric '{name}': {nearest(name, known)}")
        return values.filter(pl.col("metric").is_in(list(metrics)))
    shown = []
    for measurement in sorted(set(there["measurement"].drop_nulls())):
        has = sorted(there.filter(pl.col("measurement") == measurement)["metric"])
        listed = [metric.name for metric in words(measurement) if metric.name in has] or has
        shown += [{"measurement": measurement, "metric": name} for name in listed[:SHOWN]]
    chosen = pl.LazyFrame(shown, schema={"measurement": pl.String, "metric": pl.String})
    return values.join(chosen, on=["measurement", "metric"], how="semi")
