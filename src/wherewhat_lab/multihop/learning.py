"""Learning over the steps of trainings: pure heads, accuracy, the lag between them, and curves for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.files import read_object
from wherewhat.measures.statistics import Interval, interval
from wherewhat.measures.swaps import LABELS, SCORE_LABELS
from wherewhat.measures.swaps.scores import label, sink_heads
from wherewhat.measures.tensors import share_intervals
from wherewhat.progress import counted
from wherewhat.report.learning import page_data
from wherewhat.runs.directory import COMPLETE, CONFIG
from wherewhat.runs.records import CurvePanel, Records, Series, spread_over_heads
from wherewhat_lab.multihop.scores import noise_level, overall_accuracy
from wherewhat_lab.multihop.study import STUDY, MultihopRun, open_run

PURE = ("positional", "symbolic")
"""The labels that count as pure."""

_GAMMA, _LEVEL = 0.1, 0.9
"""Largest distance of a pure head's scores from 0 and 1, and the accuracy that counts as learned."""


@dataclass(frozen=True)
class Purity:
    """Labels of heads over the steps of one training.

    Attributes:
        gammas: Largest distances of a pure head's scores from 0 and 1.
        codes: Label of each head, an index into ``LABELS`` or -1 for none, ``(gammas, records, layers, heads)``. Only
            labels without the sink hold *sink*.
        counts: Heads that have each label at a record ("now"), ``(gammas, records, labels)``.
        ever: Heads that had each label at that record or an earlier one ("ever"), ``(gammas, records, labels)``: these
            counts never fall, and a head can be counted under several labels (the figures of arXiv 2605.31558).
        since: Step from which on a head keeps the pure label that it has at the end, ``(gammas, layers, heads)``; -1
            for heads that are not pure at the end.
    """

    gammas: tuple[float, ...]
    codes: Tensor
    counts: Tensor
    ever: Tensor
    since: Tensor

    @property
    def final(self) -> Tensor:
        """Label of each head at the end, ``(gammas, layers, heads)``."""
        return self.codes[:, -1]

    def pure(self, kind: str, gamma: float, *, ever: bool = False) -> list[tuple[int, int]]:
        """Return layer and head of those that have a label at the end, or that had it at any record."""
        if kind not in LABELS:
            raise ConfigError(f"there is no label '{kind}': known are {', '.join(LABELS)}")
        labelled = self.codes[self.index(gamma)] == LABELS.index(kind)
        return [(layer, head) for layer, head in (labelled.any(0) if ever else labelled[-1]).nonzero().tolist()]

    def index(self, gamma: float) -> int:
        """Return the index of a γ."""
        if gamma not in self.gammas:
            raise ConfigError(f"purity was found for gamma {', '.join(map(str, self.gammas))}, not for {gamma}")
        return self.gammas.index(gamma)


def find_purity(records: Records, *, gammas: tuple[float, ...] = (0.1, 0.05), no_sink: bool = False) -> Purity:
    """Label heads by their mean scores over sequences; by default over all keys, as in arXiv 2605.31558.

    Args:
        records: Records of a training.
        gammas: Largest distances of a pure head's scores from 0 and 1.
        no_sink: Label sinks as such, and other heads by their scores without swaps of the first key.
    """
    if no_sink and not has_no_sink(records):
        raise ConfigError("scores without the first key are recorded at the last token, by versions from 0.2.0 on")
    for gamma in gammas:
        if not 0 <= gamma < 0.5:
            raise ConfigError(f"gamma is {gamma}: give a number from 0 to below 0.5")
    ending = "_no_sink" if no_sink else ""
    s_pos, s_sym = (records[f"{name}{ending}"].double() for name in ("s_pos", "s_sym"))
    sink = sink_heads(records["sink_excess"].reshape(-1, 1)).view_as(s_pos) if no_sink else None
    codes = torch.stack([label(s_pos, s_sym, gamma, sink=sink) for gamma in gammas])
    kinds = LABELS if no_sink else SCORE_LABELS
    labelled = torch.stack([codes == code for code in range(len(kinds))], -1)  # (gammas, records, …, heads, labels)
    counts, ever = labelled.sum((-2, -3)), labelled.int().cummax(1).values.sum((-2, -3))
    final = codes[:, -1:]
    # Number of records at the end that have the label of the last one.
    lasting = (codes == final).flip(1).cumprod(1).sum(1)
    since = records.steps[len(records) - lasting]
    pure = torch.isin(final[:, 0], torch.tensor([LABELS.index(kind) for kind in PURE]))
    return Purity(tuple(gammas), codes, counts, ever, torch.where(pure, since, -1))


def has_no_sink(records: Records) -> bool:
    """Return whether records hold scores without swaps of the first key."""
    return "s_pos_no_sink" in records.values


@dataclass(frozen=True)
class Learning:
    """Steps at which accuracy reached levels; -1 where it never did.

    Attributes:
        hops: The numbers of hops.
        levels: The levels.
        passed: Step of the first record with at least that accuracy, by number of hops, ``(levels, hops)`` int64.
        overall: The same for all answers together, ``(levels,)`` int64.
    """

    hops: tuple[int, ...]
    levels: tuple[float, ...]
    passed: Tensor
    overall: Tensor

    def at(self, level: float) -> dict[int, int]:
        """Return the step by number of hops."""
        steps: list[int] = self.passed[self.index(level)].tolist()
        return dict(zip(self.hops, steps, strict=True))

    def index(self, level: float) -> int:
        """Return the index of a level."""
        if level not in self.levels:
            raise ConfigError(f"learning was found for levels {', '.join(map(str, self.levels))}, not for {level}")
        return self.levels.index(level)


def find_learning(records: Records, *, levels: tuple[float, ...] = (0.5, 0.9, 0.99)) -> Learning:
    """Return the first steps at which accuracy reached ``levels``."""
    for level in levels:
        if not 0 < level <= 1:
            raise ConfigError(f"level is {level}: give a number above 0, up to 1")
    # From whole numbers of hits, so that a share of exactly 0.9 is not missed through rounding.
    counts = records["counts"].double()
    hits = (records["accuracy"].double() * counts).round()
    by_hops = hits / counts
    overall = hits.sum(-1, keepdim=True) / counts.sum()
    passed, together = (_first(records.steps, x, levels) for x in (by_hops, overall))
    hops: list[int] = records["hops"].tolist()
    return Learning(tuple(hops), tuple(levels), passed, together[:, 0])


def _first(steps: Tensor, shares: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the step of the first record at or above each level, ``(levels, columns)``."""
    above = shares[None] >= torch.tensor(levels, dtype=torch.float64)[:, None, None]  # (levels, records, columns)
    first = above.int().argmax(1)
    return torch.where(above.any(1), steps[first], -1)


@dataclass(frozen=True)
class Alignment:
    """Purity and accuracy over trainings that differ in their seeds.

    Attributes:
        hops: The numbers of hops that were trained.
        pure: Number of heads that are pure at the end, by kind, one per training.
        lags: Steps from an overall accuracy of 0.9 to heads becoming pure, by kind: mean over the heads of each
            training, NaN without such heads or if it was not learned. Negative if heads were pure first.
        correlation: Correlation over the records of a training between the number of pure heads and accuracy; NaN if
            one of them is constant.
    """

    hops: tuple[int, ...]
    pure: dict[str, tuple[int, ...]]
    lags: dict[str, tuple[float, ...]]
    correlation: tuple[float, ...]

    def pure_interval(self, kind: str) -> Interval:
        """Return the mean number of heads that are pure at the end, with its interval over trainings."""
        return interval([float(count) for count in self.pure[kind]])

    def lag_interval(self, kind: str) -> Interval | None:
        """Return the mean lag with its interval over the trainings that have one; None if none has."""
        return interval_of_known(self.lags[kind])

    def correlation_interval(self) -> Interval | None:
        """Return the mean correlation with its interval over trainings; None if none has one."""
        return interval_of_known(self.correlation)


def align(run: Records) -> Alignment:
    """Compare the purity of heads (γ = 0.1) with accuracy over one training."""
    purity, learned = find_purity(run, gammas=(_GAMMA,)), int(find_learning(run, levels=(_LEVEL,)).overall)
    pure: dict[str, tuple[int, ...]] = {}
    lags: dict[str, tuple[float, ...]] = {}
    for kind in PURE:
        since = purity.since[0][purity.final[0] == LABELS.index(kind)]
        pure[kind] = (len(since),)
        lags[kind] = (float(since.double().mean()) - learned if len(since) and learned >= 0 else math.nan,)
    heads = purity.counts[0][:, [LABELS.index(kind) for kind in PURE]].sum(-1)
    correlation = _correlation(heads.double(), overall_accuracy(run))
    return Alignment(tuple(run["hops"].tolist()), pure, lags, (correlation,))


def pooled(alignments: Sequence[Alignment]) -> Alignment:
    """Return the alignments of trainings of the same task and model with different seeds as one."""
    if len({one.hops for one in alignments}) != 1:
        raise ConfigError("give one or more trainings, all on the same numbers of hops")
    return Alignment(
        alignments[0].hops,
        {kind: tuple(count for one in alignments for count in one.pure[kind]) for kind in PURE},
        {kind: tuple(lag for one in alignments for lag in one.lags[kind]) for kind in PURE},
        tuple(value for one in alignments for value in one.correlation),
    )


def _correlation(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else math.nan


def interval_of_known(values: Sequence[float]) -> Interval | None:
    """Return the mean and interval of the values that are not NaN; None if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return interval(known) if known else None


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
                *(
                    Series(f"{name} heads", purity.counts[0, :, code], steps=True)
                    for code, name in enumerate(SCORE_LABELS)
                ),
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
