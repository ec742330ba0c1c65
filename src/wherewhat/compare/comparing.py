"""``compare``: stores in, tables of groups and trends out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherewhat.checking import nearest
from wherewhat.compare.facts import FACTS
from wherewhat.compare.groups import group_means, with_units
from wherewhat.compare.index import check_polars, open_index, paths_of
from wherewhat.compare.trends import ALONG, trends
from wherewhat.errors import ConfigError, StoreError

if TYPE_CHECKING:
    import polars as pl

    from wherewhat.measure.base import Metric

SHOWN = 3
"""Metrics of each measurement that are compared unless others are asked for: those it lists first."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        groups: One row per metric and group, see :func:`~wherewhat.compare.groups.group_means`.
        trends: One row per metric and group, see :func:`~wherewhat.compare.trends.trends`; empty if there are none.
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

    Raises:
        ConfigError: If a fact or metric is not known.
        StoreError: If a store cannot be read, or holds nothing to compare.
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
    from wherewhat.measure.registry import MEASUREMENTS

    return next((m.metrics for m in MEASUREMENTS if m.name == measurement), ())


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
