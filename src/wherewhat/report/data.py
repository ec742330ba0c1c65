"""Numbers of finished runs in the form a page carries them: head tables, headline numbers, packed curves."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from wherewhat.measures.registry import find_measurement
from wherewhat.measures.statistics import Interval, interval
from wherewhat.report.measurements import Runs
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.profiles import profile_name
from wherewhat.runs.results import MetricSummary, stored_words, summarise

_DIGITS = 4
_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def rounded(value: float | None) -> float | None:
    """A number with four digits; None where there is none or it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def packed(values: Tensor, *, bits: int) -> dict[str, Any]:
    """Numbers ``(n,)`` as unsigned integers between their least and greatest, in base64.

    Args:
        values: The numbers; those that are not finite become the greatest integer, which stands for nothing.
        bits: 8 or 16.

    Returns:
        ``lo``, ``hi``, ``bits`` and ``data`` (little-endian); integer q stands for ``lo + (hi - lo) q / (2^bits - 2)``.
    """
    levels = 2**bits - 2
    numbers = values.detach().double().cpu().flatten()
    defined = torch.isfinite(numbers)
    low, high = (float(edge) for edge in numbers[defined].aminmax()) if bool(defined.any()) else (0.0, 0.0)
    scaled = (numbers - low) * (levels / (high - low) if high > low else 0.0)
    codes = torch.where(defined, scaled.round().clamp(0, levels), levels + 1.0)
    data = codes.to(torch.int64).numpy().astype("u1" if bits == 8 else "<u2").tobytes()
    return {"lo": _edge(low), "hi": _edge(high), "bits": bits, "data": base64.b64encode(data).decode("ascii")}


def script_json(data: Any) -> str:
    """JSON that is safe inside an HTML script element, whatever text it holds.

    All but ASCII is escaped, U+2028 and lone surrogates among it, and no character is left that HTML knows.
    """
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Outside strings JSON has none of these characters, so every one of them can be written as an escape.
    return plain.translate(_HTML)


def _edge(value: float) -> float:
    return float(f"{value:.7g}")


def documents(directory: RunDirectory) -> list[str]:
    """Names of the documents of a run, in order."""
    return [str(document["name"]) for document in cast("list[dict[str, Any]]", directory.config["documents"])]


def scores_by_document(directory: RunDirectory) -> dict[str, dict[str, float]]:
    """Numbers of the model as a whole by document and metric; undefined ones are left out."""
    columns = directory.scores().select(["document", "layer", "metric", "value"]).to_pydict()
    found: dict[str, dict[str, float]] = {name: {} for name in documents(directory)}
    for document, layer, metric, value in zip(*columns.values(), strict=True):
        if document is not None and layer is None and value is not None:
            found[document][metric] = value
    return found


def curves_by_document(directory: RunDirectory, curve: str) -> list[Tensor]:
    """A curve of the model as a whole, of every document that has it."""
    profiles = directory.profiles()
    names = (profile_name(document, None, curve) for document in documents(directory))
    return [profiles[name] for name in names if name in profiles]


def plain_interval(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean and 95 % interval over documents as a page carries them; None of nothing."""
    if not values:
        return None
    found = interval(values)
    return {"mean": rounded(found.mean), "low": rounded(found.low), "high": rounded(found.high)}


def mean_of(found: dict[str, dict[str, float]], metric: str, *, less: str | None = None) -> dict[str, Any] | None:
    """Interval of a metric over the documents that have it; with ``less``, of its difference to another in each."""
    having = [m for m in found.values() if metric in m and (less is None or less in m)]
    return plain_interval([m[metric] - (0.0 if less is None else m[less]) for m in having])


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
        measurement = find_measurement(name)
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


_TWINS = {"random": "random twin", "shuffled": "shuffled twin"}


@dataclass(frozen=True)
class Value:
    """A mean under a name, with its interval over documents where there is one."""

    name: str
    value: Interval


@dataclass(frozen=True)
class Number:
    """One of the numbers.

    Attributes:
        title: What it is.
        values: The model's; two where two scores belong together.
        controls: What to read them against.
        reading: How to read it, in one sentence.
        kinds: The model's and its control models' for each kind of layer, where there are several.
    """

    title: str
    values: list[Value]
    controls: list[Value]
    reading: str
    kinds: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class _Wanted:
    title: str
    measurement: str
    metrics: tuple[tuple[str, str], ...]
    reading: str


_WANTED = (
    _Wanted(
        "Where + what: r",
        "axes",
        (("r", "r"),),
        "Correlation of every head's logits with a distance term plus a query term plus a key term; read it beside the "
        "random twin, because a high r alone does not show that anything was learned.",
    ),
    _Wanted(
        "r of behaviour",
        "axes",
        (("r_behaviour", "r of behaviour"),),
        "The same without the query term, which softmax cancels: how far the attention pattern itself is where plus "
        "what.",
    ),
    _Wanted(
        "Only the key explains",
        "axes",
        (("unique_c", "share of variance"),),
        "Share of the logits' variance that neither distance nor query can stand in for: what, regardless of where.",
    ),
    _Wanted(
        "Positional and symbolic",
        "heads",
        (("s_pos", "positional"), ("s_sym", "symbolic")),
        "When two tokens change places, a positional head keeps attending to the places (1) and a symbolic one follows "
        "the tokens (1); even attention scores 1 on both.",
    ),
    _Wanted(
        "Pure heads",
        "heads",
        (("heads_positional", "positional"), ("heads_symbolic", "symbolic")),
        "Share of heads with one of the two scores high and the other low: heads that look at where alone, or at what "
        "alone.",
    ),
)


def headline(runs: Runs) -> list[Number]:
    """The numbers that the runs hold."""
    summaries = {
        (request.measurement, str(request.model.weights)): {
            summary.metric.name: summary for summary in summarise(find_measurement(request.measurement), directory)
        }
        for request, directory in runs.finished
    }
    numbers = []
    for wanted in _WANTED:
        own = summaries.get((wanted.measurement, runs.own), {})
        twins = [
            (twin, of_twin)
            for weights, twin in _TWINS.items()
            if weights != runs.own and (of_twin := summaries.get((wanted.measurement, weights)))
        ]
        metrics = [(name, title) for name, title in wanted.metrics if name in own]
        if not metrics:
            continue
        numbers.append(
            Number(
                title=wanted.title,
                values=[Value(title, own[name].overall) for name, title in metrics],
                controls=[
                    *_floors([own[name] for name, _ in metrics]),
                    *(
                        Value(f"{twin}, {title}" if len(metrics) > 1 else twin, of_twin[name].overall)
                        for twin, of_twin in twins
                        for name, title in metrics
                        if name in of_twin
                    ),
                ],
                reading=wanted.reading,
                kinds=[
                    Value(", ".join([kind, *([title] if len(metrics) > 1 else []), *named]), found[name].kinds[kind])
                    for name, title in metrics
                    for kind in own[name].kinds
                    for named, found in [([], own), *(([twin], of_twin) for twin, of_twin in twins)]
                    if name in found and kind in found[name].kinds
                ],
            )
        )
    return numbers


def _floors(summaries: list[MetricSummary]) -> list[Value]:
    return [
        Value(summary.metric.control_title, Interval(summary.control, None, None, summary.overall.n))
        for summary in summaries
        if summary.control is not None
    ]
