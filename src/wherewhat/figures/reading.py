"""What a run directory says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from wherewhat.measure.registry import find
from wherewhat.pipeline.summary import stored_words

if TYPE_CHECKING:
    from wherewhat.measure.base import Measurement, Metric
    from wherewhat.store import RunDirectory


def measurement_of(directory: RunDirectory) -> Measurement:
    """The measurement a run is of.

    Raises:
        ConfigError: If this version does not know it.
    """
    return find(str(directory.config["measurement"]))


def words_of(directory: RunDirectory) -> Sequence[Metric]:
    """Words for the run's metrics, most important first."""
    return stored_words(measurement_of(directory), directory)


def run_title(directory: RunDirectory) -> str:
    """Model, weights and how much text."""
    config = directory.config
    documents = len(cast("list[Any]", config["documents"]))
    weights = "" if config["weights"] == "trained" else f" ({config['weights']})"
    return f"{config['model']}{weights}, {documents} × {config['tokens']} tokens"
