"""Curves over training, transition steps, and correlations over encodings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from wherewhat.lab.encoding_study.records import Records, Table
from wherewhat.lab.encoding_study.study import EncodingRun
from wherewhat.measures.statistics import Interval, interval
from wherewhat.measures.swaps import LABELS
from wherewhat.measures.swaps.scores import label
from wherewhat.measures.tensors import centred_ranks, cosine

LASTING = 0.25
"""Share of a curve's range that it must end away from where it began to have changed at all."""


def half_step(steps: Tensor, curve: Tensor, *, for_good: bool = False) -> float:
    """The step at which a curve has first gone half of the way from its first value to its last.

    Between two records it is taken to be straight over log(1 + step), as records are spaced. NaN if it ends within a
    quarter of its range of where it began, so that there is no change to be half-way of, or is not defined there.

    Args:
        steps: Steps of the records, ascending, the first 0, ``(records,)``.
        curve: Value at each, ``(records,)``; those that are not defined are passed over.
        for_good: The step after which it never falls back behind that half, in place of the first.
    """
    known = curve.isfinite()
    if len(curve) < 2 or not bool(known[0] & known[-1]):
        return math.nan
    x, y = torch.log1p(steps[known].double()), curve[known].double()
    change = y[-1] - y[0]
    if float(change) == 0 or float(change.abs()) < LASTING * float(y.max() - y.min()):
        return math.nan
    way = (y - y[0]) / change
    # The first record's way is 0 and the last one's 1, so both lie between records.
    after = int((way < 0.5).nonzero()[-1, 0]) + 1 if for_good else int((way >= 0.5).nonzero()[0, 0])
    before = after - 1
    share = (0.5 - way[before]) / (way[after] - way[before])
    return float(torch.expm1(x[before] + share * (x[after] - x[before])))


_EXACT = 8
"""Encodings up to which all orders are looked at; 8 have 40,320."""

_DRAWS = 4000


@dataclass(frozen=True)
class Relation:
    """Spearman's correlation over encodings, with how sure it is.

    Attributes:
        rho: The correlation; NaN for fewer than 3 encodings.
        low: Lower end of its 95 % bootstrap interval over encodings; NaN likewise.
        high: Upper end.
        p: Share of all ways to match the two orders that correlate as strongly, either way; NaN likewise.
        n: Number of encodings.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int


def relate(x: Sequence[float], y: Sequence[float], *, seed: int = 0) -> Relation:
    """Rank correlation of two numbers that each encoding has; those that lack one are left out.

    Seeds of one encoding are no independent witnesses, so the numbers are means over seeds, and encodings are what is
    drawn anew and what is permuted.

    Args:
        x: One number per encoding.
        y: The other.
        seed: Seed of the bootstrap.
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    n = len(pairs)
    if n < 3:
        return Relation(math.nan, math.nan, math.nan, math.nan, n)
    values = torch.tensor(pairs, dtype=torch.float64)
    first, second = centred_ranks(values[:, 0]), centred_ranks(values[:, 1])
    rho = float(cosine(first, second))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (_DRAWS, n), generator=generator)
    again = cosine(centred_ranks(values[:, 0][drawn]), centred_ranks(values[:, 1][drawn]))
    again = again[again.isfinite()]  # a draw of one encoding alone has no order
    low, high = (float(again.quantile(q)) for q in (0.025, 0.975)) if len(again) else (math.nan, math.nan)
    return Relation(rho, low, high, _chance(first, second, rho, generator), n)


def _chance(first: Tensor, second: Tensor, rho: float, generator: torch.Generator) -> float:
    """Share of orders of the second that correlate with the first as strongly; exact for few encodings."""
    n = len(first)
    if not math.isfinite(rho):
        return math.nan
    if n <= _EXACT:
        orders = torch.tensor(list(permutations(range(n))))
    else:
        orders = torch.rand(_DRAWS, n, generator=generator).argsort(-1)
    found = cosine(first.expand(len(orders), -1), second[orders])
    return float((found.abs() >= abs(rho) - 1e-12).double().mean())


GAMMA = 0.1
"""A head is pure with one score of at least 1 - γ and the other of at most γ."""


@dataclass(frozen=True)
class Panel:
    """One number that is followed over training.

    Attributes:
        name: Its name.
        title: A few words for the axis.
        reading: One sentence on how to read it.
        of: From records to its value at each, ``(records,)``.
    """

    name: str
    title: str
    reading: str
    of: Callable[[Records], Tensor]


def _mean(name: str) -> Callable[[Records], Tensor]:
    return lambda records: records.values[name].flatten(1).nanmean(1)


def _largest(name: str) -> Callable[[Records], Tensor]:
    return lambda records: records.values[name].flatten(1).amax(1)


def _pure(kind: str) -> Callable[[Records], Tensor]:
    def share(records: Records) -> Tensor:
        codes = label(records.values["s_pos"], records.values["s_sym"], GAMMA)
        return (codes == LABELS.index(kind)).double().flatten(1).mean(1)

    return share


def additive_cost(records: Records) -> Tensor:
    """By how much the loss rises, on the same documents, when all logits are additive, ``(records,)``."""
    additive = records.values["loss_additive"]
    return (additive - records.values["loss"][:, : additive.shape[1]]).mean(1)


PANELS = (
    Panel("loss", "loss (nats/byte)", "Mean next-byte loss on held-out windows.", _mean("loss")),
    Panel("r", "r", "Correlation of logits with a[i-j] + b[i] + c[j], mean over heads.", _mean("r")),
    Panel(
        "r_behaviour",
        "r of behaviour",
        "The same without the query term, which softmax cancels.",
        _mean("r_behaviour"),
    ),
    Panel("r_a", "r, distance alone", "Correlation of logits with a distance curve alone: where.", _mean("r_a")),
    Panel("r_bc", "r, query + key", "Correlation of logits with query and key terms, without distance.", _mean("r_bc")),
    Panel(
        "induction",
        "induction",
        "Attention of the best head on what followed the same byte before, in random bytes that repeat themselves.",
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
        "How much lower the loss is on the second half of repeated random bytes than on the first.",
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
        "Rise of the loss when every head's logits are replaced by their additive fit.",
        additive_cost,
    ),
)
"""In the order they are shown."""

EVENTS = ("loss", "r_behaviour", "r_a", "r_bc", "induction", "previous_token", "copying", "additive_cost")
"""Panels whose turning points are compared."""


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
    """A run in numbers."""
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
