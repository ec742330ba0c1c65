"""Learning curves of multi-hop trainings for the report: accuracy, scores and numbers of pure heads by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wherewhat.hashes import read_object
from wherewhat.lab.multihop.purity import PURE, find_learning, find_purity
from wherewhat.lab.multihop.records import noise_level
from wherewhat.lab.multihop.study import STUDY, MultihopRun, open_run
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.tensors import share_intervals
from wherewhat.progress import counted
from wherewhat.report.learning import page_data
from wherewhat.runs.layout import COMPLETE, CONFIG
from wherewhat.runs.records import CurvePanel, Series, spread_over_heads

_GAMMA, _LEVEL = 0.1, 0.9
_SCORES = {"s_pos": "positional score", "s_sym": "symbolic score", "r": "r"}


def learning_curves(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the curves of finished multi-hop trainings by run directory.

    This is the entry point ``learning`` of the group ``wherewhat.report``.

    Args:
        folder: A run directory of ``wherewhat multihop``, or a folder of them.
    """
    own = (folder / COMPLETE).is_file() and (read_object(folder / CONFIG) or {}).get("study") == STUDY
    listed = [folder] if own else sorted(file.parent for file in folder.glob(f"multihop-*/{COMPLETE}"))
    return {path.resolve(): curves(open_run(path)) for path in listed}


def curves(run: MultihopRun) -> dict[str, Any]:
    """Return the curves of one training over its steps."""
    records, setup = run.records(), run.setup
    purity = find_purity(records, gammas=(_GAMMA,))
    accuracy, counts, hops = records["accuracy"].double(), records["counts"], records["hops"].tolist()
    bounds = share_intervals(accuracy * counts, counts)
    panels = [
        CurvePanel(
            "accuracy",
            [
                Series(f"{number}-hop accuracy", accuracy[:, hop], bounds[:, hop, 0], bounds[:, hop, 1])
                for hop, number in enumerate(hops)
            ],
            unit=True,
        ),
        CurvePanel(
            "score", [spread_over_heads(title, records[name].flatten(1)) for name, title in _SCORES.items()], unit=True
        ),
        CurvePanel(
            "heads",
            [
                *(Series(f"{name} heads", purity.counts[0, :, code], steps=True) for code, name in enumerate(LABELS)),
                *(Series(f"ever {name}", purity.ever[0, :, LABELS.index(name)], steps=True) for name in PURE),
            ],
        ),
    ]
    return page_data(
        name=run.path.name,
        title=f"{setup.name} task, {setup.model.encoding}, seed {run.seed}",
        note=_note(run),
        steps=records.steps,
        panels=panels,
    )


def _note(run: MultihopRun) -> str:
    records, model = run.records(), run.setup.model
    reached = find_learning(records, levels=(_LEVEL,)).at(_LEVEL)
    steps = [f"{counted(hops, 'hop')} {'never' if step < 0 else f'at step {step}'}" for hops, step in reached.items()]
    return (
        f"{counted(model.layers, 'layer')} of {counted(model.heads, 'head')}, evaluated on "
        f"{counted(int(records['about'][1]), 'held-out sequence')}. "
        f"Accuracy {_LEVEL} is reached for {', '.join(steps)}. "
        "Top: accuracy by number of hops, bands 95 % over questions. "
        "Middle: mean over heads of positional and symbolic score and of r, bands are quartiles over heads; "
        f"r of pure noise is {noise_level(records):.4g}. "
        f"Bottom: number of heads with each label (pure within {_GAMMA}), and of those that ever were pure so far."
    )
