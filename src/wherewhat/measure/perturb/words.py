"""Words for the numbers of the perturbation experiment."""

from __future__ import annotations

from wherewhat.measure.base import Metric
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.perturb.names import KINDS, labels, percent

METRICS = (
    Metric("loss", "loss", "nats", "Mean next-token loss of the untouched text."),
    Metric("rise_at_5", "rise, 5 % of words", "nats", "Rise of the loss when 5 % of the words are transposed."),
    Metric("rise_at_10", "rise, 10 % of words", "nats", "Rise of the loss when 10 % of the words are transposed."),
    Metric(
        "rise_at_5_untouched",
        "the same, untouched",
        "nats",
        "Rise at 5 % on targets whose own word and the token before were not moved: what the rest of the text feels.",
    ),
    Metric("rise_at_10_untouched", "the same at 10 %", "nats", "Rise at 10 % on targets that were not touched."),
    Metric(
        "index_minus_feature",
        "positions − features",
        "nats",
        "Loss on untouched targets after swapping positions, less that after swapping hidden states; 0: alike.",
    ),
    Metric(
        "index_feature_correlation",
        "positions × features",
        "",
        "Correlation over untouched targets of what the two swaps do to the loss; 1: they act alike on each.",
    ),
    Metric(
        "identity_first_layer",
        "first layer differs by",
        "",
        "Difference of the first layer's attention after the two swaps, where there must be none: rounding.",
    ),
    Metric(
        "identity_tokens",
        "tokens differ by",
        "nats",
        "Difference of swapped tokens and swapped hidden states at the first layer, which are the same: rounding.",
    ),
    Metric("share_a", "unique: distance", "", "Share of the logits' variance only the distance term explains."),
)


def more_metrics(config: PerturbConfig) -> tuple[Metric, ...]:
    """Words for what depends on kinds and rates."""
    found: list[Metric] = []
    kinds = [
        (label, KINDS[kind], layer)
        for kind in config.kinds or KINDS
        for label, layer in labels(kind, config.layers).items()
    ]
    for label, title, layer in kinds:
        where = title if layer is None else f"{title}, layer {layer}"
        for rate in sorted(config.rates):
            if rate > 0:
                what = f"{where}, {percent(rate)} %"
                found.append(Metric(f"rise_{label}_at_{percent(rate)}", what, "nats", f"Rise of the loss: {what}."))
    at = percent(config.at)
    for label, title, layer in kinds if config.axes else []:
        where = title if layer is None else f"{title}, layer {layer}"
        found += (
            Metric(
                f"rise_{label}_at_{at}_untouched",
                f"untouched: {where}",
                "nats",
                f"Rise of the loss on untouched targets: {where}, {at} %.",
            ),
            Metric(
                f"sensitivity_{label}",
                f"heads: {where}",
                "",
                f"Relative change of heads' output at untouched last tokens: {where}, {at} %.",
            ),
            Metric(
                f"predicted_{label}",
                f"× distance: {where}",
                "",
                "Correlation over heads of that change with the share of distance; 1: the axes predict who suffers.",
            ),
            Metric(f"r_change_{label}", f"r: {where}", "", f"Change of r of the three axes: {where}, {at} %."),
            *(
                Metric(
                    f"share_{axis}_change_{label}",
                    f"{word}: {where}",
                    "",
                    f"Change of the share only the {word} term explains: {where}, {at} %.",
                )
                for axis, word in (("a", "distance"), ("b", "query"), ("c", "key"))
            ),
        )
    return tuple(found)
