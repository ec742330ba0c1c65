"""Numbers of finished runs as a page stores them: head tables, headline numbers, packed curves."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wherewhat.measures.statistics import Interval, in_words, student
from wherewhat.rules.captions import additive_price
from wherewhat.rules.numbers import mean
from wherewhat.runs.collection import Runs
from wherewhat.runs.results import MetricSummary, StoredRun

_DIGITS = 4
_HTML = (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"))


def rounded(value: float | None) -> float | None:
    """Return a number with four digits; None for None and for a number that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def rounded_list(values: Tensor) -> list[float | None]:
    """Return numbers ``(n,)`` as :func:`rounded` returns each."""
    return [rounded(value) for value in values.tolist()]


def packed_rows(values: Tensor, *, bits: int) -> list[dict[str, Any]]:
    """Return each row of ``(rows, n)`` as unsigned integers between its least and greatest number, in base64.

    Args:
        values: The numbers; those that are not finite become the greatest integer, which marks a missing value.
        bits: 8 or 16.

    Returns:
        ``lo``, ``hi``, ``bits`` and ``data`` (little-endian); integer q means ``lo + (hi - lo) q / (2^bits - 2)``.
    """
    levels = 2**bits - 2
    numbers = values.detach().double().cpu().numpy()
    defined = np.isfinite(numbers)
    some = defined.any(1)
    low = np.where(some, numbers.min(1, where=defined, initial=np.inf), 0.0)
    high = np.where(some, numbers.max(1, where=defined, initial=-np.inf), 0.0)
    with np.errstate(all="ignore"):  # of rows without a range, and of missing values
        scales = np.where(high > low, levels / (high - low), 0.0)
        scaled = np.rint((numbers - low[:, None]) * scales[:, None]).clip(0, levels)
    codes = np.where(defined, scaled, levels + 1).astype("u1" if bits == 8 else "<u2")
    return [
        {"lo": float(f"{least:.7g}"), "hi": float(f"{most:.7g}"), "bits": bits, "data": _base64(row)}
        for least, most, row in zip(low.tolist(), high.tolist(), codes, strict=True)
    ]


def _base64(codes: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(codes.tobytes()).decode("ascii")


_NEAR, _POINTS = 128, 256
"""Distances below the first number are all drawn; of the others as many as give the second number of points."""


def drawn_distances(width: int) -> list[int]:
    """Return the distances below ``width`` at which a page draws a curve: all the near ones, evenly spaced far ones."""
    if width <= _POINTS:
        return list(range(width))
    # At 512 tokens every third: the fastest RoPE planes turn in 2π tokens, more than two steps.
    far = torch.linspace(_NEAR, width - 1, _POINTS - _NEAR, dtype=torch.float64).round().long()
    return [*range(_NEAR), *far.tolist()]


def centred_curves(curves: Sequence[Tensor], distances: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return distance curves of documents, aligned, at some distances.

    A constant in a distance curve cancels in softmax, so each curve's mean over the distances that all documents have
    is subtracted.

    Args:
        curves: Curve ``(heads, width)`` of each document; the widths may differ.
        distances: The distances; those that a document does not have become NaN.

    Returns:
        The centred curves ``(documents, heads, distances)``, and the subtracted means ``(documents, heads, 1)``.
    """
    at = torch.tensor(distances)
    values = torch.full((len(curves), curves[0].shape[0], len(distances)), torch.nan, dtype=torch.float64)
    for document, curve in enumerate(curves):
        inside = at < curve.shape[1]
        values[document, :, inside] = curve[:, at[inside]].double()
    common = values.isfinite().all(0)
    means = torch.where(common, values, torch.nan).nanmean(-1, keepdim=True).nan_to_num()
    return values - means, means


def band(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over documents and half the width of its 95 % Student interval, as :func:`interval` does.

    Args:
        values: Values ``(documents, ...)``; NaN where a document has none.

    Returns:
        Both of shape ``(...)``; the half width is NaN where fewer than two documents have a value.
    """
    n = values.isfinite().sum(0)
    mean = values.nanmean(0)
    error = ((values - mean).square().nansum(0) / (n - 1).clamp(min=1) / n.clamp(min=1)).sqrt()
    factors = [torch.nan if count < 2 else student(count) for count in range(values.shape[0] + 1)]
    return mean, torch.tensor(factors, dtype=torch.float64)[n] * error


def script_json(data: Any) -> str:
    """Return JSON that is safe inside an HTML script element.

    Everything but ASCII is escaped, including U+2028 and lone surrogates, and so is every HTML character.
    """
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # JSON has these characters inside strings only, so each can be written as an escape. Replacing one after another is
    # ten times as fast as str.translate.
    for character, escape in _HTML:
        plain = plain.replace(character, escape)
    return plain


def interval_json(value: Interval, words: str | None = None) -> dict[str, Any]:
    """Return a mean with its 95 % interval, in numbers and in words, and its number of documents."""
    numbers = {"mean": rounded(value.mean), "low": rounded(value.low), "high": rounded(value.high), "n": value.n}
    return {**numbers, "words": words or (in_words(value) if math.isfinite(value.mean) else "undefined")}


def summary_json(summary: MetricSummary) -> dict[str, Any]:
    """Return the mean of a metric as :func:`interval_json` does; of a label with the number of heads."""
    return interval_json(summary.overall, summary.words())


def mean_of(run: StoredRun, metric: str, *, less: str | None = None) -> dict[str, Any] | None:
    """Return the interval of a metric over the documents that have it; with ``less``, of its difference to another."""
    value = mean(run, metric, less=less)
    return interval_json(value) if value.n else None


def head_values(run: StoredRun, metric: str, layers: Sequence[int]) -> list[list[float | None] | None]:
    """Return the mean over documents of every head by layer; None for layers in which the metric is not defined."""
    means = run.head_means(metric)
    return [[rounded(value) for value in means[layer]] if layer in means else None for layer in layers]


def sizes(runs: Runs) -> dict[str, Any]:
    """Return documents, tokens of each and queries in each of every measurement of the model; 0 queries for all."""
    measured: dict[str, tuple[StoredRun, Any]] = {}
    for other in runs.others:
        run = other.runs[runs.own]
        if run.head_metrics:  # others may have questions in place of documents
            measured[other.name] = run, run.directory.config["tokens"]
    measured |= {request.measurement: (run, request.tokens) for request, run in runs.of_model}
    return {
        name: {
            "documents": len(run.documents),
            "tokens": tokens,
            "queries": len(run.options.get("positions") or ()) or run.options.get("queries"),
        }
        for name, (run, tokens) in measured.items()
    }


def terms(runs: Runs) -> list[dict[str, str]]:
    """Return every declared metric of the measurements once, with its title and explanation."""
    entries: dict[str, dict[str, str]] = {}
    for measurement in dict.fromkeys(run.measurement for run in runs.shown):
        for metric in measurement.metrics:
            entry = {
                "id": metric.name,
                "title": metric.title,
                "reading": metric.reading,
                "measurement": measurement.name,
            }
            entries.setdefault(metric.name, entry)
    return list(entries.values())


def metric_tables(runs: Runs, layers: Sequence[int]) -> list[Any]:
    """Return every metric of heads, with its title, its control, and values of the model and its control models.

    Besides the report's own runs, these are the finished ones of other measurements, such as ``removal``.
    """
    tables = []
    seen: set[str] = set()
    by_name: dict[str, dict[str, StoredRun]] = {}
    for _, run in runs.of_model:
        by_name[run.measurement.name] = runs.weights(run.measurement.name)
    for other in runs.others:
        by_name.setdefault(other.name, other.runs)
    for name, by_weights in by_name.items():
        run = by_weights[runs.own]
        controls = {summary.metric.name: summary.control for summary in run.summaries}
        for metric in run.metrics:
            if metric.name in seen or metric.name not in run.head_metrics:
                continue
            seen.add(metric.name)
            tables.append(
                {
                    "id": metric.name,
                    "title": metric.title,
                    "unit": metric.unit,
                    "reading": metric.reading,
                    "measurement": name,
                    "group": f"{name}: {run.measurement.summary}",
                    "control": rounded(controls.get(metric.name)),
                    "control_title": metric.control_title,
                    "categories": list(metric.categories),
                    "values": {
                        weights: head_values(stored, metric.name, layers)
                        for weights, stored in by_weights.items()
                        if metric.name in stored.head_metrics
                    },
                }
            )
    return tables


CONTROLS = {"random": "one random control", "shuffled": "one shuffled control"}
"""Names of control models by weights; each is one draw, and its intervals are over documents."""


@dataclass(frozen=True)
class Value:
    """A mean under a name, with its interval over documents where there is one, and both in words.

    ``of`` is the name of the value that a control belongs to, where there are several.
    """

    name: str
    value: Interval
    words: str = ""
    of: str = ""

    def __post_init__(self) -> None:
        """Write the interval in words where there are none."""
        object.__setattr__(self, "words", self.words or in_words(self.value))


@dataclass(frozen=True)
class Number:
    """One of the headline numbers.

    Attributes:
        title: Its title.
        values: The model's; two where two scores belong together.
        controls: Numbers to compare them with.
        reading: How to read it, in one sentence.
        kinds: The model's and its control models' for each kind of layer, where there are several.
        measurement: The measurement that it is of.
        metrics: Names of the metrics of ``values``.
        price: What it costs to leave out the rest of the logits, in a sentence, where that was measured.
    """

    title: str
    values: list[Value]
    controls: list[Value]
    reading: str
    kinds: list[Value] = field(default_factory=list)
    measurement: str = ""
    metrics: tuple[str, ...] = ()
    price: str = ""


@dataclass(frozen=True)
class _Wanted:
    title: str
    measurement: str
    metrics: tuple[tuple[str, str], ...]
    reading: str


WANTED = (
    _Wanted(
        "Where + what: r of behaviour",
        "axes",
        (("r_behaviour", "r of behaviour"),),
        "Correlation of every head's logits with the sum of a distance term and a key term, without what the query "
        "alone adds, which softmax cancels: how additive the attention pattern is. Compare it with the random control: "
        "a high r alone does not show that anything was learned.",
    ),
    _Wanted(
        "Additive share of the logits",
        "axes",
        (("r2", "share of variance (r²)"), ("r", "r")),
        "Share of the logits' variance that a distance, a query and a key term explain, r², and its root, the "
        "correlation r.",
    ),
    _Wanted(
        "Only the key explains",
        "axes",
        (("unique_c", "share of variance"),),
        "Share of the logits' variance that the key explains and neither distance nor query can explain.",
    ),
    _Wanted(
        "Positional and symbolic",
        "heads",
        (
            ("s_pos_no_sink", "positional"),
            ("s_sym_no_sink", "symbolic"),
            ("s_pos", "positional, all keys"),
            ("s_sym", "symbolic, all keys"),
        ),
        "When two tokens are swapped, a positional head keeps attending to the positions (1) and a symbolic one "
        "follows the tokens (1); uniform attention scores 1 on both. The first two scores leave the first token, the "
        "attention sink, in place; with all keys, as in the papers, it is swapped too, and attention that follows it "
        "counts as symbolic.",
    ),
    _Wanted(
        "Pure heads",
        "heads",
        (
            ("heads_sink", "sink"),
            ("heads_positional_no_sink", "positional"),
            ("heads_symbolic_no_sink", "symbolic"),
            ("heads_positional", "positional, all keys"),
            ("heads_symbolic", "symbolic, all keys"),
        ),
        "Heads that give much of their attention to the first token (sinks), and others with one score high and the "
        "other low: heads that depend on position only, or on content only. With all keys, as in the papers, sinks are "
        "no exception. Heads are counted by their labels over all documents together, and beside it by those of single "
        "documents. Of several documents, a sink must exceed uniform attention beyond their 95 % interval, so that "
        "fewer may be counted together than in single ones.",
    ),
)
"""The headline numbers: title, measurement, and metrics with their names."""


def headline(runs: Runs) -> list[Number]:
    """Return the headline numbers of the runs."""
    numbers = []
    for wanted in WANTED:
        stored = runs.weights(wanted.measurement)
        summaries = {weights: {item.metric.name: item for item in run.summaries} for weights, run in stored.items()}
        own = summaries.get(runs.own, {})
        beside = [
            (control, summaries[weights])
            for weights, control in CONTROLS.items()
            if weights != runs.own and weights in summaries
        ]
        metrics = [(name, title) for name, title in wanted.metrics if name in own]
        if not metrics:
            continue
        numbers.append(
            Number(
                title=wanted.title,
                values=[_value(own[name], title) for name, title in metrics],
                controls=[
                    *_floors([(own[name], title if len(metrics) > 1 else "") for name, title in metrics]),
                    *(
                        replace(_value(of_control[name], f"{control}, {title}"), of=title)
                        if len(metrics) > 1
                        else _value(of_control[name], control)
                        for control, of_control in beside
                        for name, title in metrics
                        if name in of_control
                    ),
                ],
                reading=wanted.reading,
                price=additive_price(runs) if "r2" in dict(wanted.metrics) else "",
                kinds=[
                    _value(by_metric[name], ", ".join([kind, *([title] if len(metrics) > 1 else []), *named]), kind)
                    for name, title in metrics
                    for kind in own[name].kinds
                    for named, by_metric in [([], own), *(([control], of_control) for control, of_control in beside)]
                    if name in by_metric and kind in by_metric[name].kinds
                ],
                measurement=wanted.measurement,
                metrics=tuple(name for name, _ in metrics),
            )
        )
    return numbers


def _value(summary: MetricSummary, name: str, kind: str = "") -> Value:
    """Return the mean of a metric, of the model or of a kind of layer, under a name."""
    return Value(name, summary.kinds[kind] if kind else summary.overall, summary.words(kind))


def _floors(summaries: list[tuple[MetricSummary, str]]) -> list[Value]:
    """Return the control metric of each value, with the value's name where there are several."""
    return [
        Value(
            ", ".join(filter(None, [summary.metric.control_title, title])),
            Interval(summary.control, None, None, summary.overall.n),
            of=title,
        )
        for summary, title in summaries
        if summary.control is not None
    ]
