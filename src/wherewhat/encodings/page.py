"""The study as one HTML file that opens offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.encodings.panels import EVENTS, PANELS
from wherewhat.encodings.records import Table
from wherewhat.encodings.runs import EncodingRun
from wherewhat.encodings.summary import (
    ADDITIVITY,
    TOLERANCE,
    RunSummary,
    end_of,
    half_of,
    lasting_half_of,
    relations,
)
from wherewhat.extend import METHODS
from wherewhat.measure.perturb.names import KINDS
from wherewhat.report.encoding import rounded
from wherewhat.report.page import whole_page
from wherewhat.store.atomic import write_file

PAGE = "report.html"


def write_page(folder: Path, runs: Sequence[EncodingRun], summaries: Sequence[RunSummary]) -> Path:
    """Write the page into a folder, whole or not at all, and return its path.

    Raises:
        ConfigError: If plotly is not installed.
        StoreError: If it cannot be written.
    """
    html = whole_page(
        title="wherewhat: every encoding, from the first step",
        body=_asset("page.html"),
        style=_asset("page.css"),
        scripts=[_asset("page.js")],
        data=page_data(runs, summaries),
    )
    path = folder / PAGE
    write_file(path, html.encode("utf-8"))
    return path


def page_data(runs: Sequence[EncodingRun], summaries: Sequence[RunSummary]) -> dict[str, Any]:
    """Everything the page shows, as plain JSON."""
    by_encoding: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        by_encoding.setdefault(summary.encoding, []).append(summary)
    seeds = sorted({run.seed for run in runs})
    return {
        "about": {
            "seeds": seeds,
            "context": runs[0].context,
            "text": runs[0].provenance.get("text", ""),
            "parameters": max(int(run.provenance.get("parameters", 0)) for run in runs),
            "device": runs[0].provenance.get("device", ""),
            "steps": int(summaries[0].steps[-1]),
            "noise_floor": rounded(float(runs[0].records().values["noise_floor"][0])),
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
                **{name: rounded(end_of(name)(summary)) for name in ("loss", *ADDITIVITY, *TOLERANCE)},
            }
            for summary in summaries
        ],
        "relations": [
            {"x": x, "y": y, "n": one.n, **{k: rounded(getattr(one, k)) for k in ("rho", "low", "high", "p")}}
            for (x, y), one in relations(summaries).items()
        ],
        "runs": [{"name": run.path.name, "config": run.config, "provenance": run.provenance} for run in runs],
    }


def _encoding(name: str, runs: Sequence[RunSummary]) -> dict[str, Any]:
    """One encoding: every curve's mean over seeds, with the least and the most of them."""
    # Seeds that were recorded at other steps could not be drawn on one line.
    same = [run for run in runs if torch.equal(run.steps, runs[0].steps)]
    return {
        "name": name,
        "steps": runs[0].steps.tolist(),
        "curves": {panel.name: _band(torch.stack([run.curves[panel.name] for run in same])) for panel in PANELS},
        "half": {event: _spread(list(map(half_of(event), runs))) for event in EVENTS},
        "lasting": {event: _spread(list(map(lasting_half_of(event), runs))) for event in EVENTS},
        "lengths": _lengths([run.after for run in same]),
        "perturbed": _by_place([run.after for run in same], "loss_by_rate_", column=3),
        "residual": _by_place([run.after for run in same], "loss_by_strength", column=1).get("", None),
    }


def _lengths(tables: Sequence[Table]) -> dict[str, Any]:
    """Loss by position under each method: mean over seeds and documents, with a 95 % interval over documents."""
    names = {method.name: f"loss_by_position_{method.name}" for method in METHODS}
    return {
        "position": _list(tables[0]["position"].values),
        "methods": {
            method: _interval(torch.stack([table[name].values for table in tables]).mean(0))
            for method, name in names.items()
            if name in tables[0]
        },
    }


def _by_place(tables: Sequence[Table], prefix: str, *, column: int) -> dict[str, Any]:
    """Curves whose first column is where they are taken, by name without the prefix, likewise."""
    found = {}
    for name in tables[0]:
        if name.startswith(prefix):
            values = torch.stack([table[name].values for table in tables]).nanmean(0)  # (documents, places, columns)
            found[name.removeprefix(prefix)] = {"x": _list(values[0, :, 0]), **_interval(values[..., column])}
    return found


def _kinds(summaries: Sequence[RunSummary]) -> list[str]:
    measured = {name for summary in summaries for name in summary.after}
    return [kind for kind in KINDS if f"loss_by_rate_{kind}" in measured]


def _interval(values: Tensor) -> dict[str, Any]:
    """Mean of ``(documents, places)`` over documents and 95 % around it, by Student's t."""
    from wherewhat.pipeline.summary import interval

    found = [interval([x for x in column if math.isfinite(x)] or [math.nan]) for column in values.double().mT.tolist()]
    return {
        "mid": [rounded(one.mean) for one in found],
        "low": [rounded(one.mean if one.low is None else one.low) for one in found],
        "high": [rounded(one.mean if one.high is None else one.high) for one in found],
    }


def _band(values: Tensor) -> dict[str, Any]:
    """Mean, least and most over seeds of ``(seeds, records)``."""
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
    return (files("wherewhat.encodings") / "assets" / name).read_text("utf-8")
