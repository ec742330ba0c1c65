"""Verdicts on length methods from the means of their metrics over documents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wherewhat.measures.extend import LADDER
from wherewhat.measures.statistics import Interval
from wherewhat.models.source import Weights
from wherewhat.rules.rule import Rule, Statement, above_zero, choose

FLAT = 0.1
"""Largest rise of the loss, in nats, of a method that is flat."""
BREAKS = 0.5
"""Rise above which it is broken. A rise above ``FLAT`` whose interval includes zero is unclear."""
FINDS = 0.5
"""Share of the gain from planting within the trained length that counts as finding a run."""
COPIES = 0.1
"""Smallest gain, in nats, within the trained length of a model that can copy at all."""

_LEVELS = ("flat", "unclear", "worse", "broken")
_COLUMNS = {
    "rise": "loss_rise",
    "found within": "found_within",
    "found beyond": "found_beyond",
    "output shift": "output_shift",
    "far mass": "far_mass",
    "entropy": "entropy",
    "sink mass": "sink_mass",
    "axes r": "axes_r",
}
_RETRIEVAL_COLUMNS = {"second copy": "second_copy", "pass key": "passkey", "codes": "keys", "answered": "answered"}
"""Columns of runs with these metrics."""

Estimates = Mapping[str, Interval]
"""Means over documents with their intervals, by metric."""


@dataclass(frozen=True)
class ComparisonRow:
    """One alternative of a comparison, such as a length method.

    Attributes:
        name: Its name.
        metrics: Names of its metrics by column title.
        verdict: Conclusion from the numbers, in words.
    """

    name: str
    metrics: Mapping[str, str]
    verdict: str


@dataclass(frozen=True)
class ComparisonTable:
    """Alternatives that one run compares.

    Attributes:
        what: Kind of alternative, as a column title.
        rows: One row per alternative, all with the same columns.
        notes: Remarks that apply to all rows.
    """

    what: str
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class MethodNumbers:
    """Numbers of one method.

    Attributes:
        estimates: Means of all methods with their intervals, by metric.
        name: Name of the method; it replaces ``{}`` in names of metrics.
    """

    estimates: Estimates
    name: str = ""

    def find(self, metric: str, weights: Weights | None = None) -> Interval | None:
        """Return the interval of a metric; None if it is missing. Methods have no control models."""
        return None if weights else self.estimates.get(metric.format(self.name))

    def __getitem__(self, metric: str) -> Interval:
        """Return the interval of a metric, which must exist."""
        return self.estimates[metric.format(self.name)]

    def mean(self, metric: str) -> float:
        """Return the mean of a metric; NaN, of which no comparison holds, if it is missing."""
        value = self.find(metric)
        return math.nan if value is None else value.mean


def compare_methods(estimates: Estimates, methods: Sequence[str]) -> ComparisonTable:
    """Return the main metrics of every method with a verdict, and notes on all of them."""
    columns = _COLUMNS | {title: name for title, name in _RETRIEVAL_COLUMNS.items() if f"{name}_pieces" in estimates}
    rows = [
        ComparisonRow(
            name=name,
            metrics={title: f"{metric}_{name}" for title, metric in columns.items()},
            verdict=method_verdict(estimates, name),
        )
        for name in methods
        if f"loss_rise_{name}" in estimates
    ]
    notes = [note.text for note in NOTES.held(MethodNumbers(estimates))]
    return ComparisonTable("method", tuple(rows), tuple(notes))


def method_verdict(estimates: Estimates, name: str) -> str:
    """Return the verdict on a method: its losses; what it finds; and in brackets what explains its losses."""
    method = MethodNumbers(estimates, name)
    loss, retrieval, reasons = ([x.text for x in rule.held(method)] for rule in VERDICTS.values())
    words = "; ".join(", ".join(texts) for texts in (loss, retrieval) if texts)
    return f"{words} [{'; '.join(reasons)}]" if reasons else words


def _loss(method: MethodNumbers) -> Iterator[Statement]:
    """State up to which length a method is flat, and from where it is worse or broken."""
    inside, end = method["rise_inside_{}"], method.mean("text_length") / method.mean("trained_length")
    text = f"costs {inside.mean:.2f} nats within the trained length already"
    yield Statement(text, _level(inside) in ("worse", "broken"))
    rises = {multiple: method.find(f"rise_to_{multiple:g}x_{{}}") for multiple in LADDER}
    levels = {min(multiple, end): (_level(rise), rise.mean) for multiple, rise in rises.items() if rise is not None}
    flat = list(itertools.takewhile(lambda multiple: levels[multiple][0] == "flat", levels))
    if flat:
        yield Statement(f"flat to {flat[-1]:.3g}×")
    worst = "flat"
    for multiple, (level, rise) in levels.items():
        text = f"{level} by {multiple:.3g}× (+{rise:.2f} nats)"
        yield Statement(text, _LEVELS.index(level) > _LEVELS.index(worst))
        worst = max(worst, level, key=_LEVELS.index)


def _level(rise: Interval) -> str:
    """Return how bad a rise of the loss is."""
    return choose(
        Statement("flat", rise.mean <= FLAT),
        Statement("unclear", not above_zero(rise)),
        Statement("broken", rise.mean > BREAKS),
        Statement("worse"),
    ).text


def _retrieval(method: MethodNumbers) -> Iterator[Statement]:
    """State whether a method finds planted sequences; nothing if the model finds none within its trained length."""
    if not _can_copy(method):
        return
    usual, trained = method.mean("found_pieces"), method.mean("trained_length")
    for where in ("within", "beyond"):
        gain = method.find(f"found_{where}_{{}}")
        if gain is None:
            continue
        what, large = f"what is {where} {trained:,.0f} tokens", gain.mean >= FINDS * usual
        yield choose(
            Statement(f"finds {what}", large, above_zero(gain)),
            Statement(f"unclear whether it finds {what}", large),
            Statement(f"finds little of {what} ({gain.mean / usual:.0%})", gain.low is not None, above_zero(gain)),
            Statement(f"cannot find {what}", gain.high is None or gain.high < FINDS * usual),
            Statement(f"unclear whether it finds {what}"),
        )


def _explanation(method: MethodNumbers) -> Iterator[Statement]:
    """State how the attention of a method that is not flat differs from that inside."""
    if _level(method["loss_rise_{}"]) in ("flat", "unclear"):
        return
    far, inside = method.mean("far_mass_{}"), method.mean("far_mass_inside")
    usual = "" if math.isnan(inside) else f"; inside, the farther half takes {inside:.0%}"
    trained = method.mean("trained_length")
    yield Statement(f"keys over {trained:,.0f} tokens back take {far:.0%} of attention{usual}", far > 0.1)
    entropy, inside = method.mean("entropy_{}"), method.mean("entropy_inside")
    wider = "wider" if entropy > inside else "less wide"
    text = f"attention spreads {wider} ({entropy:.1f} against {inside:.1f} nats)"
    yield Statement(text, abs(entropy - inside) > 0.5)
    sink, inside = method.mean("sink_mass_{}"), method.mean("sink_mass_inside")
    text = f"the first keys lose their weight ({sink:.0%} of {inside:.0%})"
    yield Statement(text, inside > 0.1, sink < inside / 2)
    shift, pieces = method.mean("output_shift_{}"), method.mean("output_shift_pieces")
    usual = "" if math.isnan(pieces) else f"; in pieces, {pieces:.1f}"
    yield Statement(f"outputs lie {shift:.1f} spreads off{usual}", shift > 0.5)


def _notes(method: MethodNumbers) -> Iterator[Statement]:
    """State what the words of all verdicts mean, and what applies to all methods."""
    yield Statement(
        f"Flat: a rise of at most {FLAT} nats over reading in pieces; broken: over {BREAKS}; unclear: over {FLAT}, but "
        f"not significant with this number of documents. Found: at least {FINDS:.0%} of the gain from planting within "
        "the trained length."
    )
    text = "The model does not find planted sequences within its trained length: what it finds beyond shows nothing."
    yield Statement(text, not _can_copy(method))
    passkey, keys, no_passkey, no_keys = (
        method.mean(name) for name in ("passkey_pieces", "keys_pieces", "passkey_chance", "keys_chance")
    )
    if method.find("second_copy_pieces") is not None:
        yield choose(
            Statement(
                f"Pass key and codes are mean log-probabilities per token: {passkey:.2f} and {keys:.2f} within the "
                f"trained length, {no_passkey:.2f} and {no_keys:.2f} if they are not stated.",
                method.find("passkey_pieces") is not None,
            ),
            Statement("Pass key and codes were left out: they need texts and a tokenizer, not token ids."),
        )
    ranked = method.find("rank_shift_loss")
    if ranked is not None:
        how = choose(
            Statement("as their loss does", above_zero(ranked), ranked.mean > 0.8),
            Statement("in part as their loss does", above_zero(ranked), ranked.mean > 0.3),
            Statement("not as their loss does"),
        ).text
        yield Statement(f"The shift of attention outputs ranks the methods {how}: rank correlation {ranked.mean:.2f}.")


def _can_copy(method: MethodNumbers) -> bool:
    usual = method["found_pieces"]
    return usual.mean > COPIES and above_zero(usual)


VERDICTS: Mapping[str, Rule[MethodNumbers]] = {
    "loss": Rule(_loss, ("rise_inside_{}", "text_length", "trained_length")),
    "retrieval": Rule(_retrieval, ("found_pieces", "trained_length")),
    "explanation": Rule(_explanation, ("loss_rise_{}", "trained_length")),
}
"""The rules of a verdict, in the order of their words."""

NOTES = Rule(_notes, ("found_pieces",))
"""The rule of remarks on all methods."""
