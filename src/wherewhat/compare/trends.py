"""Trends with intervals: how much a metric rises with every tenfold of training steps, or of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wherewhat.compare.groups import student

if TYPE_CHECKING:
    import polars as pl

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
    by_document = _moments(slopes, keys, "document").collect()
    found = by_document
    if along != "size":
        models = slopes.group_by(*keys, "model_").agg(pl.col("slope").mean())
        by_model = _moments(models, keys, "model").filter(pl.col("n") >= 2).collect()
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


def _moments(slopes: pl.LazyFrame, keys: list[str], over: str) -> pl.LazyFrame:
    import polars as pl

    error = pl.col("slope").std() / pl.len().cast(pl.Float64).sqrt()
    return slopes.group_by(keys).agg(
        slope=pl.col("slope").mean(), error=error, n=pl.len().cast(pl.Int64), over=pl.lit(over)
    )
