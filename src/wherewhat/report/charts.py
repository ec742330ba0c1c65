"""Every chart of a page as plain Plotly JSON, from the same data as the page; figures of notebooks are these charts.

A chart of a head or metric that the reader chooses is stored with empty arrays; the page's script fills them in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from wherewhat.chart_style import (
    COLOURS,
    GREY,
    INK,
    SCALE,
    UNIT,
    Chart,
    Numbers,
    Trace,
    axis,
    chart,
    colour,
    curves_over_steps,
    level,
    line_with_band,
    plain,
    trace,
)

Data = Mapping[str, Any]

_STAR = "#d6277b"
"""Colour of the chosen head."""

_BINS = 49
"""Bars of a distribution over heads."""

_EDGE = {"width": 0.5, "color": "#888888"}
"""Line around a mark."""


def _text(value: float) -> str:
    """Return a number as the page's script writes it: ``1`` and not ``1.0``."""
    return f"{value:.15g}"


def _words(value: Data | None) -> str:
    return "undefined" if value is None else value["words"]


def _line(x: Sequence[Any], values: Sequence[Data | None], name: str, index: int) -> list[Trace]:
    """Return a line through means with the band of their intervals."""
    mean, low, high = ([None if value is None else value[key] for value in values] for key in ("mean", "low", "high"))
    return line_with_band(x, mean, low, high, name=name, index=index, words=list(map(_words, values)))


# Curves by distance, frequency, perturbation and length


def _quartiles(distance: Data, *, names: Sequence[str], title: str) -> Chart:
    """Draw medians over heads with bands between quartiles by dummy distance, and their control with random phases."""
    x, lines = list(map(_text, distance["distances"])), []
    for index, curve in enumerate(distance["curves"][name] for name in names if name in distance["curves"]):
        lines += line_with_band(x, curve["mid"], curve["low"], curve["high"], name=curve["title"], index=index)
    return chart(lines, x=axis("dummy distance (tokens)", type="category"), y=axis(title))


def _bars(bands: Data, *, names: Mapping[str, str], title: str, random: Sequence[str] = ()) -> Chart:
    """Draw means by frequency band with 95 % intervals over documents; dotted for as many planes chosen at random."""

    def short(period: float | None) -> str:
        if period is None:
            return "∞"
        return f"{period:.0e}".replace("e+0", "e+") if period >= 1e4 else f"{period:.0f}"

    def bounds(values: Sequence[Data | None], end: str) -> list[float]:
        return [0 if value is None or value[end] is None else abs(value[end] - value["mean"]) for value in values]

    periods = enumerate(bands["turns"], 1)
    turns = [f"{number} (a turn in {short(fast)} to {short(slow)} tokens)" for number, (fast, slow) in periods]
    x, traces = [str(number) for number in range(1, len(turns) + 1)], []
    for index, (key, name) in enumerate(names.items()):
        values = bands[key]
        reach = {"type": "data", "symmetric": False, "color": INK, "array": bounds(values, "high")}
        text = [f"band {band}<br>{name}: {_words(value)}" for band, value in zip(turns, values, strict=True)]
        bars = trace("bar", name=name, x=x, y=[value and value["mean"] for value in values], text=text)
        bars |= {"hoverinfo": "text", "textposition": "none", "customdata": turns}
        bars["error_y"] = {**reach, "arrayminus": bounds(values, "low")}
        traces.append({**bars, "marker": {"color": COLOURS[index], "pattern": {"shape": "/" if index else ""}}})
    shapes = [level(bands[name]["mean"], COLOURS[i], width=2) for i, name in enumerate(random) if bands[name]]
    category = axis("band, fast to slow", type="category")
    return chart(traces, x=category, y=axis(title), barmode="group", shapes=shapes)


def _increase(perturbation: Data, *, which: str) -> Chart:
    """Draw the loss increase by share perturbed, one line for each kind."""
    lines = []
    for index, kind in enumerate(perturbation["kinds"]):
        lines += _line([f"{_text(rate)} %" for rate in kind["rates"]], kind[which], kind["title"], index)
    y = axis("loss increase (nats)", rangemode="tozero")
    return chart(lines, x=axis("share perturbed", type="category"), y=y)


def _by_position(lengths: Data, *, which: str, title: str) -> Chart:
    """Draw one line for each length method by position, with the trained length."""
    lines = []
    for index, method in enumerate(lengths["methods"]):
        if which == "loss" or method["name"] != "none":
            lines += _line(lengths["positions"], method[which], method["name"], index)
    shapes = [level(lengths["edge"], INK, along="y")] if lengths["edge"] else []
    return chart(lines, x=axis("position (tokens)"), y=axis(title), top=60, shapes=shapes)


_RANKS, _DRIFTS = (("rank_correlation", "rank_correlation_scrambled"), ("drift", "drift_scrambled"))
_SCORES, _LOSSES = (
    {"positional": "positional", "symbolic": "symbolic"},
    {"without": "without the band", "only": "with it alone"},
)
_LOSS = "loss increase (nats)"

SECTIONS: Mapping[str, tuple[str, Callable[[Any], Chart]]] = {
    "distance": ("distance", partial(_quartiles, names=_RANKS, title="rank correlation")),
    "drift": ("distance", partial(_quartiles, names=_DRIFTS, title="drift")),
    "band-scores": ("bands", partial(_bars, names=_SCORES, title="score of single planes")),
    "band-losses": ("bands", partial(_bars, names=_LOSSES, title=_LOSS, random=("without_random", "only_random"))),
    "perturb-all": ("perturbation", partial(_increase, which="all")),
    "perturb-untouched": ("perturbation", partial(_increase, which="untouched")),
    "length-loss": ("lengths", partial(_by_position, which="loss", title="loss (nats)")),
    "length-cost": ("lengths", partial(_by_position, which="cost", title="difference to unmodified (nats)")),
}
"""Charts without a choice by their name on the page: the part of the model's data that they show, and the function."""


# Charts of all heads


def head_map(layers: Mapping[int, Sequence[float | None]], *, title: str, unit: str, names: Sequence[str]) -> Chart:
    """Draw layers × heads with a metric as colour; ``names`` are those of a category's codes, else empty."""
    width = max(map(len, layers.values()), default=0)
    grid = [[*values, *[None] * (width - len(values))] for values in layers.values()]

    def shown(value: float | None) -> str:
        return "undefined" if value is None else plain(names[int(value)]) if names else f"{value:.4g}"

    text = [
        [f"layer {layer}, head {head}<br>{plain(title)}: {shown(value)}" for head, value in enumerate(row)]
        for layer, row in zip(layers, grid, strict=True)
    ]
    cells = trace("heatmap", z=grid, x=list(range(width)), y=list(layers), colorscale=SCALE, text=text)
    cells |= {"hoverinfo": "text", "xgap": 1, "ygap": 1, "colorbar": {"title": {"text": plain(unit)}}}
    if names:
        cells["colorbar"] |= {"tickvals": list(range(len(names))), "ticktext": list(map(plain, names))}
        cells |= {"zmin": 0, "zmax": len(names) - 1}
    return {"data": [cells], "layout": {"xaxis": axis("head"), "yaxis": axis("layer")}}


def _page_map(model: Data) -> Chart:
    """Return the map of a model without numbers, in the size of the page."""
    drawn = head_map({}, title="", unit="", names=())
    drawn["data"][0]["colorbar"] |= {"thickness": 12, "len": 1}
    for name, size, step in (("xaxis", max(model["heads"]), 4), ("yaxis", len(model["layers"]), 5)):
        drawn["layout"][name] |= {"dtick": step if size > 12 else 1, "showgrid": False}
    return drawn


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of sorted values without the outer 1 % at each end."""
    low, high = (values[math.floor(q * (len(values) - 1) + 0.5)] if values else q for q in (0.01, 0.99))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _summary(values: Sequence[float], categories: Sequence[str]) -> str:
    """Return least, greatest and median of sorted numbers; of a category the number of heads with each name."""
    if not values:
        return "undefined"
    if categories:
        return ", ".join(f"{plain(name)} {values.count(code)}" for code, name in enumerate(categories))
    shown = (f"{x:.1f}" if abs(x) >= 100 else f"{x:.3f}" for x in (values[0], values[-1], values[len(values) // 2]))
    return "{} to {}, median {}".format(*shown)


def distribution(metric: Data, *, own: str) -> Chart:
    """Draw the distributions of a metric over heads, of the model and its control models, in the colours of its map.

    Args:
        metric: Its ``title``, ``unit``, ``categories`` and ``values`` by weights.
        own: Weights of the model itself, whose values the colours span.
    """
    categories, bins = metric["categories"], len(metric["categories"]) or _BINS
    values = {
        weights: sorted(x for of_layer in grid for x in of_layer or () if x is not None)
        for weights, grid in metric["values"].items()
    }
    everything = [x for listed in values.values() for x in listed] or [0.0]
    least, most = (0, bins - 1) if categories else (min(everything), max(everything))
    low, high = (0, bins - 1 or 1) if categories else _span(values.get(own, []))
    width = (most - least) / (bins - 1 or 1) or 1
    # Bars are coloured by number, so that all metrics share one array.
    marker = {"color": list(range(bins)), "colorscale": SCALE, "cmin": (low - least) / width}
    marker |= {"cmax": (high - least) / width, "line": {"width": 0.5, "color": INK}}
    traces, notes, axes = [], [], {}
    for row, (weights, listed) in enumerate(values.items()):
        number, height = str(row + 1) if row else "", 1 / len(values)
        domain = [1 - (row + 0.62) * height, 1 - (row + 0.22 * (row > 0)) * height]
        axes[f"yaxis{number}"] = {"domain": domain, "showticklabels": False, "showgrid": False, "rangemode": "tozero"}
        axes[f"yaxis{number}"]["zeroline"] = False
        note = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": domain[1], "yanchor": "bottom"}
        text = f"{weights}: {_summary(listed, categories)}"
        notes.append({**note, "name": weights, "text": text, "showarrow": False})
        counts = [0] * bins
        for value in listed:
            counts[min(bins - 1, math.floor((value - least) / width + 0.5))] += 1
        bars = trace("bar", x0=least, dx=width, y=counts, width=width, name=weights, yaxis=f"y{number}", marker=marker)
        where = "%{customdata}" if categories else "about %{x:.4g}"
        bars |= {"customdata": list(map(plain, categories))} if categories else {}
        traces.append({**bars, "hovertemplate": f"{weights}, {where}: %{{y}} heads<extra></extra>"})
    title = plain(f"{metric['title']} ({metric['unit']})" if metric["unit"] else metric["title"])
    x: dict[str, Any] = {"title": {"text": title, "standoff": 4}, "anchor": traces[-1]["yaxis"]}
    x |= {"tickvals": list(range(bins)), "ticktext": list(map(plain, categories))} if categories else {}
    layout = {"bargap": 0, "showlegend": False, "margin": {"l": 52, "r": 12, "t": 24, "b": 40}}
    return {"data": traces, "layout": {**layout, "xaxis": x, **axes, "annotations": notes}}


def plane(layers: Sequence[int], swaps: Data) -> Chart:
    """Draw every head by its positional and its symbolic score, coloured by layer; sinks are open diamonds."""

    def label(at: int, head: int) -> str:
        code = swaps["label"][at] and swaps["label"][at][head]
        return "" if code is None else swaps["codes"][int(code)]

    grid = enumerate(zip(layers, swaps["s_pos"], strict=False))
    heads = [(at, head) for at, (_, scores) in grid for head, x in enumerate(scores or ()) if x is not None]
    x, y = ([swaps[name][at][head] for at, head in heads] for name in ("s_pos", "s_sym"))
    labels = [label(at, head) for at, head in heads]
    text = [f"layer {layers[at]}, head {head}: {name}" for (at, head), name in zip(heads, labels, strict=True)]
    marks = {"size": 8, "color": [layers[at] for at, _ in heads], "colorscale": SCALE, "line": _EDGE}
    marks |= {"symbol": ["diamond-open" if name == "sink" else "circle" for name in labels]}
    marks |= {"colorbar": {"thickness": 12, "title": {"text": "layer"}}}
    points = trace("scatter", mode="markers", x=x, y=y, text=text, customdata=[list(head) for head in heads])
    points |= {"hovertemplate": "%{text}<br>positional %{x}, symbolic %{y}<extra></extra>", "marker": marks}
    ends = {"x": axis("positional score", range=UNIT), "y": axis("symbolic score", range=UNIT)}
    return chart([points], **ends, top=12)


# Charts of one head


def head_place(layers: Sequence[int], swaps: Data, *, layer: int, head: int) -> Chart:
    """Draw one head, a star with its intervals, among all heads; the layer is an index into ``layers``."""
    (others,) = plane(layers, swaps)["data"]
    grey = {"size": 5, "opacity": 0.5, "color": "#999999", "symbol": others["marker"]["symbol"], "line": _EDGE}

    def score(name: str) -> Any:
        return swaps[name][layer] and swaps[name][layer][head]

    def reach(name: str) -> dict[str, Any]:
        mean, low, high = (score(f"{name}{end}") for end in ("", "_low", "_high"))
        known = low is not None  # not for one query of one document
        bars = {"array": [high - mean], "arrayminus": [mean - low]} if known else {}
        return {"visible": known, "type": "data", "symmetric": False, "color": _STAR, **bars}

    star = trace("scatter", mode="markers", x=[score("s_pos")], y=[score("s_sym")], hoverinfo="skip")
    star |= {"marker": {"size": 14, "color": _STAR, "symbol": "star"}, "error_x": reach("s_pos")}
    traces = [{**others, "marker": grey}, {**star, "error_y": reach("s_sym")}]
    ends = {"x": axis("positional", range=UNIT), "y": axis("symbolic", range=UNIT)}
    return chart(traces, **ends, top=12, showlegend=False)


def head_curve(distances: Sequence[int], own: Numbers, mean: Sequence[Numbers], *, name: str, documents: int) -> Chart:
    """Draw the distance term of a head in one document; of several also the mean and the bounds of its interval."""
    several = documents > 1
    thin = trace("scatter", mode="lines", x=distances, y=own, name=plain(name))
    thin |= {"line": {"color": COLOURS[1], "width": 1 if several else 2}}
    thin |= {"hovertemplate": "distance %{x}: %{y:.3f}<extra></extra>"}
    title = f"mean of {documents} documents"
    middle = line_with_band(distances, *mean, name=title, index=0, mode="lines") if several else []
    return chart([thin, *middle], x=axis("distance (tokens)"), y=axis("a, centred"), showlegend=several)


def head_planes(turns: Numbers, values: Numbers, *, title: str) -> Chart:
    """Draw a number of each RoPE plane by its period, on a logarithmic axis; planes that do not turn are last.

    Args:
        turns: Turns per token of each plane; 0 or None for planes that do not turn.
        values: The number of each.
        title: Its title.
    """
    known = [-math.log10(turn) for turn in turns if turn]
    least, most = (min(known), max(known)) if known else (0.0, 0.0)
    step = (most - least) / (len(known) - 1) if len(known) > 1 else 0.1
    still = iter(most + step * number for number in range(1, len(turns) + 1))
    x = [round(-math.log10(turn) if turn else next(still), 5) for turn in turns]
    periods = [f"one turn in {1 / turn:.3g} tokens" if turn else "does not turn" for turn in turns]
    bars = trace("bar", x=x, y=values, width=0.85 * step, marker={"color": COLOURS[0]}, text=[""] * len(x))
    bars |= {"textposition": "none"}
    bars |= {"customdata": [[number, period] for number, period in enumerate(periods, 1)]}
    hover = f"plane %{{customdata[0]}}: {title} %{{y:.3g}}<br>%{{customdata[1]}}%{{text}}<extra></extra>"
    ticks = list(range(math.floor(least), math.floor(most) + 1))
    labels = {"tickvals": ticks, "ticktext": [f"{10**power:,}" for power in ticks], "showgrid": False}
    ends = {"x": axis("period (tokens)", **labels), "y": axis(title, rangemode="tozero")}
    return chart([{**bars, "hovertemplate": hover}], **ends, top=12)


# Charts of several models


def ranks(models: Iterable[str]) -> Chart:
    """Draw sorted values over the share of heads: two lines for each model, its own and its random control's.

    The heads of unrelated models have ranks in common, and nothing else.
    """
    traces = []
    for index, name in enumerate(models):
        for title, dash, width in ((name, "solid", 2.5), (f"{name}, one random control", "dash", 1.5)):
            line = {"color": colour(index), "dash": dash, "width": width}
            traces.append(trace("scatter", mode="lines", name=plain(title), line=line))
            traces[-1]["hovertemplate"] = "%{x:.0f} % of heads: at most %{y:.4g}<extra>%{fullData.name}</extra>"
    return chart(traces, x=axis("share of heads (%)", range=[0, 100]), y=axis(""), top=60)


def head_by_head(first: str, second: str) -> Chart:
    """Draw a metric of the heads of two models with these names against each other, with the line of equal values."""
    marker = {"size": 7, "opacity": 0.75, "colorscale": SCALE}
    marker |= {"colorbar": {"thickness": 10, "title": {"text": "layer"}}}
    equal = {"type": "line", "line": {"color": GREY, "width": 1, "dash": "dot"}}
    points = trace("scatter", mode="markers", hoverinfo="text", marker=marker)
    return chart([points], x=axis(first), y=axis(second), top=12, shapes=[equal])


def compared_groups(section: Data, *, by: Sequence[str], along: str | None) -> Chart:
    """Draw a metric of groups of runs: lines over steps or sizes if runs are grouped by them, else a mark each."""

    def short(value: Any) -> str:
        return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines: dict[str, list[Data]] = {}
    for row in section["groups"]:
        if not along or row[along] is not None:
            name = ", ".join(short(row[key]) for key in by if key != along) or section["metric"]
            lines.setdefault(plain(name), []).append(row)
    traces = []
    for name, rows in lines.items():
        up, down = ([0 if row[end] is None else abs(row[end] - row["mean"]) for row in rows] for end in ("high", "low"))
        bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1, "width": 2}
        x, y = [max(1, row[along]) if along else name for row in rows], [row["mean"] for row in rows]
        mode, hover = "lines+markers" if along else "markers", "%{y:.4g}<extra>%{fullData.name}</extra>"
        traces.append(trace("scatter", mode=mode, x=x, y=y, name=name, error_y=bars, hovertemplate=hover))
    steps = axis(along, type="log") if along else {"type": "category", "automargin": "height"}
    return chart(traces, x=steps, y=axis(section["title"]), top=12, showlegend=bool(along))


# The charts of a page


def page_charts(data: Data) -> dict[str, Any]:
    """Return the charts of a report's page: those of each model, of several models, and of trainings."""
    pairs = data["comparison"]["pairs"] if data.get("comparison") else []
    return {
        "models": [_model_charts(model) for model in data["models"] if "swaps" in model],
        "ranks": ranks(model["model"]["name"] for model in data["models"]) if pairs else None,
        "pairs": [head_by_head(pair["first"], pair["model"]) for pair in pairs],
        "learning": [curves_over_steps(study["steps"], study["panels"]) for study in data.get("learning", [])],
    }


def _model_charts(model: Data) -> dict[str, Any]:
    """Return the charts of one model by name; a list where one of several is chosen."""
    about, layers = model["model"], model["model"]["layers"]
    versions = [model["swaps"], model["swaps"]["all_keys"]] if model["swaps"] else []
    shared = any("share" in record for of_layer in model["records"] for record in of_layer)
    title = "share of variance" if shared else "use"
    name, documents = model["texts"][0]["document"], model["sizes"].get("axes", {"documents": 1})["documents"]
    planes = model["turns"]
    return {
        **{name: draw(model[part]) for name, (part, draw) in SECTIONS.items() if model[part]},
        "map": _page_map(about),
        "range": [distribution(metric, own=about["weights"]) for metric in model["metrics"]],
        "curve": head_curve([], [], ([], [0], [0]), name=name, documents=documents),
        # Layers with the same planes share a chart; the others have the number of the first of them.
        "planes": [
            head_planes(turns or [], [], title=title) if at == planes.index(turns) else planes.index(turns)
            for at, turns in enumerate(planes)
        ],
        "scatter": [plane(layers, version) for version in versions],
        "place": head_place([], versions[0], layer=0, head=0) if versions else None,
    }


def referenced(charts: Any, data: Any) -> Any:
    """Return charts in which each array that is part of the page's data is its path there, ``{"$": [key, ...]}``."""
    paths: dict[int, list[Any]] = {}

    def visit(part: Any, path: list[Any]) -> None:
        if isinstance(part, list):
            paths[id(part)] = path
        if isinstance(part, dict | list):
            for key, value in part.items() if isinstance(part, dict) else enumerate(part):
                if isinstance(value, dict | list):
                    visit(value, [*path, key])

    def written(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: written(value) for name, value in part.items()}
        if isinstance(part, list):
            return {"$": paths[id(part)]} if len(part) > 8 and id(part) in paths else list(map(written, part))
        return part

    visit(data, [])
    return written(charts)
