"""Learning curves of trainings as a page stores them, and where trainings are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.files import read_object
from wherewhat.imports import plugins
from wherewhat.progress import counted
from wherewhat.report.data import rounded_list
from wherewhat.runs.directory import COMPLETE, CONFIG
from wherewhat.runs.records import RECORDS_FILE, TRAINING, CurvePanel, TrainingRun

_POINTS = 240
"""Largest number of records on a curve."""
_ROWS = 5
"""Number of steps in the table below the curves."""


def learning_curves(folders: Sequence[Path], *, out: Path) -> list[dict[str, Any]]:
    """Return the curves of all trainings for the page: those that are named, and those in the folder of runs.

    Recorded trainings are known here; the entry point ``learning`` of the group ``wherewhat.report`` is a function
    from a folder to the curves of the trainings that it knows.
    """
    known = [training_curves, *([find] if (find := plugins("wherewhat.report").get("learning")) else [])]
    by_path: dict[Path, dict[str, Any]] = {}
    for folder in (out, *folders):
        here = {path: curves for find in known for path, curves in find(folder).items()}
        if not here and folder in folders:
            raise ConfigError(
                f"--training {folder} holds no training: give a run directory training-… or multihop-…, or its folder"
            )
        by_path |= here
    return [by_path[path] for path in sorted(by_path, key=lambda path: (path.name, str(path)))]


def training_curves(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the curves of recorded trainings by run directory: finished, killed or still running ones.

    The folder is a run directory, a folder of them, or the output folder of a trainer.
    """
    listed = [folder, *sorted(folder.glob("training-*")), *sorted(folder.glob("wherewhat/training-*"))]
    curves = {}
    for path in listed:
        recorded = any((path / name).is_file() for name in (RECORDS_FILE, COMPLETE))
        if recorded and (read_object(path / CONFIG) or {}).get("study") == TRAINING:
            run = TrainingRun.load(path)
            if len(run.records):
                curves[path.resolve()] = _training_data(run)
    return curves


def _training_data(run: TrainingRun) -> dict[str, Any]:
    heads = Counter(run.records["layer"].tolist())
    each = " or ".join(str(count) for count in sorted(set(heads.values())))
    texts, tokens = len(run.config["documents"]), run.config["tokens"]
    note = (
        f"{run.config['model']}: {counted(len(heads), 'layer')} of {each} {'head' if each == '1' else 'heads'}, "
        f"recorded at {counted(len(run.records), 'step')} on {counted(texts, 'text')} of {tokens} tokens. "
        "Curves are means over heads, bands are quartiles over heads."
    )
    name = run.name if run.path is None else run.path.name
    return page_data(name=name, title=run.name, note=note, steps=run.records.steps, panels=run.panels())


def page_data(*, name: str, title: str, note: str, steps: Tensor, panels: Sequence[CurvePanel]) -> dict[str, Any]:
    """Return panels of curves over steps ``(records,)`` as plain JSON, with at most 240 points, and a table of five."""
    kept = _spread(len(steps), _POINTS)
    series = [curve for panel in panels for curve in panel.series]
    rows = [
        [str(int(steps[index])), *(_cell(float(curve.mean[index]), whole=curve.steps) for curve in series)]
        for index in _spread(len(steps), _ROWS).tolist()
    ]
    return {
        "name": name,
        "title": title,
        "note": note,
        "steps": steps[kept].tolist(),
        "panels": [panel.plain(lambda curve: rounded_list(curve[kept])) for panel in panels],
        "table": {"header": ["step", *(curve.name for curve in series)], "rows": rows},
    }


def _spread(count: int, most: int) -> Tensor:
    """Return at most ``most`` indices below ``count``, evenly spread from the first to the last."""
    return torch.linspace(0, count - 1, min(most, count)).round().long()


def _cell(value: float, *, whole: bool) -> str:
    if value != value:
        return "undefined"
    return str(round(value)) if whole else f"{value:.3f}"
