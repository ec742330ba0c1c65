"""The numbers of ``wherewhat extend`` in words that can be acted on."""

from __future__ import annotations

from collections.abc import Mapping

from wherewhat.measure.comparing import Compared, Comparison, Estimate
from wherewhat.measure.lengths.config import ExtendConfig
from wherewhat.measure.lengths.losses import LADDER

FLAT = 0.1
"""Rise of the loss in nats up to which a method counts as flat."""
BREAKS = 0.5
"""Rise over which it counts as broken. A rise over ``FLAT`` whose interval reaches down to zero is unclear."""
FINDS = 0.5
"""Share of what planting gains within the trained length that counts as finding a run."""
COPIES = 0.1
"""Gain in nats within the trained length below which the model cannot be asked what it finds."""

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

Estimates = Mapping[str, Estimate]


def compare(found: Estimates, config: ExtendConfig) -> Comparison:
    """Every method with its main numbers and a verdict, and what holds for all of them.

    Args:
        found: Means over documents with their intervals, by metric.
        config: The options they were measured with.
    """
    rows = [
        Compared(
            name=name,
            metrics={title: f"{metric}_{name}" for title, metric in _COLUMNS.items()},
            verdict="; ".join(part for part in (loss(found, name), finding(found, name)) if part)
            + reasons(found, name),
        )
        for name in config.methods
        if f"loss_rise_{name}" in found
    ]
    return Comparison("method", tuple(rows), tuple(_notes(found)))


def loss(found: Estimates, name: str) -> str:
    """How far a method stays flat, and what comes then."""
    end = found["text_length"].mean / found["trained_length"].mean
    inside = found[f"rise_inside_{name}"]
    words = (
        [f"costs {inside.mean:.2f} nats within the trained length already"]
        if _level(inside) in ("worse", "broken")
        else []
    )
    steps = {
        min(multiple, end): found[metric] for multiple in LADDER if (metric := f"rise_to_{multiple:g}x_{name}") in found
    }
    worst, flat_to = "flat", None
    for multiple, rise in steps.items():
        level = _level(rise)
        if worst == level == "flat":
            flat_to = multiple
        elif _LEVELS.index(level) > _LEVELS.index(worst):
            words += [f"flat to {flat_to:.3g}×"] if worst == "flat" and flat_to is not None else []
            words.append(f"{level} by {multiple:.3g}× (+{rise.mean:.2f} nats)")
            worst = level
    return ", ".join([*words, *([f"flat to {flat_to:.3g}×"] if worst == "flat" and flat_to is not None else [])])


def finding(found: Estimates, name: str) -> str:
    """Whether a method finds what was planted; nothing where the model does not find it within its training."""
    if not _can_copy(found):
        return ""
    usual, trained = found["found_pieces"].mean, found["trained_length"].mean
    words = []
    for where, what in (
        ("within", f"what is within {trained:,.0f} tokens"),
        ("beyond", f"what is beyond {trained:,.0f} tokens"),
    ):
        gain = found.get(f"found_{where}_{name}")
        if gain is None:
            continue
        told = gain.low is None or gain.low > 0
        if gain.mean >= FINDS * usual:
            words.append(f"finds {what}" if told else f"unclear whether it finds {what}")
        elif told and gain.low is not None:
            words.append(f"finds little of {what} ({gain.mean / usual:.0%})")
        elif gain.high is None or gain.high < FINDS * usual:
            words.append(f"cannot find {what}")
        else:
            words.append(f"unclear whether it finds {what}")
    return ", ".join(words)


def reasons(found: Estimates, name: str) -> str:
    """What is unlike inside in the attention of a method that is not flat, in brackets."""
    if _level(found[f"loss_rise_{name}"]) in ("flat", "unclear"):
        return ""
    words = []
    far, far_inside = (found.get(x) for x in (f"far_mass_{name}", "far_mass_inside"))
    if far is not None and far.mean > 0.1:
        trained = found["trained_length"].mean
        usual = "" if far_inside is None else f"; inside, the farther half takes {far_inside.mean:.0%}"
        words.append(f"keys over {trained:,.0f} tokens back take {far.mean:.0%} of attention{usual}")
    spread, usually = (found.get(x) for x in (f"entropy_{name}", "entropy_inside"))
    if spread is not None and usually is not None and abs(spread.mean - usually.mean) > 0.5:
        wider = "wider" if spread.mean > usually.mean else "less wide"
        words.append(f"attention spreads {wider} ({spread.mean:.1f} against {usually.mean:.1f} nats)")
    sink, resting = (found.get(x) for x in (f"sink_mass_{name}", "sink_mass_inside"))
    if sink is not None and resting is not None and resting.mean > 0.1 and sink.mean < resting.mean / 2:
        words.append(f"the first keys lose their weight ({sink.mean:.0%} of {resting.mean:.0%})")
    moved, unmoved = (found.get(x) for x in (f"output_shift_{name}", "output_shift_pieces"))
    if moved is not None and moved.mean > 0.5:
        usual = "" if unmoved is None else f"; in pieces, {unmoved.mean:.1f}"
        words.append(f"outputs lie {moved.mean:.1f} spreads off{usual}")
    return f" [{'; '.join(words)}]" if words else ""


def _notes(found: Estimates) -> list[str]:
    notes = [
        f"Flat: a rise of at most {FLAT} nats over reading in pieces; broken: over {BREAKS}; unclear: over {FLAT}, but "
        f"not told from zero by so many documents. Found: at least {FINDS:.0%} of what planting gains within the "
        "trained length."
    ]
    if not _can_copy(found):
        notes.append(
            "The model does not find planted runs within its trained length: what it finds beyond says nothing."
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


def _level(rise: Estimate) -> str:
    if rise.mean <= FLAT:
        return "flat"
    if rise.low is not None and rise.low <= 0:
        return "unclear"
    return "broken" if rise.mean > BREAKS else "worse"
