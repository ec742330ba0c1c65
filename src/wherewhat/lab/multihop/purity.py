"""When heads become pure, when accuracy rises, and the lag between the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.multihop.dynamics import Dynamics
from wherewhat.measures.statistics import Interval, interval
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps.scores import label

PURE = ("positional", "symbolic")
"""The labels that count as pure."""


@dataclass(frozen=True)
class Purity:
    """Labels of heads over the steps of one training.

    Attributes:
        gammas: How far from 0 and 1 scores of a pure head may be.
        steps: Steps of the records, ``(records,)``.
        codes: Label of each head, an index into ``LABELS`` or -1 for none, ``(gammas, records, layers, heads)``.
        counts: Heads of each label, ``(gammas, records, labels)``.
        since: Step of the first record from which on a head has had the pure label it ends with,
            ``(gammas, layers, heads)``; -1 for heads that do not end pure.
    """

    gammas: tuple[float, ...]
    steps: Tensor
    codes: Tensor
    counts: Tensor
    since: Tensor

    @property
    def final(self) -> Tensor:
        """Label of each head at the end, ``(gammas, layers, heads)``."""
        return self.codes[:, -1]

    def pure(self, kind: str, gamma: float) -> list[tuple[int, int]]:
        """Layer and head of those that end with a label."""
        if kind not in LABELS:
            raise ConfigError(f"there is no label '{kind}': known are {', '.join(LABELS)}")
        found = self.final[self.index(gamma)] == LABELS.index(kind)
        return [(layer, head) for layer, head in found.nonzero().tolist()]

    def index(self, gamma: float) -> int:
        """Where a γ is in the list."""
        if gamma not in self.gammas:
            raise ConfigError(f"purity was found for gamma {', '.join(map(str, self.gammas))}, not for {gamma}")
        return self.gammas.index(gamma)


def find_purity(dynamics: Dynamics, *, gammas: tuple[float, ...] = (0.1, 0.05), along_path: bool = False) -> Purity:
    """Labels of heads by their mean scores over sequences.

    Args:
        dynamics: The records.
        gammas: How far from 0 and 1 scores of a pure head may be.
        along_path: Take the scores at all tokens that hops leave from, in place of those at the last token.
    """
    for gamma in gammas:
        if not 0 <= gamma < 0.5:
            raise ConfigError(f"gamma is {gamma}: give a number from 0 to below 0.5")
    scores = (dynamics.s_pos_path, dynamics.s_sym_path) if along_path else (dynamics.s_pos, dynamics.s_sym)
    s_pos, s_sym = (x.double() for x in scores)
    codes = torch.stack([label(s_pos, s_sym, gamma) for gamma in gammas])
    counts = torch.stack([(codes == code).sum((-1, -2)) for code in range(len(LABELS))], -1)
    final = codes[:, -1:]
    # Counted from the end, how many records in a row have the label of the last.
    lasted = (codes == final).flip(1).cumprod(1).sum(1)
    since = dynamics.steps[len(dynamics) - lasted]
    pure = torch.isin(final[:, 0], torch.tensor([LABELS.index(kind) for kind in PURE]))
    return Purity(tuple(gammas), dynamics.steps, codes, counts, torch.where(pure, since, -1))


@dataclass(frozen=True)
class Learning:
    """Steps at which accuracy passed levels; -1 where it never did.

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
        """Step by number of hops."""
        steps: list[int] = self.passed[self.index(level)].tolist()
        return dict(zip(self.hops, steps, strict=True))

    def order(self, level: float) -> tuple[tuple[int, ...], ...]:
        """Numbers of hops in the order in which they were learned, those of the same record together.

        What was never learned is not among them.
        """
        steps = {hops: step for hops, step in self.at(level).items() if step >= 0}
        return tuple(tuple(h for h in steps if steps[h] == step) for step in sorted(set(steps.values())))

    def in_order(self, level: float) -> bool:
        """Whether all were learned, each number of hops after the ones below it."""
        return self.order(level) == tuple((hops,) for hops in self.hops)

    def spread(self, level: float) -> int | None:
        """Steps between the first and the last number of hops learned; None if one never was."""
        steps = self.at(level).values()
        return None if min(steps) < 0 else max(steps) - min(steps)

    def index(self, level: float) -> int:
        """Where a level is in the list."""
        if level not in self.levels:
            raise ConfigError(f"learning was found for levels {', '.join(map(str, self.levels))}, not for {level}")
        return self.levels.index(level)


def find_learning(dynamics: Dynamics, *, levels: tuple[float, ...] = (0.5, 0.9, 0.99)) -> Learning:
    """Steps at which accuracy passed ``levels`` for the first time."""
    for level in levels:
        if not 0 < level <= 1:
            raise ConfigError(f"level is {level}: give a number above 0, up to 1")
    # From whole numbers of hits: a share of exactly 0.9 must not fail by a rounding.
    counts = dynamics.counts.double()
    hits = (dynamics.accuracy.double() * counts).round()
    by_hops = hits / counts
    overall = hits.sum(-1, keepdim=True) / counts.sum()
    passed, together = (_first(dynamics.steps, x, levels) for x in (by_hops, overall))
    hops: list[int] = dynamics.hops.tolist()
    return Learning(tuple(hops), tuple(levels), passed, together[:, 0])


def _first(steps: Tensor, shares: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Step of the first record at or above each level, ``(levels, columns)``."""
    above = shares[None] >= torch.tensor(levels, dtype=torch.float64)[:, None, None]  # (levels, records, columns)
    first = above.int().argmax(1)
    return torch.where(above.any(1), steps[first], -1)


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
