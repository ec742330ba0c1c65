"""Words for the numbers of ``wherewhat extend``."""

from __future__ import annotations

from wherewhat.measure.base import Metric
from wherewhat.measure.lengths.config import ExtendConfig
from wherewhat.measure.lengths.losses import LADDER

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
