"""``wherewhat extend``: options, metrics and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherewhat.errors import ConfigError
from wherewhat.extend.methods import METHODS, find_method
from wherewhat.measures.measurement import (
    Capacity,
    Compared,
    Comparison,
    DocumentScores,
    Estimate,
    Metric,
    ReportRun,
    Subject,
    Text,
    TextMeasurement,
)
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.extend.method import LengthMethod

_REPORTED = ("none", "sliding-window", "streaming-llm")
_REPORTED_BEYOND = (*_REPORTED, "lm-infinite", "yarn")
_BEYOND, _WINDOW = 4, 4
"""A report's text in trained lengths, or in windows."""
_LONGEST = 2048
_ROOMY = 32
"""Trained length or window from which on three runs can be planted in it."""
_SHORTEST = 16


@dataclass(frozen=True)
class ExtendConfig:
    """Options of the extend measurement."""

    methods: tuple[str, ...] = option(tuple(METHODS), "length methods to compare; none is the untouched model")
    trained: int | None = option(None, "length the model was trained on; what the model says if not given")
    window: int | None = option(None, "window of methods that have one; each method's own if not given")
    depths: tuple[int, ...] = option((0, 25, 50, 75, 100), "where runs are planted, in percent of the text; 0 is first")
    run: int = option(16, "tokens of a planted run, a quarter of which is the cue")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in self.methods:
            find_method(name)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"methods={self.methods}: give one or more, each once")
        for name in ("trained", "window"):
            value = getattr(self, name)
            if value is not None and value < 4:
                raise ConfigError(f"{name} is {value}: give at least 4 tokens")
        if not self.depths or len(set(self.depths)) < len(self.depths):
            raise ConfigError(f"depths={self.depths}: give one or more, each once")
        if min(self.depths) < 0 or max(self.depths) > 100:
            raise ConfigError(f"depths={self.depths}: percentages are from 0 to 100")
        if self.run < 2:
            raise ConfigError(f"run is {self.run}: a planted run is a cue and what follows, 2 tokens at least")

    def method(self, name: str, *, trained: int, length: int) -> LengthMethod:
        """The method of that name for texts of a length."""
        kind = find_method(name)
        own = {"window": self.window} if self.window is not None and "window" in kind.__dataclass_fields__ else {}
        return kind(**own).fitted(trained=trained, length=length)


LADDER = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Multiples of the trained length up to which losses are told, each from the one before."""


METRICS = (
    Metric("trained_length", "trained length", "tokens", "Where beyond begins."),
    Metric("text_length", "text length", "tokens", "How far the texts go."),
    Metric(
        "loss_pieces",
        "loss in pieces",
        "nats",
        "Loss of the tokens beyond when the untouched model reads them in pieces of at most the trained length.",
    ),
    Metric(
        "found_pieces",
        "found in a piece",
        "nats",
        "What planting a run gains the untouched model within the trained length: the most a method can be asked for.",
    ),
    Metric(
        "output_shift_pieces",
        "output shift in pieces",
        "",
        "How far the mean attention output of those tokens in pieces lies from that of the text's first piece, in "
        "units of the spread there: what no change of length looks like.",
    ),
    Metric("output_covariance_pieces", "covariance in pieces", "", "Distance of the covariances of the same outputs."),
    Metric("output_outliers_pieces", "outliers in pieces", "", "Share of them farther out than 99 % in the first."),
    Metric("entropy_inside", "entropy inside", "nats", "Of the untouched model's attention in training lengths."),
    Metric("sink_mass_inside", "sink mass inside", "", "Its share of attention on the first 4 keys."),
    Metric("far_mass_inside", "far mass inside", "", "Its share of attention in the farther half of the distances."),
    Metric("far_logit_inside", "far logit inside", "", "By how much its largest far logit exceeds its near ones."),
    Metric("axes_r_inside", "axes r inside", "", "Correlation of its logits with their three axes."),
    Metric("axes_distance_inside", "distance axis inside", "", "Share of variance that only their distance explains."),
    Metric(
        "rank_shift_loss",
        "shift ~ loss, over methods",
        "",
        "Rank correlation over methods of output shift and loss beyond: 1 if outputs that stay where they were in "
        "training go with a low loss.",
    ),
)

_BY_METHOD = (
    ("loss_beyond", "loss beyond", "nats", "Mean loss at positions beyond the trained length.", "loss_pieces"),
    (
        "loss_rise",
        "rise",
        "nats",
        "The same less the loss of the same tokens in pieces of the trained length: 0 is flat.",
        None,
    ),
    ("rise_inside", "rise inside", "nats", "What the method costs in the second half of the trained length.", None),
    *(
        (f"rise_to_{multiple:g}x", f"rise to {multiple:g}×", "nats", "The rise on this stretch of the text.", None)
        for multiple in LADDER
    ),
    (
        "found_within",
        "found within",
        "nats",
        "What planting a run less than a trained length back gains its tokens.",
        "found_pieces",
    ),
    ("found_beyond", "found beyond", "nats", "The same for runs planted further back.", "found_pieces"),
    (
        "output_shift",
        "output shift",
        "",
        "How far the mean attention output beyond lies from that inside, in units of the spread inside. No change is "
        "what the control shows: the same tokens in pieces, against the same inside.",
        "output_shift_pieces",
    ),
    (
        "output_covariance",
        "covariance",
        "",
        "Distance of the covariances of outputs, relative to that inside. No change is the control, not 0: so many "
        "tokens say no more of a covariance.",
        "output_covariance_pieces",
    ),
    (
        "output_outliers",
        "outliers",
        "",
        "Share of outputs beyond farther out than 99 % inside. No change is the control, which is near 0.01 only of "
        "long texts.",
        "output_outliers_pieces",
    ),
    (
        "far_logit",
        "far logit",
        "",
        "By how much the largest logit of a key farther back than the trained length exceeds those of nearer keys, at "
        "the query where it does so most; the control splits the trained length at its middle.",
        "far_logit_inside",
    ),
    (
        "far_mass",
        "far mass",
        "",
        "Share of attention farther back than the trained length, the first keys aside; the control splits the trained "
        "length at its middle.",
        "far_mass_inside",
    ),
    ("entropy", "entropy", "nats", "Of attention beyond: e to this power is how many keys it spreads over.", None),
    ("sink_mass", "sink mass", "", "Share of attention beyond that rests on the first 4 keys.", None),
    ("axes_r", "axes r", "", "Correlation with a[i-j] + b[i] + c[j] of the last stretch of logits.", None),
    ("axes_distance", "distance axis", "", "Share of their variance that only the distance explains.", None),
)
_AGAINST_INSIDE = ("entropy", "sink_mass", "axes_r", "axes_distance")


def more_metrics(config: ExtendConfig) -> tuple[Metric, ...]:
    """Words for what is measured of every method."""
    words = []
    for prefix, title, unit, reading, control in _BY_METHOD:
        against = f"{prefix}_inside" if prefix in _AGAINST_INSIDE else control
        what = "" if against is None else "in pieces" if against.endswith("pieces") else "inside"
        words += [
            Metric(f"{prefix}_{name}", f"{title}, {name}", unit, reading, against, what) for name in config.methods
        ]
    for depth in config.depths:
        for name in config.methods:
            gain = "What planting a run at this depth of the text gains the log-probability of its tokens."
            exact = "What it gains the share of its tokens that are the likeliest."
            words.append(Metric(f"found_{depth}_{name}", f"found at {depth} %, {name}", "nats", gain))
            words.append(Metric(f"exact_{depth}_{name}", f"likeliest at {depth} %, {name}", "", exact))
    for depth in config.depths:
        reading = "Tokens from the end back to the run planted at this depth."
        words.append(Metric(f"distance_{depth}", f"distance of {depth} %", "tokens", reading))
    return tuple(words)


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


class ExtendMeasurement(TextMeasurement):
    """``wherewhat extend``."""

    name = "extend"
    group = "Behaviour"
    revision = 2
    summary = "What becomes of a model beyond the trained length under each length method, and why."
    config = ExtendConfig
    controls = ()
    figure = "positions"
    metrics = METRICS
    limits = (
        "A low loss does not say that anything far back can be found: a window forgets all before it, which planted "
        "runs show and the loss hardly does. Planted runs ask for copying and for nothing harder. Attention is looked "
        "at from 128 queries per layer, its axes on the last 256 tokens; outputs are compared head by head in mean and "
        "covariance, not in what later layers read from them."
    )

    def measure(self, subject: Subject, text: Text, config: ExtendConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.extend.text import measure_lengths

        return measure_lengths(subject, text.ids, config)

    def more_metrics(self, config: ExtendConfig) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config."""
        return more_metrics(config)

    def compare(self, estimates: Estimates, config: ExtendConfig) -> Comparison:
        """Return the verdict on each method."""
        return compare(estimates, config)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun | None:
        """Return a length curve that takes seconds: beyond the trained length where that is short, else within it.

        Texts of four trained lengths are run where twice ``tokens`` are enough for at least two of them. Elsewhere, as
        with the 8,192 positions of SmolLM2, the text stays inside the trained length and the methods get a window of a
        quarter of the text: what a small window costs. Rescaled frequencies have no meaning there and are left out.
        """
        trained, most = capacity.trained, min(2 * tokens, capacity.shortest, _LONGEST)
        beyond = trained is not None and not capacity.hard_limit and most >= 2 * trained
        if not beyond and tokens < _SHORTEST:
            return None
        names = _REPORTED_BEYOND if beyond else _REPORTED
        methods = tuple(name for name in names if capacity.rotates or not find_method(name).rotary)
        edge = trained if beyond and trained is not None else tokens // _WINDOW
        options: dict[str, Any] = {"methods": methods, "depths": (0,), "run": 2}
        if not beyond:
            options |= {"trained": edge, "window": edge}
        if edge >= _ROOMY:
            options |= {"depths": (0, 50, 100), "run": max(2, min(16, edge // 16))}
        length = min(_BEYOND * edge, most) if beyond else None
        return ReportRun(3 + 5.5 * len(methods), documents=3, tokens=length, options=options, beyond=beyond)
