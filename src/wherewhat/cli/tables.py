"""Tables on the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from wherewhat.capturing import Proof
from wherewhat.cli.folding import Table
from wherewhat.measure.base import Measurement
from wherewhat.measure.comparing import Comparison, Estimate
from wherewhat.pipeline.summary import Interval, MetricSummary


def headline(measurement: Measurement, runs: Sequence[tuple[str, Sequence[MetricSummary]]]) -> Table:
    """Every metric once: each run beside the others, and the control. ``runs`` are (weights, summaries)."""
    table = Table(title=measurement.summary, title_justify="left", caption=measurement.limits, caption_justify="left")
    over = "mean over heads and documents" if measurement.prompts is None else "mean over prompts"
    over = "mean over items" if measurement.items else over
    table.add_column(over, max_width=24)
    for weights, _ in runs:
        table.add_column(weights, justify="right")
    table.add_column("control", justify="right")
    by_name = [{summary.metric.name: summary for summary in summaries} for _, summaries in runs]
    for summary in runs[0][1]:
        metric = summary.metric
        # A number that is not defined for one of the models, such as a correlation over equal values, is left blank.
        cells = [_interval(named[metric.name].overall) if metric.name in named else "" for named in by_name]
        control = "" if summary.control is None else f"{_number(summary.control)}  {metric.control_title}"
        table.add_row(f"{metric.title} ({metric.unit})" if metric.unit else metric.title, *cells, control)
    return table


def by_layer(summaries: Sequence[MetricSummary], weights: str, *, width: int) -> Table:
    """One line per layer, mean over heads ± 95 % over documents, of as many metrics as a terminal has room for."""
    by_head = [summary for summary in summaries if summary.layers]
    shown = by_head[: max(1, (width - 9) // 19)]
    table = Table(title=f"by layer ({weights}): mean over heads ± 95 % over documents", title_justify="left")
    if len(shown) < len(by_head):
        table.caption = f"{len(by_head) - len(shown)} more in scores.parquet, or in a wider terminal"
        table.caption_justify = "left"
    table.add_column("layer", justify="right")
    for summary in shown:
        table.add_column(summary.metric.title, justify="right")
    for layer in sorted({i for summary in shown for i in summary.layers}):
        table.add_row(str(layer), *(_interval(s.layers[layer]) if layer in s.layers else "" for s in shown))
    return table


def by_kind(
    runs: Sequence[tuple[str, Sequence[MetricSummary]]], kinds: Mapping[str, Sequence[int]], *, width: int
) -> Table:
    """One row per kind of layer with a line for each run, of as many metrics as a terminal has room for."""
    metrics = [summary.metric for summary in runs[0][1] if summary.kinds]
    shown = metrics[: max(1, (width - 33) // 18)]
    table = Table(title="by kind of layer: mean over heads ± 95 % over documents", title_justify="left")
    table.add_column("layers", max_width=18)
    table.add_column("weights")
    for metric in shown:
        table.add_column(metric.title, justify="right")
    by_name = [{summary.metric.name: summary.kinds for summary in summaries} for _, summaries in runs]
    for kind, layers in kinds.items():
        found = [[named.get(metric.name, {}).get(kind) for named in by_name] for metric in shown]
        cells = ("\n".join("" if value is None else _interval(value) for value in column) for column in found)
        table.add_row(f"{len(layers)}: {kind}", "\n".join(weights for weights, _ in runs), *cells)
        table.add_section()
    return table


def compared(
    compare: Callable[[Mapping[str, Estimate], Any], Comparison],
    config: Any,
    summaries: Sequence[MetricSummary],
    *,
    width: int,
) -> list[Table]:
    """What a run measures side by side, as far as a terminal has room for it, with verdicts and notes below."""
    overall = {summary.metric.name: summary.overall for summary in summaries}
    found = compare(dict(overall), config)
    table = Table(title="side by side: mean ± 95 % over documents", title_justify="left")
    table.add_column(found.what)
    shown = list(found.rows[0].metrics)[: max(1, (width - 4 - max(len(row.name) for row in found.rows)) // 18)]
    for title in shown:
        table.add_column(title, justify="right")
    for row in found.rows:
        cells = [row.metrics[title] for title in shown]
        table.add_row(row.name, *(_interval(overall[x]) if x in overall else "" for x in cells))
    verdicts = Table(title="in words", title_justify="left", caption=" ".join(found.notes), caption_justify="left")
    verdicts.add_column(found.what)
    verdicts.add_column("verdict")
    for row in found.rows:
        verdicts.add_row(row.name, escape(row.verdict))
    return [table, verdicts]


def proof_table(proof: Proof) -> Table:
    """One line per layer with what was proved."""
    modules = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", layer.plan.name) for layer in proof.layers))
    table = Table(
        title=f"{modules}: {proof.plan.route} route, {proof.implementation} attention, "
        f"errors up to {proof.tolerance:g} are allowed",
        title_justify="left",
    )
    table.add_column("layer", justify="right")
    table.add_column("heads")
    table.add_column("rotation")
    for name in ("rotation", "weights", "output"):
        table.add_column(f"{name} error", justify="right")
    for layer in proof.layers:
        rotation = layer.plan.rotation
        described = "none" if rotation is None else f"{rotation.pairing}, {rotation.planes} planes"
        table.add_row(
            str(layer.plan.layer),
            str(layer.heads) if layer.heads == layer.kv_heads else f"{layer.heads} / {layer.kv_heads} kv",
            f"{described} ({layer.plan.note})" if layer.plan.note else described,
            f"{layer.rotation_error:.0e}" if rotation is not None else "",
            f"{layer.weights_error:.0e}",
            f"{layer.output_error:.0e}",
        )
    return table


def _interval(value: Interval) -> str:
    """Mean ± reach, the mean with the decimals that the reach's two leading digits justify."""
    if value.low is None or value.high is None:
        return _number(value.mean)
    reach = value.high - value.mean
    if abs(reach - (value.mean - value.low)) > 1e-9:
        return f"{value.mean:.2f} ({value.low:.2f} to {value.high:.2f})"
    decimals = 3 if reach == 0 else max(0, min(6, 1 - math.floor(math.log10(reach))))
    return f"{value.mean:.{decimals}f} ± {reach:.{decimals}f}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
