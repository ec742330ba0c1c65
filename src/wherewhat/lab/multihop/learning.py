"""Learning curves of multi-hop trainings for the report: accuracy, scores and numbers of pure heads by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.multihop.purity import find_learning, find_purity
from wherewhat.lab.multihop.records import noise_level
from wherewhat.lab.multihop.study import MultihopRun, open_run
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.tensors import share_intervals
from wherewhat.report.data import rounded
from wherewhat.runs.layout import COMPLETE

_POINTS = 240
"""Largest number of records on a curve."""
_GAMMA, _LEVEL = 0.1, 0.9


def learning_curves(given: Sequence[Path], *, out: Path) -> list[dict[str, Any]]:
    """Return the data of all trainings for the report: those that are named, and those in the folder of runs.

    This is the entry point ``learning`` of the group ``wherewhat.report``.

    Args:
        given: Run directories of ``wherewhat multihop``, or folders of them.
        out: Folder of run directories.
    """
    return [curves(run) for run in find_runs(given, out=out)]


def find_runs(given: Sequence[Path], *, out: Path) -> list[MultihopRun]:
    """Return the finished trainings among run directories and in folders; arguments as for :func:`learning_curves`."""
    found = {path.resolve(): path for path in _trainings(out)}
    for folder in given:
        named = [folder] if (folder / COMPLETE).is_file() else _trainings(folder)
        if not named:
            raise ConfigError(
                f"--multihop {folder} holds no multi-hop training: give a directory that 'wherewhat multihop' made"
            )
        found |= {path.resolve(): path for path in named}
    return [open_run(path) for path in sorted(found.values(), key=lambda path: path.name)]


def _trainings(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"multihop-*/{COMPLETE}"))


def curves(run: MultihopRun) -> dict[str, Any]:
    """Return the curves of one training over its steps."""
    records, setup = run.records(), run.setup
    kept = torch.linspace(0, len(records) - 1, min(_POINTS, len(records))).round().long()
    purity = find_purity(records, gammas=(_GAMMA,))
    reached = find_learning(records, levels=(_LEVEL,))
    accuracy, counts = records["accuracy"], records["counts"]
    bounds = share_intervals(accuracy.double() * counts, counts)[kept]
    return {
        "name": run.path.name,
        "title": f"{setup.name} task, {setup.model.encoding}, seed {run.seed}",
        "about": {"layers": setup.model.layers, "heads": setup.model.heads, "scored": int(records["about"][1])},
        "steps": records.steps[kept].tolist(),
        "hops": records["hops"].tolist(),
        "accuracy": [
            {
                "mean": _list(accuracy[kept, hop]),
                "low": _list(bounds[:, hop, 0]),
                "high": _list(bounds[:, hop, 1]),
            }
            for hop in range(accuracy.shape[1])
        ],
        "scores": {name: _spread(records[name][kept]) for name in ("s_pos", "s_sym", "r")},
        "r_noise": rounded(noise_level(records)),
        "labels": list(LABELS),
        "counts": [purity.counts[0, kept, code].tolist() for code in range(len(LABELS))],
        "gamma": _GAMMA,
        "level": _LEVEL,
        "reached": {str(hops): step for hops, step in reached.at(_LEVEL).items()},
    }


def _spread(values: Tensor) -> dict[str, list[float | None]]:
    """Return the mean and the quartiles over heads of ``(records, layers, heads)``."""
    heads = values.flatten(1).double()
    low, high = heads.nanquantile(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=1)
    return {"mean": _list(heads.nanmean(1)), "low": _list(low), "high": _list(high)}


def _list(values: Tensor) -> list[float | None]:
    return [rounded(value) for value in values.tolist()]
