"""Figures of curves: logits by distance of one head, loss by rate of disturbance, loss by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wherewhat.errors import ConfigError
from wherewhat.figures.reading import measurement_of, run_title
from wherewhat.figures.style import COLOURS, band, line_style, plain, styled
from wherewhat.measure.perturb.names import KINDS
from wherewhat.pipeline.summary import interval
from wherewhat.report.over_documents import curves_by_document, documents
from wherewhat.store import profile_name

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

    from wherewhat.store import RunDirectory

_BY_RATE, _BY_POSITION = "loss_by_rate_", "loss_by_position_"


def distance_curve(directory: RunDirectory, *, layer: int = 0, head: int = 0) -> Figure:
    """The distance term a[d] of one head, one line for each document.

    Raises:
        ConfigError: If the run has no such head or curve.
    """
    from plotly.graph_objects import Figure

    profiles = directory.profiles()
    figure = Figure()
    for index, document in enumerate(documents(directory)):
        name = profile_name(document, layer, "a")
        if name not in profiles:
            raise ConfigError(
                f"{measurement_of(directory).name} has no distance curve of layer {layer}: give a run of axes and one "
                "of its layers"
            )
        curve = profiles[name]
        if not 0 <= head < len(curve):
            raise ConfigError(f"layer {layer} has no head {head}: it has {len(curve)}, counted from 0")
        figure.add_scatter(y=curve[head].tolist(), mode="lines", name=plain(document), line=line_style(index))
    title = f"Distance term of layer {layer}, head {head}: {run_title(directory)}"
    return styled(figure, title=title, x="distance in tokens", y="a[d]")


def loss_by_rate(directory: RunDirectory) -> Figure:
    """Loss by share disturbed, a line for each kind of disturbance, with its 95 % interval over documents.

    Raises:
        ConfigError: If the run has no such curves.
    """
    figure = _lines(directory, _BY_RATE, KINDS, percent=True)
    return styled(figure, title=f"Disturbed: {run_title(directory)}", x="disturbed, %", y="loss, nats")


def loss_by_position(directory: RunDirectory) -> Figure:
    """Loss by position in the text, a line for each length method, with its 95 % interval over documents.

    Raises:
        ConfigError: If the run has no such curves.
    """
    figure = _lines(directory, _BY_POSITION, {}, percent=False)
    trained = directory.scores().filter(_is_metric("trained_length"))["value"].to_pylist()
    if trained:
        figure.add_vline(x=trained[0], line={"dash": "dot", "color": COLOURS[-1]}, annotation_text="trained length")
    return styled(figure, title=f"Longer texts: {run_title(directory)}", x="position in tokens", y="loss, nats")


def _is_metric(name: str) -> Any:
    import pyarrow.compute as pc

    return pc.field("metric") == name


def _lines(directory: RunDirectory, prefix: str, titles: Mapping[str, str], *, percent: bool) -> Figure:
    """One line for each curve whose name begins so: x in the first column, the mean over documents of the second."""
    from plotly.graph_objects import Figure

    ends = (name.rsplit("/", 1)[1] for name in directory.profiles())
    names = list(dict.fromkeys(end.removeprefix(prefix) for end in ends if end.startswith(prefix)))
    if not names:
        raise ConfigError(
            f"{measurement_of(directory).name} has no {prefix.strip('_').replace('_', ' ')}: see the docs"
        )
    figure = Figure()
    for index, name in enumerate(names):
        x, mid, low, high = _interval_lines(curves_by_document(directory, prefix + name))
        x = [100 * value for value in x] if percent else x
        filled = band(x, low, high, index=index, group=name)
        if filled is not None:
            figure.add_trace(filled)
        figure.add_scatter(
            x=x,
            y=mid,
            mode="lines+markers",
            name=plain(titles.get(name, name)),
            legendgroup=name,
            line=line_style(index),
        )
    return figure


def _interval_lines(
    curves: Sequence[Tensor],
) -> tuple[list[float], list[float], list[float | None], list[float | None]]:
    points = [interval([float(curve[i, 1]) for curve in curves]) for i in range(len(curves[0]))]
    x = [float(value) for value in curves[0][:, 0]]
    return x, [p.mean for p in points], [p.low for p in points], [p.high for p in points]
