"""Declaration of ``wherewhat extend``: loss, retrieval and attention beyond the trained length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wherewhat.measures.extend import LADDER, ExtendConfig
from wherewhat.measures.measurement import Subject, Text, TextMeasurement
from wherewhat.scores import CORRELATION, NON_NEGATIVE, SHARE, UNBOUNDED, Metric, Scores, stored_metric

if TYPE_CHECKING:
    pass

_BY_METHOD = (
    ("loss_beyond", "loss beyond", "nats", "Mean loss at positions beyond the trained length.", "loss_pieces"),
    (
        "loss_rise",
        "rise",
        "nats",
        "Loss beyond minus the loss of the same tokens in pieces of the trained length: 0 is flat.",
        None,
    ),
    ("rise_inside", "rise inside", "nats", "Rise of the loss in the second half of the trained length.", None),
    *(
        (f"rise_to_{multiple:g}x", f"rise to {multiple:g}×", "nats", "Rise of the loss on this part of the text.", None)
        for multiple in LADDER
    ),
    (
        "found_within",
        "found within",
        "nats",
        "Gain in log-probability from sequences planted less than a trained length back.",
        "found_pieces",
    ),
    ("found_beyond", "found beyond", "nats", "Gain from sequences planted further back.", "found_pieces"),
    (
        "output_shift",
        "output shift",
        "",
        "Distance of the mean attention output beyond from that inside, in units of the spread inside. The control is "
        "the same tokens in pieces, without a change of length.",
        "output_shift_pieces",
    ),
    (
        "output_covariance",
        "covariance",
        "",
        "Distance of the covariances of outputs, relative to that inside. Without a change of length it equals the "
        "control, not 0, because of the finite number of tokens.",
        "output_covariance_pieces",
    ),
    (
        "output_outliers",
        "outliers",
        "",
        "Share of outputs beyond that are farther out than 99 % of those inside. The control, without a change of "
        "length, is near 0.01 only for long texts.",
        "output_outliers_pieces",
    ),
    (
        "far_logit",
        "far logit",
        "",
        "Largest excess over queries of the largest logit of keys farther back than the trained length over that of "
        "nearer keys; the control splits the trained length at its middle.",
        "far_logit_inside",
    ),
    (
        "far_mass",
        "far mass",
        "",
        "Share of attention farther back than the trained length, without the first keys; the control splits the "
        "trained length at its middle.",
        "far_mass_inside",
    ),
    (
        "entropy",
        "entropy",
        "nats",
        "Entropy of attention beyond; its exponential is the effective number of keys.",
        "entropy_inside",
    ),
    ("sink_mass", "sink mass", "", "Share of attention beyond on the first 4 keys.", "sink_mass_inside"),
    ("axes_r", "axes r", "", "Correlation with a[i-j] + b[i] + c[j] of the last part of the logits.", "axes_r_inside"),
    (
        "axes_distance",
        "distance axis",
        "",
        "Share of their variance that only the distance explains.",
        "axes_distance_inside",
    ),
)

_RETRIEVAL = (
    (
        "second_copy",
        "second copy",
        "nats",
        "Loss of a second copy of the beginning of the text, more than a trained length after it, minus the loss of "
        "the same tokens read once: negative if the first copy is used.",
        "second_copy_pieces",
    ),
    (
        "passkey",
        "pass key",
        "nats",
        "Log-probability per token of a pass key of five digits that was stated a trained length or more before, if "
        "the text is long enough for that.",
        "passkey_pieces",
    ),
    ("keys", "codes", "nats", "The same for the codes of four names, mean over them.", "keys_pieces"),
    (
        "answered",
        "answered",
        "",
        "Share of these five answers of which every token is the most likely one.",
        "answered_pieces",
    ),
)
"""Metrics by method with the option ``retrieval``."""

_CONTROLS = (
    ("trained_length", "trained length", "tokens", "Trained length; later positions are beyond."),
    ("text_length", "text length", "tokens", "Length of the texts."),
    (
        "loss_pieces",
        "loss in pieces",
        "nats",
        "Loss of the tokens beyond if the unmodified model reads them in pieces of at most the trained length.",
    ),
    (
        "found_pieces",
        "found in a piece",
        "nats",
        "Gain of the unmodified model from a sequence planted within the trained length: the most that a method can "
        "reach.",
    ),
    (
        "output_shift_pieces",
        "output shift in pieces",
        "",
        "Distance of the mean attention output of those tokens in pieces from that of the first piece, in units of "
        "the spread there: the shift without a change of length.",
    ),
    ("output_covariance_pieces", "covariance in pieces", "", "Distance of the covariances of the same outputs."),
    ("output_outliers_pieces", "outliers in pieces", "", "Share of them farther out than 99 % in the first piece."),
    ("entropy_inside", "entropy inside", "nats", "Entropy of attention within the trained length."),
    ("sink_mass_inside", "sink mass inside", "", "Its share of attention on the first 4 keys."),
    ("far_mass_inside", "far mass inside", "", "Its share of attention in the farther half of the distances."),
    ("far_logit_inside", "far logit inside", "", "Excess of its largest far logit over its near ones."),
    ("axes_r_inside", "axes r inside", "", "Correlation of its logits with their three axes."),
    ("axes_distance_inside", "distance axis inside", "", "Share of variance that only their distance explains."),
    (
        "rank_shift_loss",
        "shift ~ loss, over methods",
        "",
        "Rank correlation over methods of output shift and loss beyond: 1 if a smaller shift always has a lower loss.",
    ),
)

_RETRIEVAL_CONTROLS = (
    (
        "second_copy_pieces",
        "second copy in a piece",
        "nats",
        "The same of the unmodified model within the trained length, half a trained length apart.",
    ),
    ("second_copy_distance", "distance of copies", "tokens", "Tokens from the first to the second copy."),
    *(
        (f"{name}_{suffix}", f"{title} {how}", unit, f"{what} {where}.")
        for suffix, how, where in (
            ("pieces", "in a piece", "of the unmodified model within the trained length"),
            ("chance", "by chance", "of the unmodified model within the trained length if nothing was stated"),
        )
        for name, title, unit, what in (
            ("passkey", "pass key", "nats", "Log-probability per token"),
            ("keys", "codes", "nats", "Log-probability per token"),
            ("answered", "answered", "", "Share of answers"),
        )
    ),
    (
        "answers_distance",
        "distance of statements",
        "tokens",
        "Tokens from the last statement to the questions: less than the trained length if the text is too short.",
    ),
)
"""Controls with the option ``retrieval``."""

_RANGES = {
    **dict.fromkeys(("loss", "loss_beyond", "output_shift", "output_covariance", "entropy"), NON_NEGATIVE),
    **dict.fromkeys(("output_outliers", "far_mass", "sink_mass", "axes_r", "axes_distance", "answered"), SHARE),
    "rank_shift_loss": CORRELATION,
}
"""Ranges by name without that of a method or control; the others have none."""
_CONTROL = re.compile("_(pieces|inside|chance)$")


def _control_metrics(rows: Sequence[tuple[str, str, str, str]]) -> tuple[Metric, ...]:
    return tuple(
        Metric(name, title, reading, unit=unit, range=_RANGES.get(_CONTROL.sub("", name), UNBOUNDED))
        for name, title, unit, reading in rows
    )


class ExtendMeasurement(TextMeasurement):
    """``wherewhat extend``."""

    name = "extend"
    revision = 2
    summary = "Loss, retrieval and attention beyond the trained length, per length method."
    config = ExtendConfig
    controls = ()
    metrics = _control_metrics(_CONTROLS)
    stored = (stored_metric("loss_inside_*", unit="nats", range=NON_NEGATIVE),)
    limits = (
        "A low loss does not mean that distant tokens can be retrieved: a window excludes everything before it, which "
        "planted sequences show and the loss hardly does. Planted sequences test copying only. Attention is measured "
        "at 128 queries per layer, its axes on the last 256 tokens; outputs are compared per head in mean and "
        "covariance, not in their effect on later layers."
    )

    def measure(self, subject: Subject, text: Text, config: ExtendConfig) -> Scores:
        """Return the scores."""
        return self.measure_texts(subject, [text], config)[0]

    def measure_texts(self, subject: Subject, texts: Sequence[Text], config: ExtendConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        import torch

        from wherewhat.measures.extend.text import measure_all_lengths

        return measure_all_lengths(subject, torch.cat([text.ids for text in texts]), config, encode=texts[0].encode)

    def more_metrics(self, config: ExtendConfig) -> tuple[Metric, ...]:
        """Return the metrics of every method and depth."""
        metrics = [*_control_metrics(_RETRIEVAL_CONTROLS)] if config.retrieval else []
        for prefix, title, unit, reading, control in _BY_METHOD + (_RETRIEVAL if config.retrieval else ()):
            what = "" if control is None else "in pieces" if control.endswith("pieces") else "inside"
            metrics += [
                Metric(
                    f"{prefix}_{name}",
                    f"{title}, {name}",
                    reading,
                    unit=unit,
                    control=control,
                    control_title=what,
                    range=_RANGES.get(prefix, UNBOUNDED),
                )
                for name in config.methods
            ]
        for depth in config.depths:
            for name in config.methods:
                gain = "Gain in log-probability of its tokens from a sequence planted at this depth of the text."
                exact = "Gain in the share of its tokens that are the most likely ones."
                metrics.append(Metric(f"found_{depth}_{name}", f"found at {depth} %, {name}", gain, unit="nats"))
                metrics.append(Metric(f"exact_{depth}_{name}", f"likeliest at {depth} %, {name}", exact))
        for depth in config.depths:
            reading = "Tokens from the end back to the sequence planted at this depth."
            metrics.append(Metric(f"distance_{depth}", f"distance of {depth} %", reading, unit="tokens"))
        return tuple(metrics)
