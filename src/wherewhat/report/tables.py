"""Numbers of every head, read from run directories: means over documents, by metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wherewhat.measure.registry import find
from wherewhat.pipeline.summary import stored_words, summarise
from wherewhat.report.encoding import rounded
from wherewhat.report.measuring import Runs
from wherewhat.store import RunDirectory

Heads = dict[int, list[float | None]]
"""Values of every head by layer."""


def head_means(directory: RunDirectory) -> dict[str, Heads]:
    """Means over documents of everything that a run has for each head, by metric."""
    columns = directory.scores().select(["metric", "layer", "head", "value"]).to_pydict()
    found: dict[str, dict[int, dict[int, list[float]]]] = {}
    for metric, layer, head, value in zip(*columns.values(), strict=True):
        if head is not None:
            values = found.setdefault(metric, {}).setdefault(layer, {}).setdefault(head, [])
            values += [] if value is None else [value]
    return {
        metric: {
            layer: [rounded(sum(v) / len(v)) if (v := heads.get(h)) else None for h in range(max(heads) + 1)]
            for layer, heads in sorted(layers.items())
        }
        for metric, layers in found.items()
    }


def metric_tables(runs: Runs, means: Mapping[tuple[str, str], Mapping[str, Heads]], layers: list[int]) -> list[Any]:
    """Every metric that heads have, with words, control and values of the model and its twins.

    Args:
        runs: The runs.
        means: Means over documents by measurement and weights.
        layers: The layers; those in which a metric is not defined have no values.
    """
    tables = []
    seen: set[str] = set()
    for name in dict.fromkeys(request.measurement for request, _ in runs.finished):
        measurement = find(name)
        directory = runs.find(name)
        if directory is None:
            continue
        controls = {summary.metric.name: summary.control for summary in summarise(measurement, directory)}
        for metric in stored_words(measurement, directory):
            if metric.name in seen or metric.name not in means[name, runs.own]:
                continue
            seen.add(metric.name)
            tables.append(
                {
                    "id": metric.name,
                    "title": metric.title,
                    "unit": metric.unit,
                    "reading": metric.reading,
                    "measurement": name,
                    "control": rounded(controls.get(metric.name)),
                    "control_title": metric.control_title,
                    "values": {
                        weights: [means[name, weights][metric.name].get(layer) for layer in layers]
                        for weights in runs.weights(name)
                        if metric.name in means[name, weights]
                    },
                }
            )
    return tables
