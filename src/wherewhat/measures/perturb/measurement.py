"""Declaration of ``wherewhat perturb``: loss under word-order, position and feature perturbation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wherewhat.boundary import MOST_LAYERS, MOST_REPEATS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import ReportRun, Subject, Text, TextMeasurement, check_minimum
from wherewhat.options import check_seed, nearest, option
from wherewhat.scores import CORRELATION, NON_NEGATIVE, SHARE, Metric, Scores, loss_metric, stored_metric

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
"""Title of each kind of perturbation, most important first."""


class Perturbation(NamedTuple):
    """A kind of perturbation under which numbers are stored; of each layer where hidden states are swapped.

    Attributes:
        kind: The kind.
        label: Its name in metrics.
        title: Its title.
        layer: The layer, if it is of one layer.
    """

    kind: str
    label: str
    title: str
    layer: int | None


def perturbations(kinds: Sequence[str], layers: Sequence[int]) -> Iterator[Perturbation]:
    """Yield the perturbations of some kinds."""
    for kind in kinds:
        if kind == "features":
            for layer in layers:
                yield Perturbation(kind, f"{kind}_{layer}", f"{KINDS[kind]}, layer {layer}", layer)
        else:
            yield Perturbation(kind, kind, KINDS[kind], None)


def percent(rate: float) -> str:
    """Return a rate as it is written in names of metrics: 5 for 0.05."""
    return f"{100 * rate:.6g}"


_MOST_STEP = 1 << 20
"""Largest change of a position."""


@dataclass(frozen=True)
class PerturbConfig:
    """Options of the perturb measurement."""

    kinds: tuple[str, ...] = option((), f"of {', '.join(KINDS)}; all that the model and the text allow if empty")
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to perturb, 0 to 1")
    seeds: int = option(3, "draws per rate, averaged")
    seed: int = option(0, "seed of the first draw")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose input hidden states are swapped")
    reach: int = option(8, "largest change of a position by jitter")
    gap: int = option(1, "positions left out at a gap")
    at: float = option(0.05, "rate at which axes, heads and the equivalence of positions and features are measured")
    axes: bool = option(True, "also fit the three axes under each kind, and measure the sensitivity of heads")
    equivalence: bool = option(True, "also compare swapped positions with swapped features")
    queries: int = option(16, "number of last tokens at which the sensitivity of heads is measured")

    def __post_init__(self) -> None:
        """Check the values."""
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
                raise ConfigError(f"rate {rate:g} is outside 0 to 1: a rate is the share of units that are perturbed")
        check_minimum(self, 1, "seeds", most=MOST_REPEATS)
        check_minimum(self, 1, "reach", "gap", most=_MOST_STEP)
        check_minimum(self, 1, "queries")
        check_at_most(MOST_LAYERS, layers=self.layers)
        check_seed(self.seed)
        if not self.layers or min(self.layers) < 0:
            raise ConfigError(f"layers={','.join(map(str, self.layers))}: give one or more layers, 0 the first")


class PerturbMeasurement(TextMeasurement):
    """``wherewhat perturb``."""

    name = "perturb"
    group = "Behaviour"
    revision = 2
    summary = "Loss under word-order, position and feature perturbation."
    config = PerturbConfig
    figure = "rates"
    report = ReportRun(
        20.0,
        documents=3,
        tokens=256,
        options={
            "kinds": ("words", "position_jitter"),
            "rates": (0.01, 0.05, 0.1, 0.2, 0.5),
            "seeds": 1,
            "axes": False,
            "equivalence": False,
        },
    )
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

    def more_metrics(self, config: PerturbConfig) -> tuple[Metric, ...]:
        """Return the metrics of every kind and rate."""
        found: list[Metric] = []
        kinds = list(perturbations(config.kinds or tuple(KINDS), config.layers))
        for _, label, title, _ in kinds:
            for rate in sorted(config.rates):
                if rate > 0:
                    name, what = f"rise_{label}_at_{percent(rate)}", f"{title}, {percent(rate)} %"
                    found.append(Metric(name, what, f"Rise of the loss: {what}.", unit="nats"))
        for _, label, title, _ in kinds if config.axes else []:
            found += _head_metrics(label, title, percent(config.at))
        return tuple(found)


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
