"""A comparison as one HTML file that opens offline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from wherewhat.report.page import asset, whole_page
from wherewhat.runs.comparison import RunComparison, known_metrics, within_ranges

if TYPE_CHECKING:
    import polars as pl


_ABOUT = (
    "{runs} runs, grouped by {by}. Means are over heads and layers, then documents, then runs. Intervals are "
    "Student's, 95 %, over the models of a group where there are several, else over its runs, else over documents. "
    "An interval over documents is of one model: of weights random, of one untrained model."
)


def page(found: RunComparison) -> str:
    """Return the page. Names of models and documents are in the data only; the script inserts them as text."""
    groups = within_ranges(found.groups)
    along = str(found.trends["along"][0]) if len(found.trends) else None
    keys = ["measurement", "metric"]
    data = {
        "about": _ABOUT.format(runs=f"{found.runs:,}", by=", ".join(found.by)),
        "by": [name for name in found.by if name not in keys],
        "along": along,
        "columns": [name for name in groups.columns if name not in keys],
        "trend_columns": [name for name in found.trends.columns if name not in (*keys, "along")],
        "sections": [
            _section(groups, found.trends, *pair) for pair in groups.select(keys).unique(maintain_order=True).rows()
        ],
    }
    return whole_page(
        title="wherewhat: comparison of runs",
        body=asset("compare.html"),
        style=asset("compare.css"),
        scripts=[asset("compare.js")],
        data=data,
    )


def _section(groups: pl.DataFrame, trends: pl.DataFrame, measurement: str, metric: str) -> dict[str, Any]:
    known = next((known for known in known_metrics(measurement) if known.name == metric), None)
    return {
        "measurement": measurement,
        "metric": metric,
        "title": metric if known is None else known.title,
        "reading": "" if known is None else known.reading,
        "groups": _rows(groups, measurement, metric),
        "trends": _rows(trends, measurement, metric),
    }


def _rows(table: pl.DataFrame, measurement: str, metric: str) -> list[dict[str, Any]]:
    """Return the rows of one metric as plain JSON; numbers that are not finite become null."""
    if not len(table):
        return []
    rows = table.filter((table["measurement"] == measurement) & (table["metric"] == metric)).iter_rows(named=True)
    return [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()} for row in rows
    ]
