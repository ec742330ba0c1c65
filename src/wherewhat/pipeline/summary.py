"""A finished run in a few numbers: means over heads with intervals over documents, beside their controls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.measure.base import Measurement, Metric
from wherewhat.store import RunDirectory


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over documents; the bounds are None for a single document."""

    mean: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class MetricSummary:
    """One metric of one run.

    Attributes:
        metric: Words for it.
        overall: Mean over all heads and layers, per document, with its interval.
        layers: The same for each layer by index.
        control: The control metric over all layers, if there is one.
    """

    metric: Metric
    overall: Interval
    layers: dict[int, Interval]
    control: float | None


def summarise(measurement: Measurement, directory: RunDirectory) -> list[MetricSummary]:
    """Summaries of the measurement's metrics that the run holds."""
    columns = directory.scores().select(["metric", "document", "layer", "value"]).to_pydict()
    by_metric: dict[str, dict[str, dict[int | None, list[float]]]] = {}
    for name, document, layer, value in zip(*columns.values(), strict=True):
        if value is not None:
            by_metric.setdefault(name, {}).setdefault(document, {}).setdefault(layer, []).append(value)
    return [
        _summary(metric, by_metric[metric.name], by_metric.get(metric.control or ""))
        for metric in measurement.metrics
        if metric.name in by_metric
    ]


_Values = dict[str, dict[int | None, list[float]]]
"""Values by document and layer; the layer of the model as a whole is None."""


def _summary(metric: Metric, documents: _Values, control: _Values | None) -> MetricSummary:
    indices = sorted({layer for layers in documents.values() for layer in layers if layer is not None})
    return MetricSummary(
        metric=metric,
        overall=interval([_mean(layers) for layers in documents.values()]),
        layers={i: interval([_mean({i: v[i]}) for v in documents.values() if i in v]) for i in indices},
        control=None if control is None else sum(map(_mean, control.values())) / len(control),
    )


def _mean(layers: dict[int | None, list[float]]) -> float:
    values = [value for listed in layers.values() for value in listed]
    return sum(values) / len(values)


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % Student interval of independent values."""
    from scipy.stats import t as student

    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Interval(mean, None, None, n)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    reach = float(student.ppf(0.975, n - 1)) * error
    return Interval(mean, mean - reach, mean + reach, n)
