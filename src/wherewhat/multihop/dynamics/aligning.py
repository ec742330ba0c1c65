"""Whether heads become pure when accuracy rises: lags between the two, over several trainings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.measure.swaps.labels import LABELS
from wherewhat.multihop.dynamics.learning import find_learning
from wherewhat.multihop.dynamics.purity import PURE, find_purity
from wherewhat.multihop.dynamics.records import Dynamics
from wherewhat.pipeline.summary import Interval, interval

OVERALL = "overall"
"""Name of the accuracy of all answers together, beside those by number of hops."""


@dataclass(frozen=True)
class Alignment:
    """Purity beside accuracy, over trainings that differ by their seeds.

    Attributes:
        gamma: How far from 0 and 1 scores of a pure head may be.
        level: The accuracy that counts as learned.
        pure: Heads that end pure, by kind, one number per training.
        lags: Steps from learning a number of hops, or all of them (``overall``), to heads becoming pure for good, by
            kind and hops: mean over the heads of each training, NaN where it has no such head or never learned that.
            Negative if heads were pure first.
        correlation: Correlation over the records of a training between the number of pure heads and accuracy; NaN if
            one of them did not change.
        learned: Step at which all answers together passed the level, -1 for never, one per training.
    """

    gamma: float
    level: float
    pure: dict[str, tuple[int, ...]]
    lags: dict[tuple[str, int | str], tuple[float, ...]]
    correlation: tuple[float, ...]
    learned: tuple[int, ...]

    def pure_interval(self, kind: str) -> Interval:
        """Mean number of heads that end pure, with its interval over trainings."""
        return interval([float(count) for count in self.pure[kind]])

    def lag_interval(self, kind: str, hops: int | str = OVERALL) -> Interval | None:
        """Mean lag with its interval over the trainings that have one; None if none has."""
        return _interval(self.lags[kind, hops])

    def correlation_interval(self) -> Interval | None:
        """Mean correlation with its interval over trainings; None if none has one."""
        return _interval(self.correlation)


def align(runs: Sequence[Dynamics], *, gamma: float = 0.1, level: float = 0.9) -> Alignment:
    """Set the purity of heads beside accuracy.

    Args:
        runs: Records of trainings of the same task and model with different seeds.
        gamma: How far from 0 and 1 scores of a pure head may be.
        level: The accuracy that counts as learned.

    Raises:
        ConfigError: If there are no trainings, or they are on different numbers of hops.
    """
    if not runs or any(not torch.equal(run.hops, runs[0].hops) for run in runs):
        raise ConfigError("give the records of one or more trainings, all on the same numbers of hops")
    names: list[int | str] = [*runs[0].hops.tolist(), OVERALL]
    pure: dict[str, list[int]] = {kind: [] for kind in PURE}
    lags: dict[tuple[str, int | str], list[float]] = {(kind, name): [] for kind in PURE for name in names}
    correlation, learned = [], []
    for run in runs:
        purity, learning = find_purity(run, gammas=(gamma,)), find_learning(run, levels=(level,))
        passed = torch.cat([learning.passed[0], learning.overall])
        learned.append(int(learning.overall))
        for kind in PURE:
            since = purity.since[0][purity.final[0] == LABELS.index(kind)]
            pure[kind].append(len(since))
            for name, step in zip(names, passed.tolist(), strict=True):
                lags[kind, name].append(float(since.double().mean()) - step if len(since) and step >= 0 else math.nan)
        heads = purity.counts[0][:, [LABELS.index(kind) for kind in PURE]].sum(-1)
        correlation.append(_correlation(heads.double(), run.overall))
    return Alignment(
        gamma=gamma,
        level=level,
        pure={kind: tuple(counts) for kind, counts in pure.items()},
        lags={key: tuple(values) for key, values in lags.items()},
        correlation=tuple(correlation),
        learned=tuple(learned),
    )


def _correlation(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else math.nan


def _interval(values: Sequence[float]) -> Interval | None:
    known = [value for value in values if not math.isnan(value)]
    return interval(known) if known else None
