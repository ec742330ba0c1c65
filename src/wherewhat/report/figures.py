"""Figures of a run, and export of figures and tables to files."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherewhat.boundary import output_file
from wherewhat.errors import ConfigError
from wherewhat.files import make_folder, write_file
from wherewhat.measures.perturb import KINDS
from wherewhat.measures.statistics import interval
from wherewhat.options import checked, nearest
from wherewhat.report.views import view_of
from wherewhat.runs.results import StoredRun
from wherewhat.scores import NON_NEGATIVE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from wherewhat.caches.plan import Plan
    from wherewhat.runs.directory import RunDirectory


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, the darker ones first."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Lines differ in dash as well as in colour, for print without colour."""

SCALE = "Viridis"
"""Colour scale of maps."""


def plain(text: str) -> str:
    """Return text escaped for Plotly, which interprets some tags and entities."""
    return html.escape(text, quote=False)


def styled(figure: Figure, *, title: str, x: str, y: str, **layout: Any) -> Figure:
    """Return the figure with its title, axes and the common layout; texts are escaped."""
    figure.update_layout(
        template="plotly_white",
        title={"text": plain(title), "font": {"size": 15}},
        font={"size": 13},
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        xaxis_title=plain(x),
        yaxis_title=plain(y),
        **layout,
    )
    figure.update_xaxes(exponentformat="power")
    figure.update_yaxes(exponentformat="power")
    return figure


def line_style(index: int) -> dict[str, str]:
    """Return colour and dash of one of several lines."""
    return {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def band(
    x: list[float], low: list[float | None], high: list[float | None], *, index: int, group: str
) -> dict[str, Any] | None:
    """Return a trace that fills between two lines; None where there is no interval."""
    known = [(at, lo, hi) for at, lo, hi in zip(x, low, high, strict=True) if lo is not None and hi is not None]
    if not known:
        return None
    there, lows, highs = (list(values) for values in zip(*known, strict=True))
    red, green, blue = (int(COLOURS[index % len(COLOURS)][i : i + 2], 16) for i in (1, 3, 5))
    return {
        "type": "scatter",
        "x": [*there, *reversed(there)],
        "y": [*highs, *reversed(lows)],
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.18)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "legendgroup": group,
        "showlegend": False,
    }


def distance_curve(run: StoredRun, *, layer: int = 0, head: int = 0) -> Figure:
    """Draw the distance term a[d] of one head, one line for each document."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for index, document in enumerate(run.documents):
        curve = run.curve(layer, "a", document=index)
        if curve is None:
            raise ConfigError(
                f"{run.measurement.name} has no distance curve of layer {layer}: give a run of axes and a layer of it"
            )
        if not 0 <= head < len(curve):
            raise ConfigError(f"layer {layer} has no head {head}: it has {len(curve)}, counted from 0")
        figure.add_scatter(y=curve[head].tolist(), mode="lines", name=plain(document), line=line_style(index))
    title = f"Distance term of layer {layer}, head {head}: {run.title}"
    return styled(figure, title=title, x="distance in tokens", y="a[d]")


def loss_by_rate(run: StoredRun) -> Figure:
    """Draw the loss by rate, one line for each kind of perturbation, with its 95 % interval over documents."""
    figure = _lines(run, "loss_by_rate_", KINDS, percent=True)
    return styled(figure, title=f"Perturbation: {run.title}", x="perturbed, %", y="loss, nats")


def loss_by_position(run: StoredRun) -> Figure:
    """Draw the loss by position, one line for each length method, with its 95 % interval over documents."""
    figure = _lines(run, "loss_by_position_", {}, percent=False)
    trained = run.values("trained_length")
    if trained:
        figure.add_vline(x=trained[0], line={"dash": "dot", "color": COLOURS[-1]}, annotation_text="trained length")
    return styled(figure, title=f"Length methods: {run.title}", x="position in tokens", y="loss, nats")


def _lines(run: StoredRun, prefix: str, titles: Mapping[str, str], *, percent: bool) -> Figure:
    """Draw each curve with this prefix: x in the first column, the mean over documents of the second."""
    from plotly.graph_objects import Figure

    ends = (name.rsplit("/", 1)[1] for name in run.profiles)
    names = list(dict.fromkeys(end.removeprefix(prefix) for end in ends if end.startswith(prefix)))
    if not names:
        raise ConfigError(f"{run.measurement.name} has no {prefix.strip('_').replace('_', ' ')}: see the docs")
    figure = Figure()
    for index, name in enumerate(names):
        curves = run.curves(prefix + name)
        losses = ([float(curve[i, 1]) for curve in curves] for i in range(len(curves[0])))
        points = [interval(values).within(NON_NEGATIVE) for values in losses]
        x = [100 * float(value) if percent else float(value) for value in curves[0][:, 0]]
        filled = band(x, [p.low for p in points], [p.high for p in points], index=index, group=name)
        if filled is not None:
            figure.add_trace(filled)
        figure.add_scatter(
            x=x,
            y=[p.mean for p in points],
            mode="lines+markers",
            name=plain(titles.get(name, name)),
            legendgroup=name,
            line=line_style(index),
            meta={"low": [p.low for p in points], "high": [p.high for p in points]},
        )
    return figure


def pareto_figure(plan: Plan) -> Figure:
    """Draw the rise of the loss and the retrieval of a plan by the share kept, one line for each selector.

    Bars are 95 % intervals over documents that were not used for choosing.
    """
    from plotly.graph_objects import Figure

    rows = plan.provenance.get("curve", [])
    if not rows:
        raise ConfigError(f"the plan of {plan.model} has no measured costs: make it with 'wherewhat plan'")
    ends = [row for row in rows if row["selector"] in ("none", "all")]
    names = dict.fromkeys(row["selector"] for row in rows if row["selector"] not in ("none", "all"))
    own = plan.provenance.get("selector")
    figure = Figure()
    for index, name in enumerate(sorted(names, key=lambda one: one != own)):
        points = [row for row in rows if row["selector"] == name]
        # Without any or with all heads the selector makes no difference, so the line of a whole curve includes both.
        points = sorted([*points, *ends] if len(points) > 1 else points, key=lambda row: row["share"])
        for what, axis in (("rise", ""), ("found", "2")):
            ups = [None if row[what]["high"] is None else row[what]["high"] - row[what]["mean"] for row in points]
            figure.add_scatter(
                x=[100 * row["share"] for row in points],
                y=[row[what]["mean"] for row in points],
                error_y={"array": ups, "thickness": 1},
                mode="lines+markers",
                line=line_style(index),
                name=name,
                legendgroup=name,
                showlegend=what == "rise",
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
            )
    share = f"{plan.unit}s that see the whole text, %"
    styled(figure, title=f"Plan: {plan.model}", x=share, y="rise of the loss, nats")
    figure.update_layout(
        xaxis={"domain": [0, 0.44]},
        xaxis2={"domain": [0.56, 1], "title": {"text": share}, "anchor": "y2"},
        yaxis2={"title": {"text": "gain from planted runs, nats"}, "anchor": "x2"},
    )
    return figure


def head_map(run: StoredRun, *, metric: str | None = None) -> Figure:
    """Draw layers × heads, with one metric as colour.

    Args:
        run: A finished run.
        metric: Name of the metric; the measurement's first that heads have by default.
    """
    from plotly.graph_objects import Figure

    words = {word.name: word for word in run.metrics}
    known = [name for name in words if name in run.head_metrics] or run.head_metrics
    if not known:
        raise ConfigError(f"{run.measurement.name} has no scores of single heads: choose another figure")
    name = metric or known[0]
    if name not in run.head_metrics:
        raise ConfigError(f"heads have no metric {name!r} in this run: {nearest(name, run.head_metrics)}")
    layers = run.head_means(name)
    title = words[name].title if name in words else name
    width = max(len(values) for values in layers.values())
    grid = [[*values, *[None] * (width - len(values))] for values in layers.values()]
    names = run.categories.get(name)
    hover = [
        [
            f"layer {layer}, head {head}<br>{plain(title)}: "
            f"{'undefined' if v is None else f'{v:.4g}' if names is None else plain(names[int(v)])}"
            for head, v in enumerate(row)
        ]
        for layer, row in zip(layers, grid, strict=True)
    ]
    figure = Figure(
        {
            "type": "heatmap",
            "z": grid,
            "x": list(range(width)),
            "y": list(layers),
            "colorscale": SCALE,
            "text": hover,
            "hoverinfo": "text",
            "xgap": 1,
            "ygap": 1,
            "colorbar": {"title": {"text": words[name].unit if name in words else ""}},
        }
    )
    if names is not None:
        ticks = {"tickvals": list(range(len(names))), "ticktext": list(map(plain, names))}
        figure.update_traces(zmin=0, zmax=len(names) - 1, colorbar=ticks)
    return styled(figure, title=f"{title}: {run.title}", x="head", y="layer")


def swap_plane(run: StoredRun) -> Figure:
    """Draw every head by its positional and its symbolic score over the keys after the sink, coloured by layer."""
    from plotly.graph_objects import Figure

    together = "_together" if "s_pos_no_sink_together" in run.head_metrics else ""
    names = [f"{name}_no_sink{together}" for name in ("s_pos", "s_sym")]
    if any(name not in run.head_metrics for name in names):
        raise ConfigError(f"{run.measurement.name} has no positional and symbolic scores: give a run of heads")
    s_pos, s_sym = map(run.head_means, names)
    points = [
        (x, y, layer, head)
        for layer, values in s_pos.items()
        for head, (x, y) in enumerate(zip(values, s_sym[layer], strict=True))
        if x is not None and y is not None
    ]
    figure = Figure(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [point[0] for point in points],
            "y": [point[1] for point in points],
            "text": [f"layer {p[2]}, head {p[3]}<br>positional {p[0]:.3f}<br>symbolic {p[1]:.3f}" for p in points],
            "hoverinfo": "text",
            "marker": {
                "size": 8,
                "color": [point[2] for point in points],
                "colorscale": SCALE,
                "line": {"width": 0.5, "color": "#666"},
                "colorbar": {"title": {"text": "layer"}},
            },
        }
    )
    return styled(
        figure,
        title=f"Positional and symbolic scores without the sink: {run.title}",
        x="positional score",
        y="symbolic score",
    )


FIGURES: dict[str, Callable[..., Figure]] = {
    "map": head_map,
    "plane": swap_plane,
    "distance": distance_curve,
    "rates": loss_by_rate,
    "positions": loss_by_position,
}
"""Figures by name; each takes a run and its own options."""


def figure(run: StoredRun, name: str | None = None, **options: Any) -> Figure:
    """Return a figure of a finished run.

    Args:
        run: The run.
        name: One of :data:`FIGURES`; by default the one of the measurement.
        options: ``metric`` of a map; ``layer`` and ``head`` of a distance curve.
    """
    import inspect

    view = view_of(run.measurement)
    if name is None and view.draw is not None and (drawn := view.draw(run)) is not None:
        return drawn
    name = name or view.figure
    if name not in FIGURES:
        raise ConfigError(f"there is no figure {name!r}: {nearest(name, FIGURES)}")
    own = [key for key, p in inspect.signature(FIGURES[name]).parameters.items() if p.kind is p.KEYWORD_ONLY]
    given = {key: value for key, value in options.items() if value is not None}
    wrong = next((key for key in given if key not in own), None)
    if wrong is not None:
        raise ConfigError(f"the figure {name} has no option {wrong}: it has {', '.join(own) or 'none'}")
    return checked()(FIGURES[name])(run, **given)


PICTURES = ("png", "svg", "pdf", "html")
TABLES = ("csv", "parquet")


def ending(path: Path) -> str:
    """Return the extension of a file, which must be one that can be written."""
    found = path.suffix.lower().lstrip(".")
    if found not in PICTURES + TABLES:
        raise ConfigError(f"{path.name} has no known extension: end it in .{', .'.join(PICTURES + TABLES)}")
    return found


def save_figure(figure: Figure, path: Path, *, width: int = 900, height: int = 560, scale: float = 2.0) -> Path:
    """Write a figure atomically.

    Args:
        figure: The figure.
        path: A file that ends in .png, .svg, .pdf or .html (which opens offline).
        width: Width in pixels.
        height: Height in pixels.
        scale: Resolution of a PNG, in pixels per pixel of width and height.
    """
    kind = ending(path)
    if kind in TABLES:
        raise ConfigError(f"{path.name} is the name of a table: end it in .{', .'.join(PICTURES)}")
    if kind == "html":
        content = figure.to_html(include_plotlyjs=True, full_html=True).encode()
    else:
        if importlib.util.find_spec("kaleido") is None:
            raise ConfigError(
                f".{kind} files need the package 'kaleido': pip install 'wherewhat[figures]', or use .html"
            )
        try:
            content = figure.to_image(format=kind, width=width, height=height, scale=scale)
        except (RuntimeError, ValueError, OSError) as error:  # kaleido could not start a browser
            line = str(error).strip().splitlines()
            raise ConfigError(
                f"cannot draw {path.name}: {line[0] if line else type(error).__name__}; install Chrome or Chromium, or "
                "use .html"
            ) from None
    return _write(path, content)


def save_table(directory: RunDirectory, path: Path) -> Path:
    """Write a run's scores, one row for each number.

    Args:
        directory: A finished run.
        path: A file that ends in .csv or .parquet.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    kind = ending(path)
    if kind in PICTURES:
        raise ConfigError(f"{path.name} is the name of an image: end it in .{', .'.join(TABLES)}")
    table = directory.scores()
    sink = pa.BufferOutputStream()
    if kind == "csv":
        pyarrow.csv.write_csv(table, sink)
    else:
        pyarrow.parquet.write_table(table, sink)
    return _write(path, sink.getvalue().to_pybytes())


def _write(path: Path, content: bytes) -> Path:
    path = output_file(path, name="the file")
    make_folder(path.parent)
    write_file(path, content)
    return path
