"""All measurements by name: those of this package, registered ones, and those of installed packages.

A package adds measurements with the entry point group ``wherewhat.measurements``; each entry point names a subclass of
:class:`~wherewhat.measures.measurement.Measurement`.
"""

from __future__ import annotations

import functools
from dataclasses import is_dataclass
from importlib import import_module
from typing import TypeVar

from wherewhat.errors import ConfigError
from wherewhat.imports import isolated, plugins
from wherewhat.measures.measurement import Measurement
from wherewhat.options import nearest

BUILT_IN = {
    "axes": "axes.axes_measurement.AxesMeasurement",
    "distance": "distance.distance_measurement.DistanceMeasurement",
    "planes": "planes.planes_measurement.PlanesMeasurement",
    "residual": "residual.ResidualMeasurement",
    "split": "split.split_measurement.SplitMeasurement",
    "heads": "heads.heads_measurement.HeadsMeasurement",
    "frequencies": "frequencies.frequencies_measurement.FrequenciesMeasurement",
    "prompts": "prompts.PromptsMeasurement",
    "perturb": "perturb.perturb_measurement.PerturbMeasurement",
    "choices": "choices.ItemChoices",
    "extend": "extend.extend_measurement.ExtendMeasurement",
    "attention": "heads.heads_measurement.AttentionMeasurement",
}
"""Module and class of each measurement of this package by name; one that is asked for by name is imported alone."""

GROUP = "wherewhat.measurements"
"""Entry points of measurements."""

_Declared = TypeVar("_Declared", bound=type[Measurement])
_known: dict[str, Measurement] = {}


def register(declared: _Declared) -> _Declared:
    """Add a measurement; use it as a class decorator.

    A class may be registered again after it was changed: in a notebook or script (``__main__``), or by
    ``importlib.reload`` of its module.
    """
    if not (isinstance(declared, type) and issubclass(declared, Measurement)):
        raise ConfigError(f"{declared!r} is not a measurement: give a subclass of wherewhat.Measurement")
    missing = [name for name in ("name", "summary", "metrics") if not hasattr(declared, name)]
    missing += sorted(declared.__abstractmethods__)
    if missing:
        raise ConfigError(f"the measurement {declared.__name__} has no {missing[0]}: define {', '.join(missing)}")
    if not is_dataclass(declared.config):
        raise ConfigError(f"the config of the measurement {declared.__name__} is {declared.config!r}: give a dataclass")
    names = [metric.name for metric in declared.metrics]
    for metric in declared.metrics:
        if names.count(metric.name) > 1 or metric.control == metric.name:
            what = "twice" if names.count(metric.name) > 1 else "as its own control"
            raise ConfigError(f"the measurement {declared.__name__} declares the metric '{metric.name}' {what}")
    measurement = declared()
    known = measurements().get(measurement.name)
    places = {(kind.__module__, kind.__qualname__) for kind in (type(known), declared)}
    again = len(places) == 1 and (declared.__module__ == "__main__" or type(known) is not declared)
    if known is not None and not again:
        raise ConfigError(f"there is already a measurement '{measurement.name}': choose another name")
    _known[measurement.name] = measurement
    return declared


def measurements() -> dict[str, Measurement]:
    """Return all measurements by name, in the order in which they are shown."""
    if not _known:
        _known.update({name: _built_in(name) for name in BUILT_IN})
        for name, declared in plugins(GROUP).items():
            with isolated(GROUP, name):
                register(declared)
    return _known


@functools.cache
def _built_in(name: str) -> Measurement:
    module, kind = BUILT_IN[name].rsplit(".", 1)
    measurement: Measurement = getattr(import_module(f"wherewhat.measures.{module}"), kind)()
    return measurement


def find_measurement(name: str) -> Measurement:
    """Return the measurement of that name."""
    if not _known and name in BUILT_IN:
        return _built_in(name)
    known = measurements()
    if name not in known:
        raise ConfigError(f"there is no measurement '{name}': {nearest(name, known, cutoff=0.6)}")
    return known[name]
