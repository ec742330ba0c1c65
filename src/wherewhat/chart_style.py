"""Style of all charts: colours, lines with bands, axes and legends, as plain Plotly JSON."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Chart = dict[str, Any]
"""A Plotly figure as plain JSON: ``data``, its traces, and ``layout``."""

Trace = dict[str, Any]
Numbers = Sequence[float | None]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, the darker ones first."""

_ON_DARK = ("#56b4e9", "#ff8c42", "#2ec79b", "#e39ac4", "#f0c34e", "#9ad0f5", "#ececf1")
"""The same on a dark page."""

INK, GREY = "#1b1b1f", "#77777f"
"""Colours of lines that belong to no series."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Lines differ in dash as well as in colour, for print without colour."""

MARKS = ("circle", "square", "diamond", "triangle-up", "x")
"""Symbols of points by series."""

SCALE = "Viridis"
"""Colour scale of maps."""

LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
"""A legend above its chart."""

UNIT = [-0.03, 1.03]
"""Range of an axis with values from 0 to 1."""


def plain(text: str) -> str:
    """Return text escaped for Plotly, which interprets some tags and entities."""
    return html.escape(text, quote=False)


def faint(solid: str) -> str:
    """Return a colour for the band of a line."""
    red, green, blue = (int(solid[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


DARK = {
    **dict(zip(COLOURS, _ON_DARK, strict=True)),
    **dict(zip(map(faint, COLOURS), map(faint, _ON_DARK), strict=True)),
    INK: "#ececf1",
    GREY: "#9a9aa5",
}
"""Colours on a dark page by those on a light one."""


def colour(index: int) -> str:
    """Return the colour of one of several series."""
    return COLOURS[index % len(COLOURS)]


def line_style(index: int, *, dashed: bool = False) -> dict[str, str]:
    """Return colour and dash of one of several lines; ``dashed`` lines all differ in dash, others if colours repeat."""
    repeated = index if dashed else index // len(COLOURS)
    return {"color": colour(index), "dash": DASHES[repeated % len(DASHES)]}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with an escaped title."""
    return {"title": {"text": plain(title)}, **more}


def trace(kind: str, **attributes: Any) -> Trace:
    """Return a trace of one of Plotly's types."""
    return {"type": kind, **attributes}


def chart(traces: list[Trace], *, x: Mapping[str, Any], y: Mapping[str, Any], top: int = 40, **layout: Any) -> Chart:
    """Return a chart with a legend above it, for which ``top`` pixels are left."""
    margin = {"l": 52, "r": 12, "t": top, "b": 44}
    return {"data": traces, "layout": {"xaxis": x, "yaxis": y, "legend": LEGEND, "margin": margin, **layout}}


def level(value: float, shade: str, *, along: str = "x", width: float = 1, **axes: str) -> dict[str, Any]:
    """Return a dotted line across the chart at a value of the other axis."""
    across = "y" if along == "x" else "x"
    ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": value, f"{across}1": value}
    return {"type": "line", **ends, "line": {"color": shade, "width": width, "dash": "dot"}, **axes}


def band(x: Sequence[Any], low: Numbers, high: Numbers, *, index: int, group: str, **axes: Any) -> list[Trace]:
    """Return two traces, the space between which is filled; none where there is no interval."""
    if all(bound is None for bound in low):
        return []
    edge = trace("scatter", mode="lines", x=x, line={"width": 0}, showlegend=False, hoverinfo="skip", **axes)
    edge["legendgroup"] = group
    filled = {"fill": "tonexty", "fillcolor": faint(colour(index))}
    return [{**edge, "y": low}, {**edge, "y": high, **filled}]


def line_with_band(
    x: Sequence[Any],
    mean: Numbers,
    low: Numbers | None = None,
    high: Numbers | None = None,
    *,
    name: str,
    index: int,
    words: Sequence[str] = (),
    mode: str = "lines+markers",
    shape: str = "linear",
    **axes: Any,
) -> list[Trace]:
    """Return a line through means after the band between their bounds.

    Args:
        x: Positions of the points.
        mean: The means.
        low: Lower bounds; None for a line without a band.
        high: Upper bounds.
        name: Name of the line.
        index: Its place among the lines of the chart, for colour, dash and mark.
        words: What to show of each point; the mean with three digits by default.
        mode: Plotly's mode of the line.
        shape: Plotly's shape of the line.
        axes: Names of its axes.
    """
    value = "%{text}" if words else "%{fullData.name}: %{y:.3f}"
    line = trace("scatter", mode=mode, x=x, y=mean, name=plain(name), legendgroup=name, **axes)
    line |= {"text": [f"{plain(name)}: {text}" for text in words]} if words else {}
    line |= {"hovertemplate": f"%{{x}}: {value}<extra></extra>", "line": line_style(index, dashed=True)}
    line["line"]["shape"] = shape
    line["marker"] = {"symbol": MARKS[index % len(MARKS)], "size": 7}
    if low is None or high is None:
        return [line]
    return [*band(x, low, high, index=index, group=name, **axes), {**line, "meta": {"low": low, "high": high}}]


def curves_over_steps(steps: list[int], panels: Sequence[Mapping[str, Any]]) -> Chart:
    """Return panels of curves over training steps, one below the other.

    Args:
        steps: The steps.
        panels: ``title``, ``range`` of its axis or None, and ``series`` with ``name``, ``mean``, ``low``, ``high`` and
            ``shape`` of each panel.
    """
    gap = 0.08
    height = (1 - gap * (len(panels) - 1)) / len(panels)
    legend = {"orientation": "h", "y": -0.1, "yanchor": "top"}
    layout = {"xaxis": axis("step"), "legend": legend, "margin": {"l": 52, "r": 12, "t": 12, "b": 150}}
    traces = []
    for place, panel in enumerate(panels):
        # The axis of steps belongs to the first y axis, which is that of the last panel.
        at = len(panels) - 1 - place
        suffix, low = str(at + 1) if at else "", at * (height + gap)
        limits = {} if panel["range"] is None else {"range": panel["range"]}
        layout[f"yaxis{suffix}"] = axis(panel["title"], domain=[low, min(1, low + height)], **limits)
        for index, series in enumerate(panel["series"]):
            values, shape = (series[name] for name in ("mean", "low", "high")), series["shape"]
            mode = "lines" if len(steps) > 30 or shape == "hv" else "lines+markers"
            own = {"index": index, "mode": mode, "shape": shape, "yaxis": f"y{suffix}"}
            traces += line_with_band(steps, *values, name=series["name"], **own)
    return {"data": traces, "layout": layout}
