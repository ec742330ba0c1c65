"""A finished run in a few numbers: means over heads with intervals over documents, beside their controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from wherewhat.measure.base import Measurement, Metric
from wherewhat.measure.intervals import Interval, around, interval, wilson
from wherewhat.measure.options import build_config
from wherewhat.pipeline.kinds import Kinds, stored_kinds
from wherewhat.pipeline.stored import stored_document
from wherewhat.store import RunDirectory
from wherewhat.store.hashing import JSON

__all__ = ["Interval", "MetricSummary", "interval", "stored_words", "summarise", "wilson"]


_Values = dict[str, dict[int | None, list[float]]]
"""Values by document and layer; the layer of the model as a whole is None."""


@dataclass(frozen=True)
class MetricSummary:
    """One metric of one run.

    Attributes:
        metric: Words for it.
        overall: Mean over all heads and layers, per document, with its interval.
        layers: The same for each layer by index.
        control: The control metric over all layers, if there is one.
        kinds: Mean over the layers of each kind, where the model has layers of several kinds.
    """

    metric: Metric
    overall: Interval
    layers: dict[int, Interval]
    control: float | None
    kinds: dict[str, Interval] = field(default_factory=dict)


def stored_words(measurement: Measurement, directory: RunDirectory) -> Sequence[Metric]:
    """Words for the metrics of a run, by the options it was made with, most important first."""
    options = cast("dict[str, Any]", directory.config["options"])
    # An option that was dropped since the run was made has no words either.
    known = {field.name for field in dataclasses.fields(measurement.config)}
    return measurement.words(build_config(measurement.config, {k: v for k, v in options.items() if k in known}))


def summarise(measurement: Measurement, directory: RunDirectory) -> list[MetricSummary]:
    """Summaries of the measurement's metrics that the run holds."""
    columns = directory.scores().select(["metric", "document", "layer", "head", "value"]).to_pydict()
    by_metric: dict[str, dict[str, dict[int | None, list[float]]]] = {}
    together: dict[str, dict[int | None, float]] = {}
    for name, document, layer, head, value in zip(*columns.values(), strict=True):
        if value is None:
            continue
        by_metric.setdefault(name, {}).setdefault(document, {}).setdefault(layer, []).append(value)
        if document is None and head is None:
            together.setdefault(name, {})[layer] = value
    count = len(cast("list[JSON]", directory.config["documents"]))
    summaries = [
        _summary(
            metric,
            by_metric[metric.name],
            by_metric.get(metric.control or ""),
            together,
            count,
        )
        for metric in stored_words(measurement, directory)
        if metric.name in by_metric
    ]
    kinds = stored_kinds(directory)
    if not kinds:
        return summaries
    pooled = _pooled(measurement, directory, kinds)
    return [replace(s, kinds=_by_kind(by_metric[s.metric.name], pooled.get(s.metric.name), kinds)) for s in summaries]


def _by_kind(documents: _Values, pooled: Mapping[str, Sequence[float]] | None, kinds: Kinds) -> dict[str, Interval]:
    """Mean of each kind's layers per document, with intervals over documents; kinds without numbers are left out."""
    if pooled is not None:
        return {kind: interval(values) for kind, values in pooled.items()}
    found = {}
    for kind, listed in kinds.items():
        chosen: list[dict[int | None, list[float]]] = [
            {i: layers[i] for i in listed if i in layers} for layers in documents.values()
        ]
        if values := [_mean(layers) for layers in chosen if layers]:
            found[kind] = interval(values)
    return found


def _pooled(measurement: Measurement, directory: RunDirectory, kinds: Kinds) -> dict[str, dict[str, list[float]]]:
    """Numbers pooled over the heads of each kind of layer, by metric and kind, one per document."""
    found: dict[str, dict[str, list[float]]] = {}
    if measurement.pooled is None:
        return found
    table = directory.scores()
    documents = table["document"].to_pylist()
    for name in dict.fromkeys(documents):
        if name is None:
            continue
        rows = [index for index, document in enumerate(documents) if document == name]
        layers = stored_document(table.take(rows)).layers
        for kind, listed in kinds.items():
            numbers = measurement.pooled([layer for layer in layers if layer.layer in listed])
            for metric, value in numbers.items():
                found.setdefault(metric, {}).setdefault(kind, []).append(value)
    return found


def _summary(
    metric: Metric,
    documents: _Values,
    control: _Values | None,
    together: Mapping[str, Mapping[int | None, float]],
    count: int,
) -> MetricSummary:
    indices = sorted({layer for layers in documents.values() for layer in layers if layer is not None})

    errors = together.get(metric.error or "", {})
    low, high = (together.get(name, {}) for name in metric.bounds or ("", ""))

    def between(values: Sequence[float], layer: int | None) -> Interval:
        """Interval over documents, or what was stored for it where the documents were measured together."""
        if layer in low and layer in high:
            return Interval(values[0], low[layer], high[layer], count)
        if layer in errors:
            return around(values[0], errors[layer], count)
        return wilson(values) if metric.proportion else interval(values)

    return MetricSummary(
        metric=metric,
        overall=between([_mean(layers) for layers in documents.values()], None),
        layers={i: between([_mean({i: v[i]}) for v in documents.values() if i in v], i) for i in indices},
        control=None if control is None else sum(map(_mean, control.values())) / len(control),
    )


def _mean(layers: dict[int | None, list[float]]) -> float:
    values = [value for listed in layers.values() for value in listed]
    return sum(values) / len(values)
