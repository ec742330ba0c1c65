"""Declaration of ``wherewhat frequencies``: RoPE frequencies that heads use, and the loss without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wherewhat.measures.frequencies import FrequenciesConfig
from wherewhat.measures.measurement import Subject, Text, TextMeasurement
from wherewhat.scores import CORRELATION, NON_NEGATIVE, SHARE, Metric, Scores, loss_metric

_SCORES = (
    ("s_pos", "positional", "positional score"),
    ("s_sym", "symbolic", "symbolic score"),
    ("s_pos_no_sink", "positional, no sink", "positional score without the sink"),
    ("s_sym_no_sink", "symbolic, no sink", "symbolic score without the sink"),
)
"""Swap scores over all keys and over those after the sink: name, title, and what they are."""


def _loss(name: str, title: str, reading: str, control: str) -> Metric:
    """Return a loss with planes changed; its control changes as many random planes."""
    return loss_metric(name, title, reading, control=control, control_title="random planes")


def _band_metrics(band: int) -> list[Metric]:
    """Return the metrics of one band."""
    planes = f"band {band}"
    return [
        *(
            Metric(
                f"{score}_band_{band}",
                f"{title}, {planes}",
                f"Mean {what} of single planes in {planes}.",
                range=SHARE,
            )
            for score, title, what in _SCORES
        ),
        _loss(
            f"loss_without_band_{band}", f"loss without {planes}", f"Loss with {planes} masked.", "loss_without_random"
        ),
        _loss(
            f"loss_only_band_{band}",
            f"loss with only {planes}",
            "Loss with all other bands masked.",
            "loss_only_random",
        ),
        *(
            Metric(
                f"{score}_change_without_band_{band}",
                f"{title} without {planes}",
                f"Change of the masked heads' mean {what} with {planes} masked.",
            )
            for score, title, what in _SCORES
        ),
    ]


def _unrotated_band(band: int) -> Metric:
    """Return the loss with one band un-rotated."""
    reading = (
        f"Loss with the angles of band {band} set to 0: its queries and keys keep their content and ignore positions."
    )
    return _loss(f"loss_unrotated_band_{band}", f"loss, band {band} un-rotated", reading, "loss_unrotated_random")


_UNROTATED = (
    *(
        Metric(name, title, reading, control="band_predicted", control_title="predicted", range=NON_NEGATIVE)
        for name, title, reading in (
            (
                "band_measured",
                "plane of the largest norm",
                "Index of the plane with the largest norm of queries times keys, 0 the fastest; the control is the "
                "prediction from the trained length, d/2 · log_base(L / 3.657).",
            ),
            (
                "band_peak",
                "plane of the largest norm, of a layer",
                "The same for the mean over the heads of a layer of each plane's share of the norm.",
            ),
        )
    ),
    _loss(
        "loss_unrotated_slow",
        "loss, slow planes un-rotated",
        "Loss with all planes un-rotated that are slower than the predicted band; the control un-rotates as many "
        "random planes of each layer.",
        "loss_unrotated_slow_random",
    ),
    _loss(
        "loss_unrotated_fast",
        "loss, fast planes un-rotated",
        "Loss with as many of the fastest planes un-rotated.",
        "loss_unrotated_slow_random",
    ),
    _loss(
        "loss_without_slow",
        "loss without slow planes",
        "Loss with the slow planes masked instead; the control masks as many random planes of each layer.",
        "loss_without_slow_random",
    ),
    loss_metric(
        "loss_unrotated_all",
        "loss, all planes un-rotated",
        "Loss with all planes un-rotated: that of the model with all positions equal.",
    ),
)


def _replaced(name: str, title: str, reading: str, **others: Any) -> tuple[Metric, Metric]:
    """Return a metric of the model with massive values replaced, everywhere and at all tokens but the first."""
    return (
        Metric(name, title, reading, control=f"{name}_random", control_title="random dimensions", **others),
        Metric(
            f"{name}_later", f"{title}, first token unchanged", "The same with the first token unchanged.", **others
        ),
    )


_MASSIVE = (
    *(
        Metric(name, title, reading, control="massive_v", control_title="values", range=NON_NEGATIVE)
        for name, title, reading in (
            (
                "massive_q",
                "largest dimension of queries, times the mean",
                "Largest norm over tokens of a dimension of the rotated queries, relative to the mean over the "
                "dimensions of the head; massive above 5 (arXiv 2502.01563).",
            ),
            ("massive_k", "largest dimension of keys, times the mean", "The same for rotated keys."),
        )
    ),
    Metric(
        "massive_heads",
        "heads with massive values",
        "Share of the heads of a layer whose queries or keys have a massive dimension.",
        control="massive_heads_v",
        control_title="values",
        range=SHARE,
    ),
    Metric(
        "massive_slow",
        "massive values in slow planes",
        "Share of a layer's massive dimensions in the slower half of the planes; unrotated ones count as slow.",
        control="massive_slow_even",
        control_title="all dimensions",
        range=SHARE,
    ),
    Metric(
        "facts",
        "gain from remembered facts",
        "Log-probability of answers to questions of general knowledge, minus that of the same answers for other "
        "subjects.",
        unit="nats",
    ),
    *_replaced(
        "planted_lost_massive",
        "lost gain from planted sequences",
        "Share of the gain from planted sequences that is lost with massive dimensions of queries and keys replaced by "
        "their means over the text.",
    ),
    *_replaced(
        "facts_lost_massive",
        "lost gain from remembered facts",
        "Share of the gain from remembered facts that is lost with massive dimensions replaced.",
    ),
    *_replaced(
        "loss_massive",
        "loss without massive values",
        "Loss with massive dimensions replaced.",
        unit="nats",
        range=NON_NEGATIVE,
    ),
)


def _lost(how: str, planes: str) -> tuple[Metric, ...]:
    """Return lost shares of the gain from planted sequences with planes of retrieval heads changed, and controls."""
    name = f"planted_lost_{how}"
    return (
        Metric(
            name,
            f"lost gain, slowest planes {planes}",
            f"Share of the gain from planted sequences that is lost with the slowest band {planes} in the tenth of "
            "heads that read them most; the control changes as many random planes of these heads.",
            control=f"{name}_random",
            control_title="random planes",
        ),
        Metric(
            f"{name}_others",
            f"lost gain, slowest planes {planes} in other heads",
            "The same in as many other heads, of the same layers where there are enough.",
        ),
    )


_PLANTED = Metric(
    "planted",
    "gain from planted sequences",
    "Gain in log-probability of the last runs of the text if they also occur earlier in it.",
    unit="nats",
)

_RETRIEVAL = (
    Metric(
        "copy_attention",
        "attention that reads planted sequences",
        "Mean attention from each token of a run at the end to the token after its planted copy.",
        range=SHARE,
    ),
    *_lost("masked", "masked"),
    *_lost("unrotated", "un-rotated"),
    Metric(
        "planted_lost_all_masked",
        "lost gain, all planes masked",
        "The same with all planes of these heads masked: their attention ignores what rotates.",
    ),
)


class FrequenciesMeasurement(TextMeasurement):
    """``wherewhat frequencies``."""

    name = "frequencies"
    revision = 4
    summary = "RoPE frequencies that heads use, and the loss without them."
    config = FrequenciesConfig
    metrics = (
        *(
            Metric(name, title, reading, control="mean_frequency_even", control_title="even use")
            for name, title, reading in (
                (
                    "mean_frequency_softmax",
                    "mean frequency ID",
                    "Mean rank of the planes by frequency, 1 the fastest, weighted by the softmax of the largest logit "
                    "of each (arXiv 2605.31558); the control is equal use of all planes.",
                ),
                (
                    "mean_frequency",
                    "mean frequency ID, linear",
                    "The same, weighted by the largest logits themselves: many planes with small logits count as much "
                    "as one with a large logit.",
                ),
            )
        ),
        Metric(
            "s_pos",
            "positional",
            "1 if the head's attention stays at its positions when contents are swapped.",
            range=SHARE,
        ),
        Metric(
            "s_sym", "symbolic", "1 if the head's attention follows the contents when they are swapped.", range=SHARE
        ),
        *(
            Metric(score, title, f"The {what}: the first tokens are not swapped.", range=SHARE)
            for score, title, what in _SCORES[2:]
        ),
        Metric(
            "effective_swaps",
            "effective number of swaps",
            "Exponential of the entropy of the swap weights of both scores, mean over queries.",
            range=NON_NEGATIVE,
        ),
        *(
            Metric(
                f"frequency_softmax_{score}",
                f"frequency ID × {title}",
                f"Correlation over heads of mean frequency ID and {what}; above 0, slow heads have the higher score.",
                range=CORRELATION,
            )
            for score, title, what in _SCORES
        ),
        *(
            Metric(
                f"frequency_{score}",
                f"linear frequency ID × {title}",
                "The same correlation with linear weights of the mean frequency ID.",
                range=CORRELATION,
            )
            for score, title, _ in _SCORES
        ),
        *(
            Metric(
                f"{score}_rest",
                f"{title}, unrotated",
                f"{what.capitalize()} of the dimensions that do not rotate.",
                range=SHARE,
            )
            for score, title, what in _SCORES
        ),
        loss_metric("loss", "loss", "Mean next-token loss of the intact model."),
    )
    limits = (
        "A single plane is not the plane in its head: softmax combines them, and the attention of a plane with small "
        "logits is almost uniform, which counts as positional and symbolic at once. Frequencies are ranks; the number "
        "of turns over the text depends on its length. Soft-cap and bias are not part of a plane. A masked model is "
        "not a model trained without the band: the loss shows that this model relies on the band, not that the task "
        "requires it. Later layers have changed inputs, so changes of scores include the effect of masking earlier "
        "layers. Slow planes hardly turn in a text much shorter than the trained length: un-rotating them there is "
        "harmless for any model."
    )

    def measure(self, subject: Subject, text: Text, config: FrequenciesConfig) -> Scores:
        """Return the scores."""
        return self.measure_texts(subject, [text], config)[0]

    def measure_texts(self, subject: Subject, texts: Sequence[Text], config: FrequenciesConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        import torch

        from wherewhat.measures.frequencies.text import measure_all_frequencies

        ids = torch.cat([text.ids for text in texts])
        return measure_all_frequencies(subject, ids, config, encode=texts[0].encode, prefix=texts[0].prefix)

    def more_metrics(self, config: FrequenciesConfig) -> tuple[Metric, ...]:
        """Return the metrics of every band, ordered by metric and then by band."""
        by_band = [_band_metrics(band) for band in range(1, config.bands + 1)]
        metrics = tuple(metric for same in zip(*by_band, strict=True) for metric in same)
        if config.unrotate:
            metrics = (*metrics, *map(_unrotated_band, range(1, config.bands + 1)), *_UNROTATED)
        if config.massive or config.retrieval:
            metrics = (*metrics, _PLANTED)
        return (*metrics, *(_MASSIVE if config.massive else ()), *(_RETRIEVAL if config.retrieval else ()))
