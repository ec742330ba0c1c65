"""Results of the study: tables for the terminal, Parquet tables and an HTML page."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wherewhat.files import write_file
from wherewhat.lengths import METHODS
from wherewhat.measures.perturb import KINDS
from wherewhat.measures.statistics import interval
from wherewhat.report.data import rounded
from wherewhat.runs.records import TensorTable
from wherewhat_lab.encoding_study.charts import page_charts
from wherewhat_lab.encoding_study.study import EncodingRun
from wherewhat_lab.encoding_study.summary import (
    ADDITIVITY,
    EVENTS,
    PANELS,
    TOLERANCE,
    Relation,
    RunSummary,
    over_seeds,
    relations,
)
from wherewhat_lab.study import filled_table, write_study_page

if TYPE_CHECKING:
    from wherewhat.cli.tables import Table

_SPREAD = "Mean over seeds, then minimum and maximum, or the number of seeds with a value."


def timing_table(runs: Sequence[RunSummary], *, for_good: bool = False) -> Table:
    """Return the step at which half of each change was first reached, or permanently reached, by encoding."""
    titles = {panel.name: panel.title.partition(" (")[0] for panel in PANELS}
    steps = {event: [(run.lasting if for_good else run.half)[event] for run in runs] for event in EVENTS}
    rows = {titles[event]: over_seeds(runs, values) for event, values in steps.items()}
    reached = "permanently reached" if for_good else "first reached"
    return _by_encoding(
        f"step at which half of the change from step 0 to the end was {reached}",
        f"{_SPREAD} Interpolated linearly in log(1 + step); none where the end of a curve is within a quarter of its "
        "range from the start.",
        rows,
        "{:,.0f}",
    )


def ending_table(runs: Sequence[RunSummary]) -> Table:
    """Return results after training by encoding: loss, additivity and robustness."""
    names = {
        "loss": "loss, nats/byte",
        "r": "r",
        "r_behaviour": "r of behaviour",
        "additive_cost": "cost of additive logits",
        "positional": "pure positional heads",
        "symbolic": "pure symbolic heads",
        "rise_words": "increase, words transposed",
        "rise_adjacent_words": "increase, adjacent words",
        "rise_position_jitter": "increase, positions jittered",
        "rise_length": "increase, longer texts",
        "rise_length_best": "the same, best method",
    }
    methods = {run.encoding: run.best_method or "-" for run in runs}
    return _by_encoding(
        "results at the end of training",
        f"{_SPREAD} Increases of the loss are in nats per byte: on unperturbed targets, with 10 % perturbed; and "
        "beyond twice the context compared to the second half of the context.",
        {title: over_seeds(runs, [run.end(name) for run in runs]) for name, title in names.items()},
        "{:.3f}",
        ["best method", *methods.values()],
    )


def relation_table(runs: Sequence[RunSummary]) -> Table:
    """Return rank correlations of additivity and robustness over encodings."""
    correlations = relations(runs)
    count = max((relation.n for relation in correlations.values()), default=0)

    def cell(relation: Relation) -> str:
        if math.isnan(relation.rho):
            return "too few"
        reach = f"{relation.rho:+.2f} ({relation.low:+.2f} to {relation.high:+.2f})"
        return f"{reach}, p = {relation.p:.2f}, n = {relation.n}"

    return filled_table(
        f"rank correlation over at most {count} encodings",
        ["", *ADDITIVITY.values()],
        [[title, *(cell(correlations[x, y]) for x in ADDITIVITY)] for y, title in TOLERANCE.items()],
        caption="Spearman's ρ of means over seeds, 95 % bootstrap interval over encodings, and exact permutation p. "
        "With this few encodings only a nearly perfect order is significant.",
    )


def _by_encoding(
    title: str, caption: str, rows: Mapping[str, Mapping[str, list[float]]], form: str, *further: Sequence[str]
) -> Table:
    """Return a table with a column for each encoding, from every run's values by row and encoding."""
    cells = [[name, *(_cell(of_seeds, form) for of_seeds in values.values())] for name, values in rows.items()]
    return filled_table(title, ["", *next(iter(rows.values()))], [*cells, *further], caption=caption)


def _cell(values: list[float], form: str) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "none"
    mean = form.format(sum(known) / len(known))
    if len(known) < len(values):
        return f"{mean}\n{len(known)} of {len(values)}"
    return mean if len(known) < 2 else f"{mean}\n{form.format(min(known))}\n{form.format(max(known))}"


Row = tuple[Any, ...]


def write_parquet(folder: Path, runs: Sequence[EncodingRun]) -> list[Path]:
    """Write both tables into a folder.

    ``records.parquet`` has one row per encoding, seed, step, metric and index (layer, head, plane, window, document or
    repeat); ``curves.parquet`` one per encoding, seed, curve, document and point of the curve.
    """
    records = ("encoding", "seed", "step", "metric", "layer", "head", "other", "value")
    curves = ("encoding", "seed", "curve", "document", "place", "column", "value")
    paths = []
    for name, columns, rows_of in (("records", records, _record_rows), ("curves", curves, _curve_rows)):
        paths.append(folder / f"{name}.parquet")
        write_file(paths[-1], _parquet(columns, [row for run in runs for row in rows_of(run)]))
    return paths


def _record_rows(run: EncodingRun) -> Iterator[Row]:
    records = run.records()
    for name in sorted(records.values):
        axes = records.axes[name]
        for (at, *index), value in _entries(records.values[name]):
            where = dict(zip(axes, index, strict=True))
            layer, head = where.pop("layer", None), where.pop("head", None)
            other = next(iter(where.values()), None)
            yield run.encoding, run.seed, int(records.steps[at]), name, layer, head, other, value


def _curve_rows(run: EncodingRun) -> Iterator[Row]:
    for name, table in sorted(run.after().items()):
        per_document = table.axes[0] == "document"
        for index, value in _entries(table.values):
            document, rest = (index[0], index[1:]) if per_document else (None, index)
            place, column = (*rest, None, None)[:2]
            yield run.encoding, run.seed, name, document, place, column, value


def _entries(values: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    return zip(itertools.product(*map(range, values.shape)), values.flatten().tolist(), strict=True)


def _parquet(names: Sequence[str], rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"encoding": pa.string(), "metric": pa.string(), "curve": pa.string(), "value": pa.float32()}
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, kinds.get(name, pa.int32())) for name, column in zip(names, columns, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays, list(names)), buffer, compression="zstd")
    return buffer.getvalue()


def write_page(folder: Path, runs: Sequence[EncodingRun], summaries: Sequence[RunSummary]) -> Path:
    """Write the page into a folder atomically and return its path."""
    data = page_data(runs, summaries)
    return write_study_page(
        folder / "report.html",
        "wherewhat_lab.encoding_study",
        title="wherewhat: position encodings during training",
        data=data,
        runs=runs,
        charts=page_charts(data),
    )


def page_data(runs: Sequence[EncodingRun], summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """Return everything that the page shows but its runs, as plain JSON."""
    by_encoding: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        by_encoding.setdefault(summary.encoding, []).append(summary)
    seeds = sorted({run.seed for run in runs})
    return {
        "about": {
            "seeds": seeds,
            "context": runs[0].context,
            "text": runs[0].details.get("text", ""),
            "parameters": max(int(run.details.get("parameters", 0)) for run in runs),
            "device": runs[0].details.get("device", ""),
            "steps": int(summaries[0].steps[-1]),
            "noise_floor": rounded(float(runs[0].records()["noise_floor"][0])),
            "recording": rounded(max(summary.recording_share for summary in summaries)),
        },
        "panels": [{"name": p.name, "title": p.title, "reading": p.reading} for p in PANELS],
        "events": list(EVENTS),
        "encodings": [_encoding(name, same) for name, same in by_encoding.items()],
        "kinds": {name: KINDS[name] for name in _kinds(summaries)},
        "additivity": ADDITIVITY,
        "tolerance": TOLERANCE,
        "ends": [
            {
                "encoding": summary.encoding,
                "seed": summary.seed,
                "best_method": summary.best_method,
                **{name: rounded(summary.end(name)) for name in ("loss", *ADDITIVITY, *TOLERANCE)},
            }
            for summary in summaries
        ],
        "relations": [
            {"x": x, "y": y, "n": relation.n, **{k: rounded(getattr(relation, k)) for k in ("rho", "low", "high", "p")}}
            for (x, y), relation in relations(summaries).items()
        ],
    }


def _encoding(name: str, runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Return the data of one encoding: mean, minimum and maximum over seeds of every curve."""
    # Seeds that were recorded at other steps cannot be averaged.
    same = [run for run in runs if torch.equal(run.steps, runs[0].steps)]
    return {
        "name": name,
        "steps": runs[0].steps.tolist(),
        "curves": {panel.name: _band(torch.stack([run.curves[panel.name] for run in same])) for panel in PANELS},
        "half": {event: _spread([run.half[event] for run in runs]) for event in EVENTS},
        "lasting": {event: _spread([run.lasting[event] for run in runs]) for event in EVENTS},
        "lengths": _lengths([run.after for run in same]),
        "perturbed": _by_x([run.after for run in same], "loss_by_rate_", column=3),
        "residual": _by_x([run.after for run in same], "loss_by_strength", column=1).get("", None),
    }


def _lengths(tables: Sequence[TensorTable]) -> dict[str, Any]:
    """Return the loss by position under each method: mean over seeds and documents, 95 % interval over documents."""
    names = {name: f"loss_by_position_{name}" for name in METHODS}
    return {
        "position": _list(tables[0]["position"].values),
        "methods": {
            method: _interval(torch.stack([table[name].values for table in tables]).mean(0))
            for method, name in names.items()
            if name in tables[0]
        },
    }


def _by_x(tables: Sequence[TensorTable], prefix: str, *, column: int) -> dict[str, Any]:
    """Return curves whose first column is x, by name without the prefix, with the same mean and interval."""
    curves = {}
    for name in tables[0]:
        if name.startswith(prefix):
            values = torch.stack([table[name].values for table in tables]).nanmean(0)  # (documents, points, columns)
            curves[name.removeprefix(prefix)] = {"x": _list(values[0, :, 0]), **_interval(values[..., column])}
    return curves


def _kinds(summaries: Sequence[RunSummary]) -> list[str]:
    measured = {name for summary in summaries for name in summary.after}
    return [kind for kind in KINDS if f"loss_by_rate_{kind}" in measured]


def _interval(values: Tensor) -> dict[str, Any]:
    """Return the mean of ``(documents, points)`` over documents and its 95 % interval, by Student's t."""
    estimates = [
        interval([x for x in column if math.isfinite(x)] or [math.nan]) for column in values.double().mT.tolist()
    ]
    return {
        "mid": [rounded(estimate.mean) for estimate in estimates],
        "low": [rounded(estimate.mean if estimate.low is None else estimate.low) for estimate in estimates],
        "high": [rounded(estimate.mean if estimate.high is None else estimate.high) for estimate in estimates],
    }


def _band(values: Tensor) -> dict[str, Any]:
    """Return mean, minimum and maximum over seeds of ``(seeds, records)``."""
    return {"mid": _list(values.mean(0)), "low": _list(values.amin(0)), "high": _list(values.amax(0))}


def _spread(values: list[float]) -> dict[str, Any]:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return {"mid": None, "low": None, "high": None, "missing": len(values)}
    mean = rounded(sum(known) / len(known))
    return {"mid": mean, "low": rounded(min(known)), "high": rounded(max(known)), "missing": len(values) - len(known)}


def _list(values: Tensor) -> list[float | None]:
    return [rounded(value) for value in values.double().tolist()]
