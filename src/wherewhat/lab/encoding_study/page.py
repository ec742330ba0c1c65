"""The study as an HTML page and as Parquet tables."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.extend import METHODS
from wherewhat.files import write_file
from wherewhat.lab.encoding_study.study import EncodingRun
from wherewhat.lab.encoding_study.summary import (
    ADDITIVITY,
    EVENTS,
    PANELS,
    TOLERANCE,
    RunSummary,
    relations,
)
from wherewhat.measures.perturb.measurement import KINDS
from wherewhat.report.data import rounded
from wherewhat.report.page import whole_page
from wherewhat.runs.records import TensorTable

RECORDS_TABLE = "records.parquet"
CURVES_TABLE = "curves.parquet"

Row = tuple[Any, ...]


def write_parquet(folder: Path, runs: Sequence[EncodingRun]) -> list[Path]:
    """Write both tables into a folder.

    ``records.parquet`` has one row per encoding, seed, step, metric and index (layer, head, plane, window, document or
    repeat); ``curves.parquet`` one per encoding, seed, curve, document and point of the curve.
    """
    records = [row for run in runs for row in _record_rows(run)]
    curves = [row for run in runs for row in _curve_rows(run)]
    first = ("encoding", "seed", "step", "metric", "layer", "head", "other", "value")
    second = ("encoding", "seed", "curve", "document", "place", "column", "value")
    paths = [folder / RECORDS_TABLE, folder / CURVES_TABLE]
    for path, names, rows in zip(paths, (first, second), (records, curves), strict=True):
        write_file(path, _parquet(names, rows))
    return paths


def _record_rows(run: EncodingRun) -> Iterator[Row]:
    found = run.records()
    for name in sorted(found.values):
        axes = found.axes[name]
        for (at, *index), value in _entries(found.values[name]):
            where = dict(zip(axes, index, strict=True))
            layer, head = where.pop("layer", None), where.pop("head", None)
            other = next(iter(where.values()), None)
            yield run.encoding, run.seed, int(found.steps[at]), name, layer, head, other, value


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


PAGE = "report.html"


def write_page(folder: Path, runs: Sequence[EncodingRun], summaries: Sequence[RunSummary]) -> Path:
    """Write the page into a folder atomically and return its path."""
    html = whole_page(
        title="wherewhat: position encodings during training",
        body=_asset("page.html"),
        style=_asset("page.css"),
        scripts=[_asset("page.js")],
        data=page_data(runs, summaries),
    )
    path = folder / PAGE
    write_file(path, html.encode("utf-8"))
    return path


def page_data(runs: Sequence[EncodingRun], summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """Return everything that the page shows, as plain JSON."""
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
            {"x": x, "y": y, "n": one.n, **{k: rounded(getattr(one, k)) for k in ("rho", "low", "high", "p")}}
            for (x, y), one in relations(summaries).items()
        ],
        "runs": [
            {"name": run.path.name, "config": run.config, "provenance": run.directory.provenance()} for run in runs
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
    found = {}
    for name in tables[0]:
        if name.startswith(prefix):
            values = torch.stack([table[name].values for table in tables]).nanmean(0)  # (documents, points, columns)
            found[name.removeprefix(prefix)] = {"x": _list(values[0, :, 0]), **_interval(values[..., column])}
    return found


def _kinds(summaries: Sequence[RunSummary]) -> list[str]:
    measured = {name for summary in summaries for name in summary.after}
    return [kind for kind in KINDS if f"loss_by_rate_{kind}" in measured]


def _interval(values: Tensor) -> dict[str, Any]:
    """Return the mean of ``(documents, points)`` over documents and its 95 % interval, by Student's t."""
    from wherewhat.measures.statistics import interval

    found = [interval([x for x in column if math.isfinite(x)] or [math.nan]) for column in values.double().mT.tolist()]
    return {
        "mid": [rounded(one.mean) for one in found],
        "low": [rounded(one.mean if one.low is None else one.low) for one in found],
        "high": [rounded(one.mean if one.high is None else one.high) for one in found],
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


def _asset(name: str) -> str:
    return (files("wherewhat.lab.encoding_study") / "assets" / name).read_text("utf-8")
