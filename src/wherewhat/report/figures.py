"""Figures of a run, and export of figures and tables to files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wherewhat.boundary import output_file
from wherewhat.chart_style import Chart, axis, chart, line_style, line_with_band, plain
from wherewhat.errors import ConfigError
from wherewhat.files import make_folder, write_file
from wherewhat.measures.perturb import KINDS
from wherewhat.measures.statistics import interval
from wherewhat.options import checked, nearest
from wherewhat.report import charts
from wherewhat.report.data import band, centred_curves, drawn_distances, head_values, rounded_list
from wherewhat.report.run_sections import bands, controlled_distance, lengths, perturbation, perturbed, swaps
from wherewhat.report.views import view_of
from wherewhat.runs.results import StoredRun
from wherewhat.scores import NON_NEGATIVE

if TYPE_CHECKING:
    import pyarrow as pa
    from plotly.graph_objects import Figure

    from wherewhat.caches.plan import Plan


Show = Callable[[StoredRun], dict[str, Any] | None]
"""A function that returns what a page shows of a run; None if the run has nothing of it."""


def framed(drawn: Chart, title: str) -> Figure:
    """Return a chart as a figure of its own, with an escaped title."""
    from plotly.graph_objects import Figure

    figure, layout = Figure(drawn["data"]), dict(drawn["layout"])
    # The legend is beside the chart: above it, many names would cover the title.
    for place in ("margin", "legend"):
        layout.pop(place, None)
    figure.update_layout(
        template="plotly_white",
        title={"text": plain(title), "font": {"size": 15}},
        font={"size": 13},
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        **layout,
    )
    figure.update_xaxes(exponentformat="power")
    figure.update_yaxes(exponentformat="power")
    return figure


def _terms(run: StoredRun, layer: int, head: int) -> list[Tensor]:
    """Return the distance term of a head in every document, ``(distances,)`` each."""
    curves = [run.curve(layer, "a", document=index) for index in range(len(run.documents))]
    known = [curve for curve in curves if curve is not None]
    if len(known) < len(curves):
        raise ConfigError(
            f"{run.measurement.name} has no distance curve of layer {layer}: give a run of axes and a layer of it"
        )
    if not 0 <= head < len(known[0]):
        raise ConfigError(f"layer {layer} has no head {head}: it has {len(known[0])}, counted from 0")
    return [curve[head] for curve in known]


def distance_curve(run: StoredRun, *, layer: int = 0, head: int = 0) -> Figure:
    """Draw the distance term a[d] of one head, one line for each document."""
    terms = zip(run.documents, _terms(run, layer, head), strict=True)
    traces = [
        {"type": "scatter", "y": a.tolist(), "mode": "lines", "name": plain(name), "line": line_style(index)}
        for index, (name, a) in enumerate(terms)
    ]
    title = f"Distance term of layer {layer}, head {head}: {run.title}"
    return framed(chart(traces, x=axis("distance in tokens"), y=axis("a[d]")), title)


def curve_of_head(run: StoredRun, *, layer: int = 0, head: int = 0, document: int = 0) -> Figure:
    """Draw the centred distance term of one head in a document, and its mean over documents with 95 % intervals."""
    terms = [a[None] for a in _terms(run, layer, head)]
    if not 0 <= document < len(terms):
        raise ConfigError(f"there is no document {document}: there are {len(terms)}, counted from 0")
    distances = drawn_distances(max(a.shape[1] for a in terms))
    centred, _ = centred_curves(terms, distances)
    mean, half = band(centred)
    middle, own = [rounded_list(a[0]) for a in (mean, mean - half, mean + half)], rounded_list(centred[document, 0])
    drawn = charts.head_curve(distances, own, middle, name=run.documents[document], documents=len(terms))
    return framed(drawn, f"Distance term of layer {layer}, head {head}: {run.title}")


def planes_of_head(run: StoredRun, *, layer: int = 0, head: int = 0) -> Figure:
    """Draw the share of a head's logit variance by period of the RoPE plane, in the first document."""
    turns, shares = (run.curve(layer, name) for name in ("plane_turns_per_token", "plane_share"))
    if turns is None or shares is None:
        raise ConfigError(f"{run.measurement.name} has no planes of layer {layer}: give a run of planes")
    if not 0 <= head < len(shares):
        raise ConfigError(f"layer {layer} has no head {head}: it has {len(shares)}, counted from 0")
    drawn = charts.head_planes(rounded_list(turns), rounded_list(shares[head]), title="share of variance")
    return framed(drawn, f"RoPE planes of layer {layer}, head {head}: {run.title}")


def loss_by_rate(run: StoredRun) -> Figure:
    """Draw the loss by rate, one line for each kind of perturbation, with its 95 % interval over documents."""
    names = perturbed(run)
    if not names:
        raise ConfigError(f"{run.measurement.name} has no loss by rate: give a run of perturb")
    traces = []
    for index, name in enumerate(names):
        curves = run.curves(f"loss_by_rate_{name}")
        points = [
            interval([float(curve[i, 1]) for curve in curves]).within(NON_NEGATIVE) for i in range(len(curves[0]))
        ]
        low, mean, high = ([getattr(point, end) for point in points] for end in ("low", "mean", "high"))
        x = [100 * float(rate) for rate in curves[0][:, 0]]
        traces += line_with_band(x, mean, low, high, name=KINDS.get(name, name), index=index)
    drawn = chart(traces, x=axis("perturbed, %"), y=axis("loss, nats"))
    return framed(drawn, f"Perturbation: {run.title}")


def pareto_figure(plan: Plan) -> Figure:
    """Draw the rise of the loss and the retrieval of a plan by the share kept, one line for each selector.

    Bars are 95 % intervals over documents that were not used for choosing.
    """
    rows = plan.provenance.get("curve", [])
    if not rows:
        raise ConfigError(f"the plan of {plan.model} has no measured costs: make it with 'wherewhat plan'")
    ends = [row for row in rows if row["selector"] in ("none", "all")]
    names = dict.fromkeys(row["selector"] for row in rows if row["selector"] not in ("none", "all"))
    own = plan.provenance.get("selector")
    traces = []
    for index, name in enumerate(sorted(names, key=lambda selector: selector != own)):
        points = [row for row in rows if row["selector"] == name]
        # Without any or with all heads the selector makes no difference, so the line of a whole curve includes both.
        points = sorted([*points, *ends] if len(points) > 1 else points, key=lambda row: row["share"])
        for what, number in (("rise", ""), ("found", "2")):
            ups = [None if row[what]["high"] is None else row[what]["high"] - row[what]["mean"] for row in points]
            traces.append(
                {
                    "type": "scatter",
                    "x": [100 * row["share"] for row in points],
                    "y": [row[what]["mean"] for row in points],
                    "error_y": {"array": ups, "thickness": 1},
                    "mode": "lines+markers",
                    "line": line_style(index),
                    "name": name,
                    "legendgroup": name,
                    "showlegend": what == "rise",
                    "xaxis": f"x{number}",
                    "yaxis": f"y{number}",
                }
            )
    share = f"{plan.unit}s that see the whole text, %"
    layout = {"xaxis": axis(share), "yaxis": axis("rise of the loss, nats")}
    figure = framed({"data": traces, "layout": layout}, f"Plan: {plan.model}")
    return figure.update_layout(
        xaxis={"domain": [0, 0.44]},
        xaxis2={"domain": [0.56, 1], "title": {"text": share}, "anchor": "y2"},
        yaxis2=axis("gain from planted sequences, nats", anchor="x2"),
    )


def head_map(run: StoredRun, *, metric: str | None = None) -> Figure:
    """Draw layers × heads, with one metric as colour.

    Args:
        run: A finished run.
        metric: Name of the metric; the measurement's first that heads have by default.
    """
    name, title, unit = _head_metric(run, metric)
    drawn = charts.head_map(run.head_means(name), title=title, unit=unit, names=run.categories.get(name, ()))
    return framed(drawn, f"{title}: {run.title}")


def distribution_over_heads(run: StoredRun, *, metric: str | None = None) -> Figure:
    """Draw the distribution of one metric over heads; the metric as for a map."""
    name, title, unit = _head_metric(run, metric)
    weights = str(run.directory.config["weights"])
    values = {weights: head_values(run, name, sorted(run.head_means(name)))}
    metric_data = {"title": title, "unit": unit, "categories": run.categories.get(name, ()), "values": values}
    return framed(charts.distribution(metric_data, own=weights), f"{title}: {run.title}")


def _head_metric(run: StoredRun, metric: str | None) -> tuple[str, str, str]:
    """Return name, title and unit of a metric that heads have, by default of the measurement's first."""
    declared = {known.name: known for known in run.metrics}
    names = [name for name in declared if name in run.head_metrics] or run.head_metrics
    if not names:
        raise ConfigError(f"{run.measurement.name} has no scores of single heads: choose another figure")
    name = metric or names[0]
    if name not in run.head_metrics:
        raise ConfigError(f"heads have no metric {name!r} in this run: {nearest(name, run.head_metrics)}")
    return (name, declared[name].title, declared[name].unit) if name in declared else (name, name, "")


def _swaps(run: StoredRun, *, all_keys: bool) -> tuple[list[int], dict[str, Any]]:
    """Return layers and swap scores of a run, over the keys after the sink or over all keys."""
    names = ("s_pos", "s_pos_no_sink", "label", "label_no_sink")
    layers = sorted(run.head_means("s_pos")) if all(name in run.head_metrics for name in names) else []
    scores = swaps(run, layers) if layers else None
    if scores is None:
        raise ConfigError(f"{run.measurement.name} has no labelled swap scores: give a run of heads")
    return layers, scores["all_keys"] if all_keys else scores


def swap_plane(run: StoredRun, *, all_keys: bool = False) -> Figure:
    """Draw every head by its positional and its symbolic score, coloured by layer.

    Args:
        run: A run of heads.
        all_keys: Scores over all keys, as in the papers; by default over the keys after the sink.
    """
    over = "over all keys" if all_keys else "without the sink"
    drawn = charts.plane(*_swaps(run, all_keys=all_keys))
    return framed(drawn, f"Positional and symbolic scores {over}: {run.title}")


def place_of_head(run: StoredRun, *, layer: int = 0, head: int = 0, all_keys: bool = False) -> Figure:
    """Draw the positional and symbolic score of one head with their intervals, among those of all heads."""
    layers, scores = _swaps(run, all_keys=all_keys)
    index = layers.index(layer) if layer in layers else None
    if index is None or not 0 <= head < len(scores["s_pos"][index]):
        raise ConfigError(f"there is no head {head} in layer {layer}: the run has layers {layers}")
    drawn = charts.head_place(layers, scores, layer=index, head=head)
    return framed(drawn, f"Layer {layer}, head {head} among all heads: {run.title}")


def _of_section(title: str, measurement: str, show: Show, name: str) -> Callable[..., Figure]:
    """Return the function that draws a chart of a page from a run of one measurement."""

    def drawn(run: StoredRun) -> Figure:
        section = show(run) if run.measurement.name == measurement else None
        chart_of_page = None if section is None else charts.SECTIONS[name][1](section)
        if chart_of_page is None or not chart_of_page["data"]:
            raise ConfigError(f"this run of {run.measurement.name} has no {title.lower()}: give a run of {measurement}")
        return framed(chart_of_page, f"{title}: {run.title}")

    return drawn


loss_by_position = _of_section("Loss by position", "extend", lengths, "length-loss")
"""Draw the loss by position, one line for each length method, with its 95 % interval over documents."""

FIGURES: dict[str, Callable[..., Figure]] = {
    "map": head_map,
    "range": distribution_over_heads,
    "plane": swap_plane,
    "place": place_of_head,
    "distance": distance_curve,
    "curve": curve_of_head,
    "planes": planes_of_head,
    "order": _of_section("Order of keys by dummy distance", "distance", controlled_distance, "distance"),
    "drift": _of_section("Drift by dummy distance", "distance", controlled_distance, "drift"),
    "band_scores": _of_section("Scores by frequency band", "frequencies", bands, "band-scores"),
    "band_losses": _of_section("Loss by frequency band", "frequencies", bands, "band-losses"),
    "rates": loss_by_rate,
    "increase": _of_section("Loss increase", "perturb", perturbation, "perturb-all"),
    "increase_untouched": _of_section("Loss increase elsewhere", "perturb", perturbation, "perturb-untouched"),
    "positions": loss_by_position,
    "cost": _of_section("Difference to the unmodified model", "extend", lengths, "length-cost"),
}
"""Figures by name; each takes a run and its own options."""


def figure(run: StoredRun, name: str | None = None, **options: Any) -> Figure:
    """Return a figure of a finished run.

    Args:
        run: The run.
        name: One of :data:`FIGURES`; by default the one of the measurement.
        options: ``metric`` of a map or range; ``layer`` and ``head`` of a figure of one head.
    """
    import inspect

    view = view_of(run.measurement)
    if name is None and view.draw is not None and (drawn := view.draw(run)) is not None:
        return drawn
    name = name or view.figure
    if name not in FIGURES:
        raise ConfigError(f"there is no figure {name!r}: {nearest(name, FIGURES)}")
    own = [key for key, p in inspect.signature(FIGURES[name]).parameters.items() if p.kind is p.KEYWORD_ONLY]
    arguments = {key: value for key, value in options.items() if value is not None}
    wrong = next((key for key in arguments if key not in own), None)
    if wrong is not None:
        raise ConfigError(f"the figure {name} has no option {wrong}: it has {', '.join(own) or 'none'}")
    return checked()(FIGURES[name])(run, **arguments)


PICTURES = ("png", "svg", "pdf", "html")
TABLES = ("csv", "parquet")


def ending(path: Path) -> str:
    """Return the extension of a file, which must be one that can be written."""
    extension = path.suffix.lower().lstrip(".")
    if extension not in PICTURES + TABLES:
        raise ConfigError(f"{path.name} has no known extension: end it in .{', .'.join(PICTURES + TABLES)}")
    return extension


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


def save_table(table: pa.Table, path: Path) -> Path:
    """Write a table.

    Args:
        table: The table.
        path: A file that ends in .csv or .parquet.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    kind = ending(path)
    if kind in PICTURES:
        raise ConfigError(f"{path.name} is the name of an image: end it in .{', .'.join(TABLES)}")
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
