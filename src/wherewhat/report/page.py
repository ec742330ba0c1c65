"""Pages of reports, single results and comparisons: one HTML file each, which opens offline."""

from __future__ import annotations

import base64
import gzip
import html
import importlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherewhat.boundary import output_file
from wherewhat.chart_style import DARK
from wherewhat.errors import ConfigError
from wherewhat.files import make_folder, write_file
from wherewhat.imports import package_version
from wherewhat.report.charts import compared_groups, page_charts, referenced
from wherewhat.report.data import Number, script_json
from wherewhat.runs.comparison import RunComparison, known_metrics, within_ranges

if TYPE_CHECKING:
    import polars as pl


_SCRIPTS = (
    "tools", "charts", "downloads", "model", "side_by_side", "map", "heads", "matrix", "text", "thumbnails", "hero",
    "telling", "panel", "plane", "curves", "learning", "claim_cards", "claims", "others", "method", "terms",
    "questions", "state", "unfinished", "start",
)  # fmt: skip
"""The page's script, a file for each section; later ones use what earlier ones define."""

_ABOUT = (
    "{runs} runs, grouped by {by}. Means are over heads and layers, then documents, then runs. Intervals are "
    "Student's, 95 %, over the models of a group where there are several, else over its runs, else over documents. "
    "An interval over documents is of one model: of weights random, of one untrained model."
)


@dataclass(frozen=True)
class Profiled:
    """One model of a report.

    Attributes:
        name: Its name in the report.
        findings: Sentences that its numbers support, strongest first.
        numbers: Its headline numbers.
        left_out: One line for each measurement or control model that is missing, with the reason.
    """

    name: str
    findings: list[str]
    numbers: list[Number]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A report that can be written.

    Attributes:
        name: File name without extension.
        data: Everything the page shows, as plain JSON.
        models: The models with their headline numbers.
        body: File in ``assets`` with its HTML.
        scripts: Names of its scripts in ``assets``.
    """

    name: str
    data: dict[str, Any] = field(repr=False)
    models: list[Profiled] = field(default_factory=list)
    body: str = "page.html"
    scripts: tuple[str, ...] = _SCRIPTS

    def html(self) -> str:
        """Return the page. Text of models and documents is in the data only; the script inserts it as text."""
        scripts = [asset(f"{name}.js") for name in self.scripts]
        body = asset(self.body).replace("{{VERSION}}", package_version("wherewhat") or "unknown")
        style = asset("page.css") + asset("claims.css")
        charts = page_charts(self.data)
        return whole_page(
            title="wherewhat report", body=body, style=style, scripts=scripts, data=self.data, charts=charts
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically and return its path."""
        return write_page(output_file(path, name="the page"), self.html())


def result_page(data: dict[str, Any]) -> Report:
    """Return the page of one measurement, from :func:`wherewhat.report.sections.result_data`."""
    scripts = ("tools", "charts", "downloads", "others", "method", "result")
    return Report("result", data, body="result.html", scripts=scripts)


def attention_page(data: dict[str, Any]) -> str:
    """Return the page of attention on texts, from :class:`wherewhat.report.attention_view.AttentionView`."""
    scripts = ("tools", "charts", "downloads", "matrix", "text", "thumbnails", "state", "attention")
    return whole_page(
        title="wherewhat: attention",
        body=asset("attention.html"),
        style=asset("page.css") + asset("attention.css"),
        scripts=[asset(f"{name}.js") for name in scripts],
        data=data,
        plotly=False,
    )


def comparison_page(comparison: RunComparison) -> str:
    """Return the page of a comparison. Names of models and documents are in the data only, see :meth:`Report.html`."""
    groups = within_ranges(comparison.groups)
    along = str(comparison.trends["along"][0]) if len(comparison.trends) else None
    keys = ["measurement", "metric"]
    pairs = groups.select(keys).unique(maintain_order=True).rows()
    sections = [_section(groups, comparison.trends, *pair) for pair in pairs]
    data: dict[str, Any] = {
        "about": _ABOUT.format(runs=f"{comparison.runs:,}", by=", ".join(comparison.by)),
        "by": [name for name in comparison.by if name not in keys],
        "along": along,
        "columns": [name for name in groups.columns if name not in keys],
        "trend_columns": [name for name in comparison.trends.columns if name not in (*keys, "along")],
        "sections": sections,
    }
    return whole_page(
        title="wherewhat: comparison of runs",
        body=asset("compare.html"),
        style=asset("compare.css"),
        scripts=[asset("compare.js")],
        data=data,
        charts=[compared_groups(section, by=data["by"], along=along) for section in sections],
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


def write_page(path: Path, page: str, *, through: Path | None = None) -> Path:
    """Write a page atomically, through a file in another folder if one is given, and return its path."""
    content = page.encode("utf-8")
    make_folder(through or path.parent)
    write_file(path, content, through=through)
    return path


def waiting_page(models: Sequence[str]) -> str:
    """Return a page that loads itself again until the report of models has its first page."""
    parts = {"NAMES": html.escape(", ".join(models)), "STYLE": asset("base.css")}
    return _filled("waiting.html", parts)


def asset(name: str) -> str:
    """Return the content of a file in ``assets``."""
    return (files("wherewhat.report") / "assets" / name).read_text("utf-8")


def whole_page(
    *, title: str, body: str, style: str, scripts: Iterable[str], data: Any, charts: Any = None, plotly: bool = True
) -> str:
    """Return a page in the common frame: shared and own style and script, data and charts as plain JSON.

    ``plotly`` adds plotly.js, compressed, which a page without charts does not need. All scripts are put into one
    function, so that their names are local. Arrays of charts that are part of the data are stored as their path there.
    """
    code = "\n".join([asset("elements.js"), *scripts])
    parts = {
        "TITLE": title,
        "STYLE": asset("base.css") + style,
        "BODY": body,
        "PLOTLY": base64.b64encode(plotly_js(_trace_types([data, charts]))).decode("ascii") if plotly else "",
        "DATA": script_json(data),
        "FIGURES": script_json({"dark": DARK, "charts": referenced(charts, data)}),
        "SCRIPT": _in_script(f'"use strict";\n(async () => {{\n{code}\n}})();'),
    }
    return _filled("frame.html", parts)


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """Return a file in ``assets`` with its marks replaced, in one pass, so that marks inside the parts are kept."""
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset(name))


def _in_script(code: str) -> str:
    """Return code that cannot end its script element; a backslash before a slash changes no string."""
    return re.sub(r"</(?=script)", r"<\\/", code, flags=re.IGNORECASE)


_BUNDLE = "plotly-cartesian.min.js.gz"
"""The official bundle ``plotly.js-cartesian-dist-min`` 4.1.1 (MIT) of npm, a third of the whole plotly.js."""

_BUNDLED = frozenset({"bar", "box", "contour", "heatmap", "histogram", "histogram2d", "pie", "scatter", "violin"})
"""Types of traces that the bundle draws."""


def plotly_js(types: Iterable[str] = ()) -> bytes:
    """Return the code of plotly.js, compressed: the bundle if it draws these types of traces, else all of plotly.js.

    Raises:
        ConfigError: If plotly is not installed, which draws the figures of other measurements.
    """
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise ConfigError("the report needs the package 'plotly', which is not installed: pip install plotly") from None
    if _BUNDLED.issuperset(types):
        return (files("wherewhat.report") / "assets" / _BUNDLE).read_bytes()
    return gzip.compress(offline.get_plotlyjs().encode("utf-8"), mtime=0)


def _trace_types(part: Any) -> Iterator[str]:
    """Yield the types of the traces of all charts in a part of the data: those of a list ``data`` beside a layout."""
    if isinstance(part, dict):
        if "layout" in part and isinstance(part.get("data"), list):
            yield from (trace.get("type", "scatter") for trace in part["data"])
        else:
            part = list(part.values())
    if isinstance(part, list):
        for item in part:
            if isinstance(item, dict | list):
                yield from _trace_types(item)
