"""Curves over training, transition steps, and correlations over encodings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from wherewhat.measures.statistics import Interval, interval
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps.scores import label
from wherewhat.measures.tensors import centred_ranks, cosine
from wherewhat.runs.records import Records, TensorTable
from wherewhat_lab.encoding_study.study import EncodingRun

LASTING = 0.25
"""Smallest distance of a curve's end from its start, as a share of its range, that counts as a change."""


def half_step(steps: Tensor, curve: Tensor, *, for_good: bool = False) -> float:
    """Return the step at which a curve first reaches the middle between its first and its last value.

    Between records the curve is interpolated linearly in log(1 + step). NaN if the last value is within a quarter of
    the curve's range from the first, which counts as no change, or if one of them is not defined.

    Args:
        steps: Steps of the records, ascending, the first 0, ``(records,)``.
        curve: Value at each, ``(records,)``; undefined ones are skipped.
        for_good: Return the step after which the curve does not fall below the middle again, instead of the first.
    """
    known = curve.isfinite()
    if len(curve) < 2 or not bool(known[0] & known[-1]):
        return math.nan
    x, y = torch.log1p(steps[known].double()), curve[known].double()
    change = y[-1] - y[0]
    if float(change) == 0 or float(change.abs()) < LASTING * float(y.max() - y.min()):
        return math.nan
    progress = (y - y[0]) / change
    # The progress is 0 at the first record and 1 at the last, so the step lies between two records.
    after = int((progress < 0.5).nonzero()[-1, 0]) + 1 if for_good else int((progress >= 0.5).nonzero()[0, 0])
    before = after - 1
    share = (0.5 - progress[before]) / (progress[after] - progress[before])
    return float(torch.expm1(x[before] + share * (x[after] - x[before])))


_EXACT = 8
"""Largest number of encodings for which all permutations are enumerated; 8 have 40,320."""

_DRAWS = 4000


@dataclass(frozen=True)
class Relation:
    """Spearman's correlation over encodings, with its uncertainty.

    Attributes:
        rho: The correlation; NaN for fewer than 3 encodings.
        low: Lower end of its 95 % bootstrap interval over encodings.
        high: Upper end.
        p: Two-sided permutation p-value.
        n: Number of encodings.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int


def relate(x: Sequence[float], y: Sequence[float]) -> Relation:
    """Return the rank correlation of two values per encoding; encodings that lack one are left out.

    Seeds of one encoding are not independent, so the values are means over seeds, and encodings are the unit of the
    bootstrap and of the permutation test.
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    n = len(pairs)
    if n < 3:
        return Relation(math.nan, math.nan, math.nan, math.nan, n)
    values = torch.tensor(pairs, dtype=torch.float64)
    first, second = centred_ranks(values[:, 0]), centred_ranks(values[:, 1])
    rho = float(cosine(first, second))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(n, (_DRAWS, n), generator=generator)
    again = cosine(centred_ranks(values[:, 0][drawn]), centred_ranks(values[:, 1][drawn]))
    again = again[again.isfinite()]  # a sample of a single encoding has no order
    low, high = (float(again.quantile(q)) for q in (0.025, 0.975)) if len(again) else (math.nan, math.nan)
    return Relation(rho, low, high, _permutation_p(first, second, rho, generator), n)


def _permutation_p(first: Tensor, second: Tensor, rho: float, generator: torch.Generator) -> float:
    """Return the share of permutations with at least this correlation; exact for few encodings."""
    n = len(first)
    if not math.isfinite(rho):
        return math.nan
    if n <= _EXACT:
        orders = torch.tensor(list(permutations(range(n))))
    else:
        orders = torch.rand(_DRAWS, n, generator=generator).argsort(-1)
    correlations = cosine(first.expand(len(orders), -1), second[orders])
    return float((correlations.abs() >= abs(rho) - 1e-12).double().mean())


GAMMA = 0.1
"""A head is pure if one score is at least 1 - γ and the other at most γ."""


@dataclass(frozen=True)
class Panel:
    """One curve over training.

    Attributes:
        name: Its name.
        title: Title of the axis.
        reading: One sentence of explanation.
        of: Function from records to the value at each, ``(records,)``.
    """

    name: str
    title: str
    reading: str
    of: Callable[[Records], Tensor]


def _mean(name: str) -> Callable[[Records], Tensor]:
    return lambda records: records[name].flatten(1).nanmean(1)


def _largest(name: str) -> Callable[[Records], Tensor]:
    return lambda records: records[name].flatten(1).amax(1)


def _pure(kind: str) -> Callable[[Records], Tensor]:
    def share(records: Records) -> Tensor:
        codes = label(records["s_pos"], records["s_sym"], GAMMA)
        return (codes == LABELS.index(kind)).double().flatten(1).mean(1)

    return share


def additive_cost(records: Records) -> Tensor:
    """Return the increase of the loss on the same documents with additive logits, ``(records,)``."""
    additive = records["loss_additive"]
    return (additive - records["loss"][:, : additive.shape[1]]).mean(1)


PANELS = (
    Panel("loss", "loss (nats/byte)", "Mean next-byte loss on held-out windows.", _mean("loss")),
    Panel("r", "r", "Correlation of logits with a[i-j] + b[i] + c[j], mean over heads.", _mean("r")),
    Panel(
        "r_behaviour",
        "r of behaviour",
        "The same without the query term, which softmax cancels.",
        _mean("r_behaviour"),
    ),
    Panel("r_a", "r, distance alone", "Correlation of logits with a distance curve alone.", _mean("r_a")),
    Panel("r_bc", "r, query + key", "Correlation of logits with query and key terms, without distance.", _mean("r_bc")),
    Panel(
        "induction",
        "induction",
        "Attention of the best head on bytes that followed the same byte earlier, in repeated random bytes.",
        _largest("induction"),
    ),
    Panel(
        "previous_token",
        "previous byte",
        "Attention of the best head on the byte before, on held-out text.",
        _largest("previous_token"),
    ),
    Panel(
        "copying",
        "copying (nats)",
        "Loss on the first half of repeated random bytes minus that on the second.",
        _mean("copying"),
    ),
    Panel(
        "positional",
        "pure positional",
        "Share of heads with a positional score of 0.9 or more and a symbolic one of 0.1 or less.",
        _pure("positional"),
    ),
    Panel(
        "symbolic",
        "pure symbolic",
        "Share of heads with a symbolic score of 0.9 or more and a positional one of 0.1 or less.",
        _pure("symbolic"),
    ),
    Panel(
        "additive_cost",
        "cost of additive logits",
        "Increase of the loss when every head's logits are replaced by their additive fit.",
        additive_cost,
    ),
)
"""Curves in the order of the page."""

EVENTS = ("loss", "r_behaviour", "r_a", "r_bc", "induction", "previous_token", "copying", "additive_cost")
"""Panels whose half-way steps are compared."""


RATE = 0.1
"""Share of perturbed units at which robustness is evaluated."""


ADDITIVITY = {
    "r": "r at the end",
    "r_behaviour": "r of behaviour at the end",
    "additive_cost": "cost of additive logits at the end",
}
TOLERANCE = {
    "rise_words": "increase, 10 % of words transposed, unperturbed targets",
    "rise_adjacent_words": "increase, 10 % of adjacent words, unperturbed targets",
    "rise_position_jitter": "increase, 10 % of positions jittered, unperturbed targets",
    "rise_length": "increase beyond twice the context, no method",
    "rise_length_best": "increase beyond twice the context, best method",
}


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run.

    Attributes:
        encoding: Its encoding.
        seed: Its seed.
        steps: Steps of its records.
        curves: Every panel's values, ``(records,)`` by name.
        half: Step at which half of a panel's change was first reached, by name.
        lasting: Step at which it was permanently reached, by name.
        ends: Last value of every panel, and increases of the loss with intervals over documents, by name.
        best_method: The length method with the lowest loss beyond twice the context; empty if none applies.
        after: Measurements after training.
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
    after: TensorTable
    recording_share: float

    def end(self, name: str) -> float:
        """Return a value at the end of training, by name; NaN where there is none."""
        return self.ends[name].mean if name in self.ends else math.nan


def summarise_run(run: EncodingRun) -> RunSummary:
    """Return the summary of a run."""
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
        float(run.details["seconds_recording"]) / max(1e-9, float(run.details["seconds_training"])),
    )


def _perturb_rises(after: TensorTable) -> dict[str, Interval]:
    """Return the increase of the loss on unperturbed targets at one rate, by kind, with intervals over documents."""
    rises = {}
    for name, table in after.items():
        if name.startswith("loss_by_rate_"):
            rates = table.values[0, :, 0]
            at = int((rates - RATE).abs().argmin())
            rises[f"rise_{name.removeprefix('loss_by_rate_')}"] = _over_documents(table.values[:, at, 3])
    return rises


def _length_rises(after: TensorTable, context: int) -> tuple[dict[str, Interval], str]:
    """Return the increase of the loss beyond twice the context over the context's second half, and the best method."""
    position = after["position"].values
    inside, beyond = (position > context / 2) & (position < context), position > 2 * context
    if not bool(beyond.any()):
        return {}, ""
    rises: dict[str, Tensor] = {}
    # Relative to the model without a method, so that methods that are worse inside the context gain nothing.
    before = after["loss_by_position_none"].values[:, inside].mean(1)
    for name, table in after.items():
        if name.startswith("loss_by_position_"):
            rises[name.removeprefix("loss_by_position_")] = table.values[:, beyond].mean(1) - before
    best = min(rises, key=lambda name: float(rises[name].mean()))
    return {"rise_length": _over_documents(rises["none"]), "rise_length_best": _over_documents(rises[best])}, best


def _over_documents(values: Tensor) -> Interval:
    defined = values[values.isfinite()].double().tolist()
    return interval(defined) if defined else Interval(math.nan, None, None, 0)


def over_seeds(runs: Sequence[RunSummary], values: Iterable[float]) -> dict[str, list[float]]:
    """Group the values of runs by encoding, in the given order."""
    by_encoding: dict[str, list[float]] = {}
    for run, value in zip(runs, values, strict=True):
        by_encoding.setdefault(run.encoding, []).append(value)
    return by_encoding


def relations(runs: Sequence[RunSummary]) -> dict[tuple[str, str], Relation]:
    """Return rank correlations over encodings of final additivity and increases of the loss."""
    means = {
        name: [_nanmean(values) for values in over_seeds(runs, (run.end(name) for run in runs)).values()]
        for name in (*ADDITIVITY, *TOLERANCE)
    }
    return {(x, y): relate(means[x], means[y]) for x in ADDITIVITY for y in TOLERANCE}


def _nanmean(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).nanmean())
