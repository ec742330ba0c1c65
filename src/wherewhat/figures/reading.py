"""What a run directory says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from wherewhat.measure.options import build_config
from wherewhat.measure.registry import find

if TYPE_CHECKING:
    from wherewhat.measure.base import Measurement, Metric
    from wherewhat.store import RunDirectory


def measurement_of(directory: RunDirectory) -> Measurement:
    """The measurement a run is of.

    Raises:
        ConfigError: If this version does not know it.
    """
    return find(str(directory.config["measurement"]))


def words_of(directory: RunDirectory) -> tuple[Metric, ...]:
    """Words for the run's metrics, most important first."""
    measurement = measurement_of(directory)
    options = cast("dict[str, Any]", directory.config["options"])
    return tuple(measurement.words(build_config(measurement.config, options)))


def run_title(directory: RunDirectory) -> str:
    """Model, weights and how much text."""
    config = directory.config
    documents = len(cast("list[Any]", config["documents"]))
    weights = "" if config["weights"] == "trained" else f" ({config['weights']})"
    return f"{config['model']}{weights}, {documents} × {config['tokens']} tokens"
