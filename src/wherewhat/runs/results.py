"""Read a finished run: documents, heads, layers, curves, kinds of layers and summaries with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from wherewhat.captures.comparison import LayerProof
from wherewhat.captures.rotation import Rotation
from wherewhat.hashes import JSON
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Measurement, Metric
from wherewhat.measures.registry import find_measurement
from wherewhat.measures.statistics import Interval, around, interval, wilson
from wherewhat.options import build_config
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.profiles import ProfileFile

if TYPE_CHECKING:
    import pyarrow as pa


def stored_document(table: pa.Table, profiles: ProfileFile | None = None) -> DocumentScores:
    """The numbers of one document, from its score table and, where they are wanted, its curves.

    Undefined values come back as NaN.
    """
    columns = table.select(["layer", "head", "metric", "value"]).to_pydict()
    heads: dict[int, dict[str, dict[int, float]]] = {}
    whole: dict[int | None, dict[str, float]] = {}
    for layer, head, metric, value in zip(*columns.values(), strict=True):
        number = torch.nan if value is None else value
        if head is None:
            whole.setdefault(layer, {})[metric] = number
        else:
            heads.setdefault(layer, {}).setdefault(metric, {})[head] = number
    curves: dict[int | None, dict[str, Curve]] = {}
    if profiles is not None:
        for name in profiles:
            _, index, curve = name.rsplit("/", 2)
            layer = None if index == "-" else int(index)
            curves.setdefault(layer, {})[curve] = Curve(profiles[name], profiles.axes(name))
    indices = sorted({*heads, *(i for i in [*whole, *curves] if i is not None)})
    layers = [
        LayerScores(
            layer=i,
            heads={
                metric: torch.tensor([values[h] for h in sorted(values)], dtype=torch.float64)
                for metric, values in heads.get(i, {}).items()
            },
            whole=whole.get(i, {}),
            curves=curves.get(i, {}),
        )
        for i in indices
    ]
    return DocumentScores(layers, whole.get(None, {}), curves.get(None, {}))


Kinds = dict[str, list[int]]
"""Layers by the name of their kind, in the order of the first layer; empty where all are of one kind."""


def layer_kinds(layers: Sequence[LayerProof]) -> Kinds:
    """Group layers by attention window and rotation, and name each group by what differs."""
    windows, ropes = [_window(layer) for layer in layers], [_rope(layer.plan.rotation) for layer in layers]
    differing = [names for names in (windows, ropes) if len(set(names)) > 1]
    kinds: Kinds = {}
    for layer, *names in zip(layers, *differing, strict=True):
        found = kinds.setdefault(", ".join(names), [])
        if layer.plan.layer not in found:
            found.append(layer.plan.layer)
    return kinds if differing else {}


def stored_kinds(directory: RunDirectory) -> Kinds:
    """Layers by kind as a finished run holds them; empty for runs that do not say."""
    extra = cast("dict[str, Any]", directory.provenance().get("extra") or {})
    kinds: Kinds = extra.get("layer_kinds") or {}
    return dict(sorted(kinds.items(), key=lambda kind: kind[1]))  # the file has them by name


def _window(layer: LayerProof) -> str:
    if layer.window is not None:
        return f"window {layer.window:,}"
    return "window" if "window" in layer.features else "full"


def _rope(rotation: Rotation | None) -> str:
    """RoPE base, from the ratio of neighbouring frequencies; ``÷ s`` where the fastest plane is slowed down s times."""
    turning = [] if rotation is None else sorted((abs(x) for x in rotation.inv_freq.tolist() if x), reverse=True)
    if rotation is None or not turning:
        return "no RoPE"
    base = (turning[0] / turning[-1]) ** (rotation.planes / max(1, len(turning) - 1))
    slowed = "" if math.isclose(turning[0], 1, rel_tol=1e-3) else f" ÷ {1 / turning[0]:.3g}"
    return f"RoPE base {float(f'{base:.3g}'):,.0f}{slowed}"


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
    return measurement.all_metrics(build_config(measurement.config, {k: v for k, v in options.items() if k in known}))


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
    if not measurement.pools:
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


def measurement_of(directory: RunDirectory) -> Measurement:
    """The measurement a run is of."""
    return find_measurement(str(directory.config["measurement"]))


def words_of(directory: RunDirectory) -> Sequence[Metric]:
    """Words for the run's metrics, most important first."""
    return stored_words(measurement_of(directory), directory)


def run_title(directory: RunDirectory) -> str:
    """Model, weights and how much text."""
    config = directory.config
    documents = len(cast("list[Any]", config["documents"]))
    weights = "" if config["weights"] == "trained" else f" ({config['weights']})"
    return f"{config['model']}{weights}, {documents} × {config['tokens']} tokens"
