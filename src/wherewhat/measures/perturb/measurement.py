"""``wherewhat perturb``: loss under word-order and position perturbation."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Capacity, DocumentScores, Metric, ReportRun, Subject, Text, TextMeasurement
from wherewhat.options import check_seed, nearest, option

KINDS: dict[str, str] = {
    "words": "words transposed",
    "adjacent_words": "adjacent words transposed",
    "tokens": "tokens transposed",
    "adjacent_tokens": "adjacent tokens transposed",
    "sentences": "sentences transposed",
    "letters": "words with letters transposed",
    "position_jitter": "positions jittered",
    "position_swap": "positions swapped",
    "position_shuffle": "positions shuffled",
    "position_gaps": "gaps between positions",
    "position_shift": "positions shifted",
    "features": "hidden states swapped",
}
"""What each kind disturbs, most important first."""


def labels(kind: str, layers: tuple[int, ...]) -> dict[str, int | None]:
    """Names under which a kind's numbers are stored, with the layer of each where it is about one."""
    return {f"{kind}_{layer}": layer for layer in layers} if kind == "features" else {kind: None}


def percent(rate: float) -> str:
    """A rate as it stands in names of metrics: 5 for 0.05."""
    return f"{100 * rate:.6g}"


@dataclass(frozen=True)
class PerturbConfig:
    """Options of the perturbation experiment."""

    kinds: tuple[str, ...] = option((), f"of {', '.join(KINDS)}; all that the model and the text allow if empty")
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to disturb, 0 to 1")
    seeds: int = option(3, "draws per rate, averaged")
    seed: int = option(0, "seed of the first draw")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose entering hidden states are swapped")
    reach: int = option(8, "farthest that jitter moves a position")
    gap: int = option(1, "positions left out at a gap")
    at: float = option(0.05, "rate at which axes, heads and the equivalence of positions and features are looked at")
    axes: bool = option(True, "also fit the three axes under each kind, and measure how sensitive heads are")
    equivalence: bool = option(True, "also compare swapped positions with swapped features")
    queries: int = option(16, "last tokens at which the sensitivity of heads is taken")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"there is no kind of perturbation '{kind}': {nearest(kind, KINDS)}")
        for name in ("kinds", "rates", "layers"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}={','.join(map(str, values))}: each value can be given only once")
        if not self.rates:
            raise ConfigError("rates is empty: give one or more shares from 0 to 1")
        for rate in (*self.rates, self.at):
            if not 0 <= rate <= 1:
                raise ConfigError(f"rate {rate:g} is outside 0 to 1: a rate is the share of units that are disturbed")
        for name in ("seeds", "reach", "gap", "queries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        check_seed(self.seed)
        if not self.layers or min(self.layers) < 0:
            raise ConfigError(f"layers={','.join(map(str, self.layers))}: give one or more layers, 0 the first")


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


class PerturbMeasurement(TextMeasurement):
    """``wherewhat perturb``."""

    name = "perturb"
    group = "Behaviour"
    revision = 2
    summary = "What the loss and the heads make of transposed words, disturbed positions and swapped features."
    config = PerturbConfig
    figure = "rates"
    metrics = METRICS
    limits = (
        "All targets count disturbed text too, which is harder to predict for anybody; untouched targets show what the "
        "model itself loses. A rate is a share of units, to the nearest swap: 1 % of a short text may be none. "
        "Swapping two equal tokens counts as a swap. Features swapped at a layer are scored on the untouched text. "
        "Axes of disturbed positions are still by order in the text. Correlations over heads say nothing about causes."
    )

    def measure(self, subject: Subject, text: Text, config: PerturbConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.perturb.losses import measure_perturb

        return measure_perturb(subject, text, config)

    def more_metrics(self, config: PerturbConfig) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config."""
        return more_metrics(config)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun:
        """Return how a report runs it: two kinds of perturbation, once each."""
        options = {
            "kinds": ("words", "position_jitter"),
            "rates": (0.01, 0.05, 0.1, 0.2, 0.5),
            "seeds": 1,
            "axes": False,
            "equivalence": False,
        }
        return ReportRun(20.0, documents=3, tokens=256, options=options)
