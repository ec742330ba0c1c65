"""Group means with 95 % intervals over whatever there are several of: models, runs, or documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wherewhat.measure import intervals

if TYPE_CHECKING:
    import polars as pl

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
