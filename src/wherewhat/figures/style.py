"""One look for all figures: colours that colour-blind readers can tell apart, and layout that prints."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, the darker ones first."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Lines differ in dash as well as in colour, for print without colour."""

SCALE = "Viridis"
"""Colour scale of maps."""


def plain(text: str) -> str:
    """Text as Plotly shows it: it reads a few tags and entities in its texts, links among them."""
    return html.escape(text, quote=False)


def styled(figure: Figure, *, title: str, x: str, y: str, **layout: Any) -> Figure:
    """The figure with its title, axes and the common look; all words are text, never markup."""
    figure.update_layout(
        template="plotly_white",
        title={"text": plain(title), "font": {"size": 15}},
        font={"size": 13},
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        xaxis_title=plain(x),
        yaxis_title=plain(y),
        **layout,
    )
    return figure


def line_style(index: int) -> dict[str, str]:
    """Colour and dash of one of several lines."""
    return {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def band(
    x: list[float], low: list[float | None], high: list[float | None], *, index: int, group: str
) -> dict[str, Any] | None:
    """A trace that fills between two lines; None where there is no interval anywhere."""
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
