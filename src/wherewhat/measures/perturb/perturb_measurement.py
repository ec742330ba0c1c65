"""Declaration of ``wherewhat perturb``: loss under word-order, position and feature perturbation."""

from __future__ import annotations

from collections.abc import Sequence

from wherewhat.measures.measurement import Subject, Text, TextMeasurement
from wherewhat.measures.perturb import KINDS, PerturbConfig, percent, perturbations
from wherewhat.scores import CORRELATION, NON_NEGATIVE, SHARE, Metric, Scores, loss_metric, stored_metric


class PerturbMeasurement(TextMeasurement):
    """``wherewhat perturb``."""

    name = "perturb"
    revision = 2
    summary = "Loss under word-order, position and feature perturbation."
    config = PerturbConfig
    metrics = (
        loss_metric("loss", "loss", "Mean next-token loss of the intact text."),
        Metric("rise_at_5", "rise, 5 % of words", "Rise of the loss with 5 % of the words transposed.", unit="nats"),
        Metric("rise_at_10", "rise, 10 % of words", "Rise of the loss with 10 % of the words transposed.", unit="nats"),
        Metric(
            "rise_at_5_untouched",
            "rise on untouched, 5 %",
            "Rise at 5 % on untouched targets, whose own word and previous token were not moved: the effect on the "
            "rest of the text.",
            unit="nats",
        ),
        Metric("rise_at_10_untouched", "rise on untouched, 10 %", "Rise at 10 % on untouched targets.", unit="nats"),
        Metric(
            "index_minus_feature",
            "positions − features",
            "Loss on untouched targets after swapping positions, minus that after swapping hidden states.",
            unit="nats",
        ),
        Metric(
            "index_feature_correlation",
            "positions × features",
            "Correlation over untouched targets of the changes of the loss by the two swaps.",
            range=CORRELATION,
        ),
        Metric(
            "identity_first_layer",
            "first layer differs by",
            "Difference of the first layer's attention after the two swaps where they are equivalent: rounding.",
            range=NON_NEGATIVE,
        ),
        Metric(
            "identity_tokens",
            "tokens differ by",
            "Difference of swapped tokens and swapped hidden states at the first layer, which are the same: rounding.",
            unit="nats",
        ),
        Metric(
            "share_a",
            "unique: distance",
            "Share of the logits' variance that only the distance term explains.",
            range=SHARE,
        ),
    )
    stored = (
        *(stored_metric(name, range=SHARE) for name in ("share_b", "share_c", "r")),
        stored_metric("rise_*_at_*", unit="nats"),
        stored_metric("predicted_by_key_*", range=CORRELATION),
    )
    limits = (
        "All targets include perturbed text, which is harder to predict for any model; untouched targets show the loss "
        "of the model. A rate is a share of units, rounded to the nearest swap: 1 % of a short text may be none. "
        "Swapping two equal tokens counts as a swap. With features swapped at a layer, the loss is that of the intact "
        "text. Axes of perturbed positions use the order in the text. Correlations over heads do not show causes."
    )

    def measure(self, subject: Subject, text: Text, config: PerturbConfig) -> Scores:
        """Return the scores."""
        from wherewhat.measures.perturb.losses import measure_perturb

        return measure_perturb(subject, text, config)

    def measure_texts(self, subject: Subject, texts: Sequence[Text], config: PerturbConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        from wherewhat.measures.perturb.losses import measure_all_perturbed

        return measure_all_perturbed(subject, texts, config)

    def more_metrics(self, config: PerturbConfig) -> tuple[Metric, ...]:
        """Return the metrics of every kind and rate."""
        metrics: list[Metric] = []
        kinds = list(perturbations(config.kinds or tuple(KINDS), config.layers))
        for _, label, title, _ in kinds:
            for rate in sorted(config.rates):
                if rate > 0:
                    name, what = f"rise_{label}_at_{percent(rate)}", f"{title}, {percent(rate)} %"
                    metrics.append(Metric(name, what, f"Rise of the loss: {what}.", unit="nats"))
        for _, label, title, _ in kinds if config.axes else []:
            metrics += _head_metrics(label, title, percent(config.at))
        return tuple(metrics)


def _head_metrics(label: str, title: str, at: str) -> list[Metric]:
    """Return the metrics of one kind of perturbation at one rate."""
    what = f"{title}, {at} %"
    return [
        Metric(
            f"rise_{label}_at_{at}_untouched",
            f"untouched: {title}",
            f"Rise of the loss on untouched targets: {what}.",
            unit="nats",
        ),
        Metric(
            f"sensitivity_{label}",
            f"heads: {title}",
            f"Relative change of heads' output at untouched last tokens: {what}.",
            range=NON_NEGATIVE,
        ),
        Metric(
            f"predicted_{label}",
            f"× distance: {title}",
            "Correlation over heads of that change with the share of distance; 1 if the axes predict the sensitivity.",
            range=CORRELATION,
        ),
        Metric(f"r_change_{label}", f"r: {title}", f"Change of r of the three axes: {what}."),
        *(
            Metric(
                f"share_{axis}_change_{label}",
                f"{term}: {title}",
                f"Change of the share that only the {term} term explains: {what}.",
            )
            for axis, term in (("a", "distance"), ("b", "query"), ("c", "key"))
        ),
    ]
