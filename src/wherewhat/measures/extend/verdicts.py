"""Verdicts on length methods from the means of their metrics over documents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wherewhat.measures.statistics import Interval

LADDER = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Multiples of the trained length up to which losses are averaged, each from the previous one."""

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


def compare_methods(found: Estimates, methods: Sequence[str]) -> ComparisonTable:
    """Return the main metrics of every method with a verdict, and notes on all of them."""
    columns = _COLUMNS | {title: metric for title, metric in _RETRIEVAL_COLUMNS.items() if f"{metric}_pieces" in found}
    rows = [
        ComparisonRow(
            name=name,
            metrics={title: f"{metric}_{name}" for title, metric in columns.items()},
            verdict="; ".join(part for part in (loss_verdict(found, name), retrieval_verdict(found, name)) if part)
            + explanation(found, name),
        )
        for name in methods
        if f"loss_rise_{name}" in found
    ]
    return ComparisonTable("method", tuple(rows), tuple(_notes(found)))


def loss_verdict(found: Estimates, name: str) -> str:
    """Return up to which length a method is flat, and from where it is worse or broken."""
    end = found["text_length"].mean / found["trained_length"].mean
    inside = found[f"rise_inside_{name}"]
    words = []
    if _level(inside) in ("worse", "broken"):
        words.append(f"costs {inside.mean:.2f} nats within the trained length already")
    steps = {
        min(multiple, end): found[metric] for multiple in LADDER if (metric := f"rise_to_{multiple:g}x_{name}") in found
    }
    flat = list(itertools.takewhile(lambda multiple: _level(steps[multiple]) == "flat", steps))
    if flat:
        words.append(f"flat to {flat[-1]:.3g}×")
    worst = "flat"
    for multiple, rise in steps.items():
        level = _level(rise)
        if _LEVELS.index(level) > _LEVELS.index(worst):
            words.append(f"{level} by {multiple:.3g}× (+{rise.mean:.2f} nats)")
            worst = level
    return ", ".join(words)


def retrieval_verdict(found: Estimates, name: str) -> str:
    """Return whether a method finds planted runs; empty if the model does not find them within its trained length."""
    if not _can_copy(found):
        return ""
    usual, trained = found["found_pieces"].mean, found["trained_length"].mean
    words = []
    for where in ("within", "beyond"):
        gain = found.get(f"found_{where}_{name}")
        if gain is None:
            continue
        what = f"what is {where} {trained:,.0f} tokens"
        significant = gain.low is None or gain.low > 0
        if gain.mean >= FINDS * usual:
            words.append(f"finds {what}" if significant else f"unclear whether it finds {what}")
        elif significant and gain.low is not None:
            words.append(f"finds little of {what} ({gain.mean / usual:.0%})")
        elif gain.high is None or gain.high < FINDS * usual:
            words.append(f"cannot find {what}")
        else:
            words.append(f"unclear whether it finds {what}")
    return ", ".join(words)


def explanation(found: Estimates, name: str) -> str:
    """Return, in brackets, how the attention of a method that is not flat differs from that inside."""
    if _level(found[f"loss_rise_{name}"]) in ("flat", "unclear"):
        return ""

    def mean(metric: str) -> float:
        return found[metric].mean if metric in found else math.nan

    words = []
    far, far_inside = mean(f"far_mass_{name}"), mean("far_mass_inside")
    if far > 0.1:
        usual = "" if math.isnan(far_inside) else f"; inside, the farther half takes {far_inside:.0%}"
        words.append(f"keys over {mean('trained_length'):,.0f} tokens back take {far:.0%} of attention{usual}")
    entropy, entropy_inside = mean(f"entropy_{name}"), mean("entropy_inside")
    if abs(entropy - entropy_inside) > 0.5:
        wider = "wider" if entropy > entropy_inside else "less wide"
        words.append(f"attention spreads {wider} ({entropy:.1f} against {entropy_inside:.1f} nats)")
    sink, sink_inside = mean(f"sink_mass_{name}"), mean("sink_mass_inside")
    if sink_inside > 0.1 and sink < sink_inside / 2:
        words.append(f"the first keys lose their weight ({sink:.0%} of {sink_inside:.0%})")
    shift, shift_pieces = mean(f"output_shift_{name}"), mean("output_shift_pieces")
    if shift > 0.5:
        usual = "" if math.isnan(shift_pieces) else f"; in pieces, {shift_pieces:.1f}"
        words.append(f"outputs lie {shift:.1f} spreads off{usual}")
    return f" [{'; '.join(words)}]" if words else ""


def _notes(found: Estimates) -> list[str]:
    notes = [
        f"Flat: a rise of at most {FLAT} nats over reading in pieces; broken: over {BREAKS}; unclear: over {FLAT}, but "
        f"not significant with this number of documents. Found: at least {FINDS:.0%} of the gain from planting within "
        "the trained length."
    ]
    if not _can_copy(found):
        notes.append(
            "The model does not find planted runs within its trained length: what it finds beyond shows nothing."
        )
    if "second_copy_pieces" in found:
        notes.append(
            f"Pass key and codes are mean log-probabilities per token: {found['passkey_pieces'].mean:.2f} and "
            f"{found['keys_pieces'].mean:.2f} within the trained length, {found['passkey_chance'].mean:.2f} and "
            f"{found['keys_chance'].mean:.2f} if they are not stated."
            if "passkey_pieces" in found
            else "Pass key and codes were left out: they need texts and a tokenizer, not token ids."
        )
    ranked = found.get("rank_shift_loss")
    if ranked is not None:
        sure = ranked.low is None or ranked.low > 0
        how = "as their loss does" if sure and ranked.mean > 0.8 else "in part as their loss does"
        how = how if sure and ranked.mean > 0.3 else "not as their loss does"
        notes.append(f"The shift of attention outputs ranks the methods {how}: rank correlation {ranked.mean:.2f}.")
    return notes


def _can_copy(found: Estimates) -> bool:
    usual = found["found_pieces"]
    return usual.mean > COPIES and (usual.low is None or usual.low > 0)


def _level(rise: Interval) -> str:
    if rise.mean <= FLAT:
        return "flat"
    if rise.low is not None and rise.low <= 0:
        return "unclear"
    return "broken" if rise.mean > BREAKS else "worse"
