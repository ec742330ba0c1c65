"""Learning dynamics of multi-hop trainings: accuracy, scores and numbers of pure heads on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.intervals import wilson
from wherewhat.lab.multihop.purity import find_learning, find_purity
from wherewhat.lab.multihop.study import DYNAMICS_FILE, StudyRun, open_run
from wherewhat.measures.swaps import LABELS
from wherewhat.report.data import rounded

_POINTS = 240
"""Most records that a curve shows."""
_GAMMA, _LEVEL = 0.1, 0.9


def find_studies(given: Sequence[Path], *, out: Path) -> list[StudyRun]:
    """Trainings to show: those that are named, and those in the folder of run directories.

    Args:
        given: Run directories of ``wherewhat multihop``, or folders of them.
        out: Folder that holds run directories.
    """
    found = {path.resolve(): path for path in _trainings(out)}
    for folder in given:
        named = [folder] if (folder / DYNAMICS_FILE).is_file() else _trainings(folder)
        if not named:
            raise ConfigError(
                f"--multihop {folder} holds no multi-hop training: give a directory that 'wherewhat multihop' made"
            )
        found |= {path.resolve(): path for path in named}
    return [open_run(path) for path in sorted(found.values(), key=lambda path: path.name)]


def _trainings(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"multihop-*/{DYNAMICS_FILE}"))


def learning(run: StudyRun) -> dict[str, Any]:
    """One training over its steps."""
    seen = run.dynamics()
    kept = torch.linspace(0, len(seen) - 1, min(_POINTS, len(seen))).round().long()
    purity = find_purity(seen, gammas=(_GAMMA,))
    reached = find_learning(seen, levels=(_LEVEL,))
    hits = seen.accuracy.double() * seen.counts
    bounds = wilson(hits, seen.counts)[kept]
    model = run.setup.model
    return {
        "name": run.path.name,
        "title": f"{run.setup.name} task, {model.encoding}, seed {run.seed}",
        "about": {"layers": model.layers, "heads": model.heads, "scored": int(seen.about[1])},
        "steps": seen.steps[kept].tolist(),
        "hops": seen.hops.tolist(),
        "accuracy": [
            {
                "mean": _list(seen.accuracy[kept, hop]),
                "low": _list(bounds[:, hop, 0]),
                "high": _list(bounds[:, hop, 1]),
            }
            for hop in range(len(seen.hops))
        ],
        "scores": {name: _spread(getattr(seen, name)[kept]) for name in ("s_pos", "s_sym", "r")},
        "r_noise": rounded(seen.r_noise),
        "labels": list(LABELS),
        "counts": [purity.counts[0, kept, code].tolist() for code in range(len(LABELS))],
        "gamma": _GAMMA,
        "level": _LEVEL,
        "reached": {str(hops): step for hops, step in reached.at(_LEVEL).items()},
    }


def _spread(values: Tensor) -> dict[str, list[float | None]]:
    """Mean over heads and the quartiles around it, from ``(records, layers, heads)``."""
    heads = values.flatten(1).double()
    low, high = heads.nanquantile(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=1)
    return {"mean": _list(heads.nanmean(1)), "low": _list(low), "high": _list(high)}


def _list(values: Tensor) -> list[float | None]:
    return [rounded(value) for value in values.tolist()]
