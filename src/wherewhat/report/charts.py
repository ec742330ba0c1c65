"""Every chart of a page as plain Plotly JSON, from the same data as the page; figures of notebooks are these charts.

A chart that depends on what the reader chooses is stored without its arrays, see :func:`emptied`; the page's script
fills in those of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wherewhat.chart_style import (
    COLOURS,
    GREY,
    INK,
    SCALE,
    UNIT,
    Chart,
    Numbers,
    axis,
    chart,
    curves_over_steps,
    level,
    line_with_band,
    plain,
)

Data = Mapping[str, Any]
Grid = Sequence[Sequence[float | None] | None]
"""Values of heads by layer; None for a layer without any."""

_STAR = "#d6277b"
"""Colour of the chosen head."""

_BINS = 49
"""Bars of a distribution over heads."""


def _text(value: float) -> str:
    """Return a number as the page's script writes it: ``1`` and not ``1.0``."""
    return f"{value:.15g}"


def _words(value: Data | None) -> str:
    """Return a mean with its interval in words."""
    return "undefined" if value is None else value["words"]


def _line(x: Sequence[Any], values: Sequence[Data | None], name: str, index: int) -> list[dict[str, Any]]:
    """Return a line through means with the band of their intervals."""
    mean, low, high = ([value and value[key] for value in values] for key in ("mean", "low", "high"))
    return line_with_band(x, mean, low, high, name=name, index=index, words=list(map(_words, values)))


# Curves by distance, frequency, perturbation and length


def _quartiles(distance: Data, names: Sequence[str], title: str) -> Chart:
    """Draw medians over heads with bands between quartiles, by dummy distance."""
    x = list(map(_text, distance["distances"]))
    curves = [distance["curves"][name] for name in names if name in distance["curves"]]
    lines = (
        line_with_band(x, curve["mid"], curve["low"], curve["high"], name=curve["title"], index=index)
        for index, curve in enumerate(curves)
    )
    dummy = axis("dummy distance (tokens)", type="category")
    return chart([trace for line in lines for trace in line], x=dummy, y=axis(title))


def key_order(distance: Data) -> Chart:
    """Draw how well the order of keys is kept by dummy distance, and its control with random phases."""
    return _quartiles(distance, ("rank_correlation", "rank_correlation_scrambled"), "rank correlation")


def drift(distance: Data) -> Chart:
    """Draw the drift of the key component by dummy distance, and its control with random phases."""
    return _quartiles(distance, ("drift", "drift_scrambled"), "drift")


def _band_names(bands: Data) -> list[str]:
    def short(period: float | None) -> str:
        if period is None:
            return "∞"
        return f"{period:.0e}".replace("e+0", "e+") if period >= 1e4 else f"{period:.0f}"

    turns = enumerate(bands["turns"], 1)
    return [f"{number} (a turn in {short(fast)} to {short(slow)} tokens)" for number, (fast, slow) in turns]


def _bars(bands: Data, names: Mapping[str, str], title: str, **layout: Any) -> Chart:
    """Draw means by frequency band as bars with 95 % intervals over documents."""
    listed, traces = _band_names(bands), []
    for index, (key, name) in enumerate(names.items()):
        values = bands[key]
        high, low = (
            [0 if value is None or value[end] is None else sign * (value[end] - value["mean"]) for value in values]
            for end, sign in (("high", 1), ("low", -1))
        )
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": [str(number) for number in range(1, len(listed) + 1)],
                "y": [value and value["mean"] for value in values],
                "customdata": listed,
                "marker": {"color": COLOURS[index], "pattern": {"shape": "/" if index else ""}},
                "error_y": {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "color": INK},
                "text": [f"band {at}<br>{name}: {_words(x)}" for at, x in zip(listed, values, strict=True)],
                "textposition": "none",
                "hoverinfo": "text",
            }
        )
    x = axis("band, fast to slow", type="category")
    return chart(traces, x=x, y=axis(title), barmode="group", **layout)


def band_scores(bands: Data) -> Chart:
    """Draw positional and symbolic scores of single planes by band."""
    return _bars(bands, {"positional": "positional", "symbolic": "symbolic"}, "score of single planes")


def band_losses(bands: Data) -> Chart:
    """Draw the loss increase without each band and with it alone; dotted for as many random planes."""
    random = [bands[name] for name in ("without_random", "only_random")]
    shapes = [level(value["mean"], COLOURS[i], width=2) for i, value in enumerate(random) if value is not None]
    names = {"without": "without the band", "only": "with it alone"}
    return _bars(bands, names, "loss increase (nats)", shapes=shapes)


def _increase(perturbation: Data, which: str) -> Chart:
    """Draw the loss increase by share perturbed, one line for each kind."""
    traces = [
        trace
        for index, kind in enumerate(perturbation["kinds"])
        for trace in _line([f"{_text(rate)} %" for rate in kind["rates"]], kind[which], kind["title"], index)
    ]
    y = axis("loss increase (nats)", rangemode="tozero")
    return chart(traces, x=axis("share perturbed", type="category"), y=y)


def increase(perturbation: Data) -> Chart:
    """Draw the loss increase by share perturbed, over all targets."""
    return _increase(perturbation, "all")


def increase_untouched(perturbation: Data) -> Chart:
    """Draw the loss increase by share perturbed, over targets that were not changed."""
    return _increase(perturbation, "untouched")


def _by_position(lengths: Data, which: str, title: str) -> Chart:
    """Draw one line for each length method by position, with the trained length."""
    edge = lengths["edge"]
    traces = [
        trace
        for index, method in enumerate(lengths["methods"])
        if which == "loss" or method["name"] != "none"
        for trace in _line(lengths["positions"], method[which], method["name"], index)
    ]
    shapes = [level(edge, INK, along="y")] if edge else []
    return chart(traces, x=axis("position (tokens)"), y=axis(title), top=60, shapes=shapes)


def length_loss(lengths: Data) -> Chart:
    """Draw the loss by position, one line for each length method."""
    return _by_position(lengths, "loss", "loss (nats)")


def length_cost(lengths: Data) -> Chart:
    """Draw the difference of the loss to that of the unmodified model by position."""
    return _by_position(lengths, "cost", "difference to unmodified (nats)")


# Charts of all heads


def head_map(layers: Mapping[int, Sequence[float | None]], *, title: str, unit: str, names: Sequence[str]) -> Chart:
    """Draw layers × heads with a metric as colour; ``names`` are those of a category's codes, else empty."""
    width = max(map(len, layers.values()), default=0)
    grid = [[*values, *[None] * (width - len(values))] for values in layers.values()]

    def shown(value: float | None) -> str:
        return "undefined" if value is None else plain(names[int(value)]) if names else f"{value:.4g}"

    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": grid,
        "x": list(range(width)),
        "y": list(layers),
        "colorscale": SCALE,
        "text": [
            [f"layer {layer}, head {head}<br>{plain(title)}: {shown(value)}" for head, value in enumerate(row)]
            for layer, row in zip(layers, grid, strict=True)
        ],
        "hoverinfo": "text",
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"title": {"text": unit}},
    }
    if names:
        trace["colorbar"] |= {"tickvals": list(range(len(names))), "ticktext": list(map(plain, names))}
        trace |= {"zmin": 0, "zmax": len(names) - 1}
    return {"data": [trace], "layout": {"xaxis": axis("head"), "yaxis": axis("layer")}}


def _page_map(model: Data) -> Chart:
    """Return the map of a model without numbers, in the size of the page."""
    drawn = emptied(head_map({}, title="", unit="", names=()))
    drawn["data"][0]["colorbar"] |= {"thickness": 12, "len": 1}
    sizes = {"xaxis": max(model["heads"]), "yaxis": len(model["layers"])}
    for name, size in sizes.items():
        step = {"xaxis": 4, "yaxis": 5}[name] if size > 12 else 1
        drawn["layout"][name] |= {"dtick": step, "showgrid": False}
    return drawn


def _defined(values: Grid | None) -> list[float]:
    return sorted(x for of_layer in values or () for x in of_layer or () if x is not None)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of sorted values without the outer 1 % at each end."""
    if not values:
        return 0.0, 1.0
    low, high = (values[math.floor(q * (len(values) - 1) + 0.5)] for q in (0.01, 0.99))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def distribution(metric: Data, *, own: str) -> Chart:
    """Draw the distributions of a metric over heads, of the model and its control models, in the colours of its map.

    Args:
        metric: Its ``title``, ``unit``, ``categories`` and ``values`` by weights.
        own: Weights of the model itself, whose values the colours span.
    """
    names, categories = list(metric["values"]), metric["categories"]
    values = {name: _defined(metric["values"][name]) for name in names}
    everything = [x for listed in values.values() for x in listed] or [0.0]
    span = (0, len(categories) - 1 or 1) if categories else _span(values.get(own, []))
    least, most = (0, len(categories) - 1) if categories else (min(everything), max(everything))
    bins = len(categories) or _BINS
    width = (most - least) / (bins - 1 or 1) or 1

    def brief(x: float) -> str:
        return f"{x:.1f}" if abs(x) >= 100 else f"{x:.3f}"

    def summary(listed: list[float]) -> str:
        if not listed:
            return "undefined"
        if categories:
            return ", ".join(f"{plain(name)} {listed.count(code)}" for code, name in enumerate(categories))
        return f"{brief(listed[0])} to {brief(listed[-1])}, median {brief(listed[len(listed) // 2])}"

    title = plain(f"{metric['title']} ({metric['unit']})" if metric["unit"] else metric["title"])
    ticks = {"tickvals": list(range(bins)), "ticktext": list(map(plain, categories))} if categories else {}
    layout: dict[str, Any] = {
        "bargap": 0,
        "showlegend": False,
        "margin": {"l": 52, "r": 12, "t": 24, "b": 40},
        "xaxis": {"title": {"text": title, "standoff": 4}, **ticks, "anchor": f"y{len(names) if names[1:] else ''}"},
        "annotations": [],
    }
    traces = []
    for row, (name, listed) in enumerate(values.items()):
        suffix, height = str(row + 1) if row else "", 1 / len(names)
        bottom, top = 1 - row * height - 0.62 * height, 1 - row * height - 0.22 * height * (row > 0)
        bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "rangemode": "tozero"}
        layout[f"yaxis{suffix}"] = {"domain": [bottom, top], **bare}
        place = {"xref": "paper", "x": 0, "yref": "paper", "y": top, "yanchor": "bottom", "xanchor": "left"}
        note = {"name": name, "text": f"{name}: {summary(listed)}", "showarrow": False}
        layout["annotations"].append({**place, **note})
        counts = [0] * bins
        for value in listed:
            counts[min(bins - 1, math.floor((value - least) / width + 0.5))] += 1
        about = "%{customdata}" if categories else "about %{x:.4g}"
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x0": least,
                "dx": width,
                "y": counts,
                "width": width,
                "yaxis": f"y{suffix}",
                "hovertemplate": f"{name}, {about}: %{{y}} heads<extra></extra>",
                **({"customdata": list(map(plain, categories))} if categories else {}),
                "marker": {
                    # Bars by number, so that all metrics share one array.
                    "color": list(range(bins)),
                    "colorscale": SCALE,
                    "cmin": (span[0] - least) / width,
                    "cmax": (span[1] - least) / width,
                    "line": {"width": 0.5, "color": INK},
                },
            }
        )
    return {"data": traces, "layout": layout}


def _label(swaps: Data, layer: int, head: int) -> str:
    code = swaps["label"][layer] and swaps["label"][layer][head]
    return "" if code is None else swaps["codes"][int(code)]


def plane(layers: Sequence[int], swaps: Data) -> Chart:
    """Draw every head by its positional and its symbolic score, coloured by layer; sinks are open diamonds."""
    points = [
        (at, head, x, swaps["s_sym"][at][head])
        for at, (_, of_layer) in enumerate(zip(layers, swaps["s_pos"], strict=False))
        for head, x in enumerate(of_layer or ())
        if x is not None
    ]
    labels = [_label(swaps, at, head) for at, head, *_ in points]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [x for _, _, x, _ in points],
        "y": [y for *_, y in points],
        "text": [f"layer {layers[at]}, head {h}: {label}" for (at, h, *_), label in zip(points, labels, strict=True)],
        "customdata": [[at, head] for at, head, *_ in points],
        "hovertemplate": "%{text}<br>positional %{x}, symbolic %{y}<extra></extra>",
        "marker": {
            "size": 8,
            "color": [layers[at] for at, *_ in points],
            "symbol": ["diamond-open" if label == "sink" else "circle" for label in labels],
            "colorscale": SCALE,
            "line": {"width": 0.5, "color": "#888888"},
            "colorbar": {"thickness": 12, "title": {"text": "layer"}},
        },
    }
    x, y = (axis(f"{name} score", range=UNIT) for name in ("positional", "symbolic"))
    return chart([trace], x=x, y=y, top=12)


# Charts of one head


def head_place(layers: Sequence[int], swaps: Data, *, layer: int, head: int) -> Chart:
    """Draw one head, a star with its intervals, among all heads; the layer is an index into ``layers``."""
    (others,) = plane(layers, swaps)["data"]
    symbols = others["marker"]["symbol"]

    def score(name: str) -> float | None:
        of_layer = swaps[name][layer]
        return None if of_layer is None else of_layer[head]

    def reach(name: str) -> dict[str, Any]:
        mean, low, high = (score(f"{name}{end}") for end in ("", "_low", "_high"))
        known = {"type": "data", "symmetric": False, "color": _STAR}
        if mean is None or low is None or high is None:  # one query of one document has no interval
            return {"visible": False, **known, "array": [], "arrayminus": []}
        return {"visible": True, **known, "array": [high - mean], "arrayminus": [mean - low]}

    star = {
        "type": "scatter",
        "mode": "markers",
        "x": [score("s_pos")],
        "y": [score("s_sym")],
        "marker": {"size": 14, "color": _STAR, "symbol": "star"},
        "hoverinfo": "skip",
        "error_x": reach("s_pos"),
        "error_y": reach("s_sym"),
    }
    line = {"width": 0.5, "color": "#888888"}
    grey = {**others, "marker": {"size": 5, "opacity": 0.5, "color": "#999999", "symbol": symbols, "line": line}}
    x, y = axis("positional", range=UNIT), axis("symbolic", range=UNIT)
    return chart([grey, star], x=x, y=y, top=12, showlegend=False)


def head_curve(
    distances: Sequence[int],
    own: Numbers,
    *,
    name: str,
    mean: Numbers = (),
    low: Numbers = (),
    high: Numbers = (),
    documents: int = 1,
) -> Chart:
    """Draw the distance term of a head in one document, and the mean over several with its 95 % interval."""
    several = documents > 1
    thin = {
        "type": "scatter",
        "mode": "lines",
        "x": distances,
        "y": own,
        "name": plain(name),
        "line": {"color": COLOURS[1], "width": 1 if several else 2},
        "hovertemplate": "distance %{x}: %{y:.3f}<extra></extra>",
    }
    title = f"mean of {documents} documents"
    middle = line_with_band(distances, mean, low, high, name=title, index=0, mode="lines") if several else []
    return chart([thin, *middle], x=axis("distance (tokens)"), y=axis("a, centred"), showlegend=several)


def head_planes(turns: Numbers, values: Numbers, *, title: str, notes: Sequence[str] = ()) -> Chart:
    """Draw a number of each RoPE plane by its period, on a logarithmic axis; planes that do not turn are last.

    Args:
        turns: Turns per token of each plane; 0 or None for planes that do not turn.
        values: The number of each.
        title: Its title.
        notes: Further lines about each plane.
    """
    known = [-math.log10(turn) for turn in turns if turn]
    least, most = (min(known), max(known)) if known else (0.0, 0.0)
    step = (most - least) / (len(known) - 1) if len(known) > 1 else 0.1
    x, still = [], most
    for turn in turns:
        still += 0 if turn else step
        x.append(round(-math.log10(turn) if turn else still, 5))
    periods = [f"one turn in {1 / turn:.3g} tokens" if turn else "does not turn" for turn in turns]
    ticks = list(range(math.floor(least), math.floor(most) + 1))
    bars = {
        "type": "bar",
        "x": x,
        "y": values,
        "width": 0.85 * step,
        "customdata": [[number, period] for number, period in enumerate(periods, 1)],
        "text": notes,
        "textposition": "none",
        "hovertemplate": f"plane %{{customdata[0]}}: {title} %{{y:.3g}}<br>%{{customdata[1]}}%{{text}}<extra></extra>",
        "marker": {"color": COLOURS[0]},
    }
    labels = {"tickvals": ticks, "ticktext": [f"{10**power:,}" for power in ticks], "showgrid": False}
    return chart([bars], x=axis("period (tokens)", **labels), y=axis(title, rangemode="tozero"), top=12)


# Charts of several models


def ranks(models: Sequence[Data]) -> Chart:
    """Draw sorted values over the share of heads: two lines for each model, its own and its random control's.

    The heads of unrelated models have ranks in common, and nothing else.
    """
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plain(model["model"]["name"] + ("" if dash == "solid" else ", one random control")),
            "line": {"color": COLOURS[index % len(COLOURS)], "dash": dash, "width": 2.5 if dash == "solid" else 1.5},
            "hovertemplate": "%{x:.0f} % of heads: at most %{y:.4g}<extra>%{fullData.name}</extra>",
        }
        for index, model in enumerate(models)
        for dash in ("solid", "dash")
    ]
    return chart(traces, x=axis("share of heads (%)", range=[0, 100]), y=axis(""), top=60)


def head_by_head(first: str, second: str) -> Chart:
    """Draw a metric of the heads of two models with these names against each other, with the line of equal values."""
    bar = {"thickness": 10, "title": {"text": "layer"}}
    trace = {
        "type": "scatter",
        "mode": "markers",
        "hoverinfo": "text",
        "marker": {"size": 7, "opacity": 0.75, "colorscale": SCALE, "colorbar": bar},
    }
    equal = {"type": "line", "line": {"color": GREY, "width": 1, "dash": "dot"}}
    return chart([trace], x=axis(first), y=axis(second), top=12, shapes=[equal])


def compared_groups(section: Data, *, by: Sequence[str], along: str | None) -> Chart:
    """Draw a metric of groups of runs: lines over steps or sizes if runs are grouped by them, else a mark each."""

    def short(value: Any) -> str:
        return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines: dict[str, list[Data]] = {}
    for row in section["groups"]:
        if not along or row[along] is not None:
            name = ", ".join(short(row[key]) for key in by if key != along) or section["metric"]
            lines.setdefault(plain(name), []).append(row)
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers" if along else "markers",
            "name": name,
            "x": [max(1, row[along]) if along else name for row in rows],
            "y": [row["mean"] for row in rows],
            "error_y": {
                **{"type": "data", "visible": True, "thickness": 1, "width": 2, "symmetric": False},
                "array": [0 if row["high"] is None else row["high"] - row["mean"] for row in rows],
                "arrayminus": [0 if row["low"] is None else row["mean"] - row["low"] for row in rows],
            },
            "hovertemplate": "%{y:.4g}<extra>%{fullData.name}</extra>",
        }
        for name, rows in lines.items()
    ]
    x = axis(along, type="log") if along else {"type": "category", "automargin": "height"}
    return chart(traces, x=x, y=axis(section["title"]), top=12, showlegend=bool(along))


# The charts of a page

SECTIONS: Mapping[str, tuple[str, Callable[[Data], Chart]]] = {
    "distance": ("distance", key_order),
    "drift": ("distance", drift),
    "band-scores": ("bands", band_scores),
    "band-losses": ("bands", band_losses),
    "perturb-all": ("perturbation", increase),
    "perturb-untouched": ("perturbation", increase_untouched),
    "length-loss": ("lengths", length_loss),
    "length-cost": ("lengths", length_cost),
}
"""Charts without a choice by their name on the page: the part of the model's data that they show, and the function."""


def page_charts(data: Data) -> dict[str, Any]:
    """Return the charts of a report's page: those of each model, of several models, and of trainings."""
    pairs = (data.get("comparison") or {}).get("pairs", [])
    return {
        "models": [_model_charts(model) if "swaps" in model else {} for model in data["models"]],
        "ranks": emptied(ranks(data["models"])) if pairs else None,
        "pairs": [emptied(head_by_head(pair["first"], pair["model"])) for pair in pairs],
        "learning": [curves_over_steps(study["steps"], study["panels"]) for study in data.get("learning", [])],
    }


def _model_charts(model: Data) -> dict[str, Any]:
    """Return the charts of one model by name; a list where one of several is chosen."""
    about, layers = model["model"], model["model"]["layers"]
    charts = {name: draw(model[part]) for name, (part, draw) in SECTIONS.items() if model[part]}
    versions = [model["swaps"], model["swaps"]["all_keys"]] if model["swaps"] else []
    measured = model["sizes"]["axes"]["documents"]
    curve = head_curve([], [], name="", low=[0], documents=measured)
    title = {"share": "share of variance", "use": "use"}
    kind = next((name for name in title for record in model["records"] if any(name in one for one in record)), "")
    planes = [head_planes(turns or [], [], title=title[kind]) for turns in model["turns"]] if kind else []
    return {
        **charts,
        "map": _page_map(about),
        "range": variants([distribution(metric, own=about["weights"]) for metric in model["metrics"]]),
        "curve": emptied(curve),
        "planes": variants(planes),
        "scatter": variants([plane(layers, version) for version in versions]),
        **({"place": emptied(head_place(layers, versions[0], layer=0, head=0))} if versions else {}),
    }


def emptied(part: Any) -> Any:
    """Return a chart without the arrays of its traces, which the page's script fills in."""
    if "data" in part:
        return {**part, "data": [emptied(trace) for trace in part["data"]]}
    kept = {name: value for name, value in part.items() if not isinstance(value, list | tuple)}
    return {name: emptied(value) if isinstance(value, dict) else value for name, value in kept.items()}


def variants(charts: Sequence[Chart]) -> list[Any]:
    """Return the first of several charts, and of the others only what differs from it."""
    return [difference(charts[0], each) if number else each for number, each in enumerate(charts)]


def difference(first: Any, other: Any) -> Any:
    """Return what to put into one part of a chart for another: objects by key, lists of as many objects by index."""
    if isinstance(first, list) and first and isinstance(first[0], dict) and len(first) == len(other):
        first, other = dict(enumerate(first)), dict(enumerate(other))
    if not isinstance(first, dict) or not isinstance(other, dict):
        return other
    changed = {name: difference(first.get(name), value) for name, value in other.items() if value != first.get(name)}
    return {**changed, **{name: None for name in first if name not in other}}


def referenced(charts: Any, data: Any) -> Any:
    """Return charts in which each array that is part of the page's data is its path there, ``{"$": [key, ...]}``."""
    paths: dict[int, list[str | int]] = {}

    def visit(part: Any, path: list[str | int]) -> None:
        if isinstance(part, list):
            paths[id(part)] = path
        if isinstance(part, dict) or (isinstance(part, list) and part and isinstance(part[0], dict | list)):
            for key, value in part.items() if isinstance(part, dict) else enumerate(part):
                visit(value, [*path, key])

    def written(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: written(value) for name, value in part.items()}
        if isinstance(part, list):
            return {"$": paths[id(part)]} if len(part) > 8 and id(part) in paths else list(map(written, part))
        return part

    visit(data, [])
    return written(charts)
