"""``Result``: a finished run with tables and figures for notebooks."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wherewhat.errors import ConfigError
from wherewhat.measures.statistics import Interval
from wherewhat.options import checked
from wherewhat.progress import Progress
from wherewhat.report.figures import PICTURES, ending, figure, save_figure, save_table
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import run as run_request
from wherewhat.runs.request import Request
from wherewhat.runs.results import MetricSummary, StoredRun

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class Result(RunDirectory):
    """A finished run directory with a summary table and figures.

    Examples:
        >>> result = wherewhat.run(wherewhat.Request(measurement="axes"), out=Path("runs"))
        >>> result  # a table of means, intervals and controls
        >>> result.plot("map", metric="r_behaviour")
        >>> result.export(Path("r.svg"))
    """

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Open a finished run for reading."""
        return cast("Result", super().load(path))

    def summary(self) -> list[MetricSummary]:
        """Return means over heads with intervals over documents, and their controls."""
        return StoredRun(self).summaries

    @checked()
    def plot(self, name: str | None = None, **options: Any) -> Figure:
        """Return a figure; see :func:`wherewhat.report.figures.figure`."""
        return figure(StoredRun(self), name, **options)

    @checked()
    def export(self, path: str | os.PathLike[str], name: str | None = None, **options: Any) -> Path:
        """Write a figure (.png, .svg, .pdf, .html) or all scores (.csv, .parquet)."""
        path = Path(path)
        if ending(path) in PICTURES:
            return save_figure(self.plot(name, **options), path)
        if name is not None or options:
            raise ConfigError(f"{path.name} holds all scores: leave out the figure and its options")
        return save_table(self, path)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows; names of models and documents are escaped."""
        run = StoredRun(self)
        kinds = run.kinds
        rows = "".join(
            f'<tr title="{html.escape(s.metric.reading)}"><td style="text-align:left">'
            f"{html.escape(s.metric.title)}</td>"
            f"<td>{_words(s.overall)}</td><td>{html.escape(s.metric.unit)}</td><td>{_control(s)}</td>"
            + "".join(f"<td>{_words(s.kinds[kind]) if kind in s.kinds else ''}</td>" for kind in kinds)
            + "</tr>"
            for s in run.summaries
        )
        more = "".join(f"<th>{html.escape(kind)} ({len(layers)})</th>" for kind, layers in kinds.items())
        measurement = run.measurement
        return (
            f"<b>{html.escape(measurement.name)}</b>: {html.escape(run.title)}"
            '<table><thead><tr><th style="text-align:left">mean over heads and documents</th><th>value, 95 %</th>'
            f"<th>unit</th><th>control</th>{more}</tr></thead><tbody>{rows}</tbody></table>"
            f"<small>{html.escape(measurement.limits)}</small>"
        )


@checked()
def run(request: Request | str, *, out: str | os.PathLike[str], progress: Progress | None = None) -> Result:
    """Measure, store, and return the finished run; see :func:`wherewhat.runs.execution.run`.

    Args:
        request: What to measure; the name of a measurement means ``Request(measurement=name)``.
        out: Folder of run directories.
        progress: Progress callback; silent by default.
    """
    asked = Request(measurement=request) if isinstance(request, str) else request
    return Result.load(run_request(asked, out=Path(out), progress=progress).path)


def _words(value: Interval) -> str:
    if value.low is None or value.high is None:
        return f"{value.mean:.4g}"
    return f"{value.mean:.4g} ({value.low:.4g} to {value.high:.4g})"


def _control(summary: MetricSummary) -> str:
    if summary.control is None:
        return ""
    return html.escape(f"{summary.control:.4g} {summary.metric.control_title}")
