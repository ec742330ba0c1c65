"""Which figures there are, and which of them a run offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wherewhat.checking import checked, nearest
from wherewhat.errors import ConfigError
from wherewhat.figures.curves import distance_curve, loss_by_position, loss_by_rate
from wherewhat.figures.heads import head_map, swap_plane
from wherewhat.figures.reading import measurement_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from wherewhat.store import RunDirectory

FIGURES: dict[str, Callable[..., Figure]] = {
    "map": head_map,
    "plane": swap_plane,
    "distance": distance_curve,
    "rates": loss_by_rate,
    "positions": loss_by_position,
}
"""Figures by name; each takes a run directory and its own options."""

_FIRST = {"heads": "plane", "perturb": "rates", "extend": "positions"}
"""The figure a measurement is known for; a map of its heads for the others."""


def offered(directory: RunDirectory) -> str:
    """Name of the figure that shows a run best."""
    return _FIRST.get(measurement_of(directory).name, "map")


def figure(directory: RunDirectory, name: str | None = None, **options: Any) -> Figure:
    """A figure of a finished run.

    Args:
        directory: The run.
        name: One of :data:`FIGURES`; by default the one that shows the run best.
        options: ``metric`` of a map; ``layer`` and ``head`` of a distance curve.

    Raises:
        ConfigError: If there is no such figure, the run has no numbers for it, or an option is not one of its own.
    """
    import inspect

    name = name or offered(directory)
    if name not in FIGURES:
        raise ConfigError(f"there is no figure {name!r}: {nearest(name, FIGURES)}")
    own = [key for key, p in inspect.signature(FIGURES[name]).parameters.items() if p.kind is p.KEYWORD_ONLY]
    given = {key: value for key, value in options.items() if value is not None}
    wrong = next((key for key in given if key not in own), None)
    if wrong is not None:
        raise ConfigError(f"the figure {name} has no option {wrong}: it has {', '.join(own) or 'none'}")
    return checked()(FIGURES[name])(directory, **given)
