"""Finished runs in the numbers the study is about: curves over training, when they turned, and how models end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.encodings.panels import PANELS
from wherewhat.encodings.records import Table
from wherewhat.encodings.relating import Relation, relate
from wherewhat.encodings.runs import EncodingRun
from wherewhat.encodings.timing import half_step
from wherewhat.pipeline.summary import Interval, interval

RATE = 0.1
"""Share of units disturbed at which tolerance is read off."""


ADDITIVITY = {
    "r": "r at the end",
    "r_behaviour": "r of behaviour at the end",
    "additive_cost": "cost of additive logits at the end",
}
TOLERANCE = {
    "rise_words": "rise, 10 % of words transposed, untouched targets",
    "rise_adjacent_words": "rise, 10 % of adjacent words, untouched targets",
    "rise_position_jitter": "rise, 10 % of positions jittered, untouched targets",
    "rise_length": "rise beyond twice the context, no method",
    "rise_length_best": "rise beyond twice the context, best method",
}


@dataclass(frozen=True)
class RunSummary:
    """One run in numbers.

    Attributes:
        encoding: Its encoding.
        seed: Its seed.
        steps: Steps of its records.
        curves: Every panel's values, ``(records,)`` by name.
        half: Step at which half of a panel's change was first reached, by name.
        lasting: Step at which it was reached for good, by name.
        ends: Last value of every panel, and tolerances with intervals over documents, by name.
        best_method: The length method with the lowest loss beyond twice the context; empty if none applies.
        after: Its curves afterwards.
        recording_share: Seconds of recording over those of training.
    """

    encoding: str
    seed: int
    steps: Tensor
    curves: Mapping[str, Tensor]
    half: Mapping[str, float]
    lasting: Mapping[str, float]
    ends: Mapping[str, Interval]
    best_method: str
    after: Table
    recording_share: float


def summarise_run(run: EncodingRun) -> RunSummary:
    """A run in numbers.

    Raises:
        StoreError: If its files are gone or damaged.
    """
    records, after = run.records(), run.after()
    curves = {panel.name: panel.of(records) for panel in PANELS}
    rises, best = _length_rises(after, run.context)
    ends = {name: Interval(float(curve[-1]), None, None, 1) for name, curve in curves.items()}
    return RunSummary(
        run.encoding,
        run.seed,
        records.steps,
        curves,
        {name: half_step(records.steps, curve) for name, curve in curves.items()},
        {name: half_step(records.steps, curve, for_good=True) for name, curve in curves.items()},
        {**ends, **_perturb_rises(after), **rises},
        best,
        after,
        float(run.provenance["seconds_recording"]) / max(1e-9, float(run.provenance["seconds_training"])),
    )


def _perturb_rises(after: Table) -> dict[str, Interval]:
    """Rise of the loss on untouched targets at one rate, by kind, with intervals over documents."""
    found = {}
    for name, table in after.items():
        if name.startswith("loss_by_rate_"):
            rates = table.values[0, :, 0]
            at = int((rates - RATE).abs().argmin())
            found[f"rise_{name.removeprefix('loss_by_rate_')}"] = _over_documents(table.values[:, at, 3])
    return found


def _length_rises(after: Table, context: int) -> tuple[dict[str, Interval], str]:
    """Rise of the loss from the second half of the context to beyond twice the context, and the best method there."""
    position = after["position"].values
    inside, beyond = (position > context / 2) & (position < context), position > 2 * context
    if not bool(beyond.any()):
        return {}, ""
    rises: dict[str, Tensor] = {}
    # Against the untouched model inside, so that methods which lose there do not gain by it.
    before = after["loss_by_position_none"].values[:, inside].mean(1)
    for name, table in after.items():
        if name.startswith("loss_by_position_"):
            rises[name.removeprefix("loss_by_position_")] = table.values[:, beyond].mean(1) - before
    best = min(rises, key=lambda name: float(rises[name].mean()))
    return {"rise_length": _over_documents(rises["none"]), "rise_length_best": _over_documents(rises[best])}, best


def _over_documents(values: Tensor) -> Interval:
    defined = values[values.isfinite()].double().tolist()
    return interval(defined) if defined else Interval(math.nan, None, None, 0)


def over_seeds(runs: Sequence[RunSummary], number: Callable[[RunSummary], float]) -> dict[str, list[float]]:
    """A number of every run, by encoding in the order they are given."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.encoding, []).append(number(run))
    return found


def end_of(name: str) -> Callable[[RunSummary], float]:
    """The number a run ends with; NaN where it has none."""
    return lambda run: run.ends[name].mean if name in run.ends else math.nan


def half_of(name: str) -> Callable[[RunSummary], float]:
    """The step at which half of a panel's change was first reached; NaN where nothing changed."""
    return lambda run: run.half[name]


def lasting_half_of(name: str) -> Callable[[RunSummary], float]:
    """The step at which half of a panel's change was reached for good; NaN where nothing changed."""
    return lambda run: run.lasting[name]


def relations(runs: Sequence[RunSummary]) -> dict[tuple[str, str], Relation]:
    """Rank correlations over encodings of how additive models end with what they tolerate."""
    means = {
        name: [_nanmean(values) for values in over_seeds(runs, end_of(name)).values()]
        for name in (*ADDITIVITY, *TOLERANCE)
    }
    return {(x, y): relate(means[x], means[y]) for x in ADDITIVITY for y in TOLERANCE}


def _nanmean(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).nanmean())
