"""Charts of the study's page as plain Plotly JSON, and its table of events, from the data of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wherewhat.chart_style import GREY, INK, MARKS, Chart, Trace, axis, chart, colour, level, line_with_band, trace

Data = Mapping[str, Any]
_MARGIN = {"l": 64, "r": 12, "t": 12, "b": 44}


def page_charts(data: Data) -> dict[str, Any]:
    """Return the charts by name, those with a choice by choice; the traces of an encoding have its name as group."""
    encodings, edge, loss = data["encodings"], data["about"]["context"], axis("loss (nats/byte)")
    shapes = [level(edge, GREY, along="y")]
    methods = dict.fromkeys(method for encoding in encodings for method in encoding["lengths"]["methods"])

    def length(method: str) -> Chart:
        points = [
            (encoding["lengths"]["position"], encoding["lengths"]["methods"].get(method)) for encoding in encodings
        ]
        return _curves(encodings, points, x=axis("position (bytes)", type="log"), y=loss, shapes=shapes)

    def perturbed(kind: str) -> Chart:
        curves = [encoding["perturbed"].get(kind) for encoding in encodings]
        points = [([100 * x for x in curve["x"]] if curve else [], curve) for curve in curves]
        return _curves(encodings, points, x=axis("% perturbed"), y=axis("increase (nats/byte)"))

    residual = [
        (encoding["residual"]["x"] if encoding["residual"] else [], encoding["residual"]) for encoding in encodings
    ]
    return {
        "colours": [colour(index) for index in range(len(encodings))],
        "time": _over_time(data),
        "when": _order(data),
        "events": [
            [encoding["name"], *(_reached(encoding, event) for event in data["events"])] for encoding in encodings
        ],
        "length": {method: length(method) for method in methods},
        "perturb": {kind: perturbed(kind) for kind in data["kinds"]},
        "residual": _curves(encodings, residual, x=axis("λ: 1 is the model, 0 is additive"), y=loss),
        "relation": {x: {y: _relation(data, x, y) for y in data["tolerance"]} for x in data["additivity"]},
    }


def _curves(encodings: Sequence[Data], points: Sequence[tuple[list[Any], Data | None]], **layout: Any) -> Chart:
    """Draw a curve of each encoding that has one, given with its positions."""
    traces = []
    for index, (encoding, (x, curve)) in enumerate(zip(encodings, points, strict=True)):
        traces += [] if curve is None else _line(encoding["name"], index, x, curve)
    return chart(traces, **layout, margin=_MARGIN, showlegend=False)


def _line(name: str, index: int, x: list[Any], curve: Data, **axes: str) -> list[Trace]:
    """Return a line with its band at the positions where it is defined."""
    known = [at for at, value in enumerate(curve["mid"]) if value is not None]
    x, mean, low, high = (
        values if len(known) == len(values) else [values[at] for at in known]
        for values in (x, curve["mid"], curve["low"], curve["high"])
    )
    return line_with_band(x, mean, low, high, name=name, index=index, mode="lines", **axes)


def _marks(encoding: Data, event: str) -> list[tuple[Data, str, str]]:
    """Return the steps at which half of a change was first and, if later, permanently reached.

    Each is its spread over seeds, the ending of its symbol and its description.
    """
    half, lasting = encoding["half"].get(event), encoding["lasting"].get(event)
    if half is None or half["mid"] is None:
        return []
    later = lasting["mid"] is not None and lasting["mid"] > half["mid"]
    return [(half, "", "half-way"), *([(lasting, "-open", "permanently half-way")] if later else [])]


def _reached(encoding: Data, event: str) -> str:
    """Return the same in words, mean over seeds with minimum and maximum."""
    listed = [
        f"{mark['mid']:,.0f} ({mark['low']:,.0f}–{mark['high']:,.0f}){_missing(mark)}"
        for mark, *_ in _marks(encoding, event)
    ]
    return "; permanently ".join(listed) or "none"


def _missing(mark: Data) -> str:
    return f", {mark['missing']} without" if mark["missing"] else ""


def _over_time(data: Data) -> Chart:
    """Draw all panels on one time axis; step 0 is at half of the first step after it."""
    panels, encodings = data["panels"], data["encodings"]
    first = min(next((step for step in encoding["steps"] if step > 0), 1) for encoding in encodings)
    height, traces, shapes = 1 / len(panels), [], []
    axes: dict[str, Any] = {}
    for row, panel in enumerate(panels):
        number, top = str(row + 1) if row else "", 1 - row * height
        axes[f"yaxis{number}"] = axis(panel["title"], domain=[top - height + 0.012, top], automargin=False, nticks=5)
        axes[f"yaxis{number}"]["title"]["font"] = {"size": 11}
        if panel["name"] == "r":
            shapes.append(level(data["about"]["noise_floor"], GREY, yref=f"y{number}"))
        for index, encoding in enumerate(encodings):
            curve = encoding["curves"][panel["name"]]
            x = [max(step, first / 2) for step in encoding["steps"]]
            traces += _line(encoding["name"], index, x, curve, yaxis=f"y{number}")
            for mark, ending, words in _marks(encoding, panel["name"]):
                style = {"symbol": f"diamond{ending}", "size": 9, "color": colour(index)}
                style |= {"line": {"width": 1.5, "color": INK}}
                point = trace("scatter", mode="markers", x=[max(mark["mid"], first / 2)], marker=style)
                point |= {"y": [((curve["mid"][0] or 0) + (curve["mid"][-1] or 0)) / 2], "yaxis": f"y{number}"}
                text = f"{encoding['name']}: {words} at step {mark['mid']:,.0f}{_missing(mark)}<extra></extra>"
                traces.append({**point, "legendgroup": encoding["name"], "hovertemplate": text})
    steps = axis("training step (0 is at the left edge)", type="log", anchor=f"y{len(panels)}")
    axes |= {"height": 150 * len(panels), "margin": {**_MARGIN, "l": 72}}
    return chart(traces, x=steps, y=axes.pop("yaxis"), **axes, shapes=shapes, showlegend=False)


def _order(data: Data) -> Chart:
    """Draw the steps of all events, one row for each."""
    titles = {panel["name"]: panel["title"].partition(" (")[0] for panel in data["panels"]}
    traces = []
    for index, encoding in enumerate(data["encodings"]):
        listed = [(event, *mark) for event in data["events"] for mark in _marks(encoding, event)]
        up, down = ([abs(mark[end] - mark["mid"]) for _, mark, *_ in listed] for end in ("high", "low"))
        symbols = [f"{MARKS[index % len(MARKS)]}{ending}" for _, _, ending, _ in listed]
        marker = {"size": 11, "color": colour(index), "symbol": symbols}
        bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1}
        points = trace("scatter", mode="markers", x=[mark["mid"] for _, mark, *_ in listed], error_x=bars)
        points |= {
            "marker": marker,
            "y": [titles[event] for event, *_ in listed],
            "text": [words for *_, words in listed],
        }
        text = f"{encoding['name']}: %{{y}} %{{text}} at step %{{x:.0f}}<extra></extra>"
        traces.append({**points, "legendgroup": encoding["name"], "hovertemplate": text})
    order = {"categoryorder": "array", "categoryarray": [titles[event] for event in data["events"]]}
    rows = {"type": "category", "autorange": "reversed", **order}
    margin = {**_MARGIN, "l": 150}
    return chart(traces, x=axis("training step", type="log"), y=rows, showlegend=False, margin=margin)


def _relation(data: Data, x: str, y: str) -> Chart:
    """Draw two numbers at the end of training against each other, one point for each run."""
    traces = []
    for index, name in enumerate(encoding["name"] for encoding in data["encodings"]):
        ends = [end for end in data["ends"] if end["encoding"] == name and None not in (end[x], end[y])]
        marker = {"size": 11, "color": colour(index), "symbol": MARKS[index % len(MARKS)]}
        points = trace("scatter", mode="markers+text", x=[end[x] for end in ends], y=[end[y] for end in ends])
        points |= {"marker": marker, "text": [name] * len(ends), "textposition": "top center", "legendgroup": name}
        traces.append({**points, "hovertemplate": f"{name}: %{{x:.3f}}, %{{y:.3f}}<extra></extra>"})
    across, up = axis(data["additivity"][x]), axis(data["tolerance"][y])
    return chart(traces, x=across, y=up, margin=_MARGIN, showlegend=False)
