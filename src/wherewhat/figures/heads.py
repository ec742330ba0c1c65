"""Figures of all heads at once: a map of one metric, and the positional–symbolic plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError
from wherewhat.figures.reading import measurement_of, run_title, words_of
from wherewhat.figures.style import SCALE, plain, styled
from wherewhat.report.tables import head_means

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from wherewhat.store import RunDirectory


def head_map(directory: RunDirectory, *, metric: str | None = None) -> Figure:
    """Layers × heads, one metric as colour.

    Args:
        directory: A finished run.
        metric: Name of the metric; the measurement's first that heads have by default.

    Raises:
        ConfigError: If heads have no such metric.
    """
    from plotly.graph_objects import Figure

    means = head_means(directory)
    words = {word.name: word for word in words_of(directory)}
    known = [name for name in words if name in means] or list(means)
    if not known:
        raise ConfigError(f"{measurement_of(directory).name} has no numbers of single heads: choose another figure")
    name = metric or known[0]
    if name not in means:
        raise ConfigError(f"heads have no metric {name!r} in this run: {nearest(name, list(means))}")
    layers = means[name]
    title = words[name].title if name in words else name
    width = max(len(values) for values in layers.values())
    grid = [[*values, *[None] * (width - len(values))] for values in layers.values()]
    hover = [
        [
            f"layer {layer}, head {head}<br>{plain(title)}: {'undefined' if v is None else f'{v:.4g}'}"
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
    return styled(figure, title=f"{title}: {run_title(directory)}", x="head", y="layer")


def swap_plane(directory: RunDirectory) -> Figure:
    """Every head by its positional and its symbolic score, coloured by layer.

    Raises:
        ConfigError: If the run has no such scores.
    """
    from plotly.graph_objects import Figure

    means = head_means(directory)
    together = "_together" if "s_pos_together" in means else ""
    if f"s_pos{together}" not in means or f"s_sym{together}" not in means:
        raise ConfigError(
            f"{measurement_of(directory).name} has no positional and symbolic scores: give a run of heads"
        )
    points = [
        (x, y, layer, head)
        for layer, values in means[f"s_pos{together}"].items()
        for head, (x, y) in enumerate(zip(values, means[f"s_sym{together}"][layer], strict=True))
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
    return styled(figure, title=f"Places or contents: {run_title(directory)}", x="positional score", y="symbolic score")
