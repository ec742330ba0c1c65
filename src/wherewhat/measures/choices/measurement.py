"""``wherewhat choices``: accuracy on questions with alternatives, intact and perturbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from wherewhat.measures.measurement import ChoicesMeasurement, DocumentScores, Metric, Subject
from wherewhat.measures.perturb.measurement import KINDS, PerturbConfig, labels, percent
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.measures.choices.answers import Choices


@dataclass(frozen=True)
class ChoicesConfig:
    """Options of the measurement of choices; those of perturbations are as for ``perturb``."""

    kinds: tuple[str, ...] = option(
        ("words",), f"what to disturb in the context, of {', '.join(KINDS)}; empty for none"
    )
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to disturb, 0 to 1")
    seed: int = option(0, "seed of the draws; every item has draws of its own")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose entering hidden states are swapped")
    reach: int = option(8, "farthest that jitter moves a position")
    gap: int = option(1, "positions left out at a gap")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        self.perturbing()

    def perturbing(self) -> PerturbConfig:
        """The same as options of perturbations."""
        return PerturbConfig(
            kinds=self.kinds, rates=self.rates, seed=self.seed, layers=self.layers, reach=self.reach, gap=self.gap
        )


METRICS = (
    Metric(
        "accuracy",
        "right",
        "",
        "Share of items whose right alternative has the largest log-probability (acc of lm-evaluation-harness).",
        "chance",
        "chance",
        proportion=True,
    ),
    Metric(
        "accuracy_norm",
        "right, by character",
        "",
        "The same of log-probability divided by number of characters (acc_norm).",
        "chance",
        "chance",
        proportion=True,
    ),
    Metric(
        "accuracy_blank",
        "right without context",
        "",
        "Right answers where the alternatives alone are compared; what stays is not read from the context.",
        "chance",
        "chance",
        proportion=True,
    ),
    Metric(
        "accuracy_norm_blank",
        "the same by character",
        "",
        "The same of log-probability divided by number of characters.",
        "chance",
        "chance",
        proportion=True,
    ),
    Metric(
        "accuracy_one_place", "always one place", "", "Right answers of choosing the same place always, the best one."
    ),
    Metric(
        "probability",
        "probability of right",
        "",
        "Probability of the right alternative if one of them is certain to follow.",
        "chance",
        "chance",
    ),
    Metric("margin", "margin", "nats", "Log-probability of the right alternative less that of the best wrong one."),
)

LIMITS = (
    "One wording of each question and one draw per item and rate. A rate is a share of units to the nearest swap: of a "
    "short question 1 % is none, and 5 % may be one swap, so read the share of tokens moved beside it. Where right "
    "answers without context are as many, or the same place always does as well, staying the same shows nothing. "
    "Intervals are over items: Wilson's for shares, paired ones (Bonett & Price) for changes."
)


def more_metrics(config: ChoicesConfig) -> tuple[Metric, ...]:
    """Words for what depends on kinds and rates."""
    found: list[Metric] = []
    for kind in config.kinds:
        for label, layer in labels(kind, config.layers).items():
            where = KINDS[kind] if layer is None else f"{KINDS[kind]}, layer {layer}"
            for rate in sorted(config.rates):
                if rate > 0:
                    found += _at(f"{label}_at_{percent(rate)}", f"{where}, {percent(rate)} %")
    return tuple(found)


def _at(name: str, what: str) -> list[Metric]:
    return [
        Metric(
            f"accuracy_{name}", what, "", f"Right answers: {what}.", "accuracy", "untouched context", proportion=True
        ),
        _change(f"change_{name}", what),
        Metric(
            f"accuracy_norm_{name}",
            "— by character",
            "",
            f"Right answers by character: {what}.",
            "accuracy_norm",
            "untouched context",
            proportion=True,
        ),
        _change(f"change_norm_{name}", what),
        Metric(f"probability_change_{name}", "— probability", "", f"Change of the right one's probability: {what}."),
        Metric(
            f"flipped_{name}",
            "— other answers",
            "",
            f"Share of items where another alternative is chosen, right or wrong: {what}.",
            proportion=True,
        ),
        Metric(f"moved_{name}", "— tokens moved", "", f"Share of the context's tokens that were moved: {what}."),
    ]


def _change(name: str, what: str) -> Metric:
    reading = f"The same less the untouched: {what}."
    return Metric(name, "— its change", "", reading, bounds=(f"{name}_low", f"{name}_high"))


class ItemChoices(ChoicesMeasurement):
    """``wherewhat choices``."""

    name = "choices"
    group = "Behaviour"
    page = "evaluate"
    revision = 2
    summary = "Whether the model chooses the right alternative, and still does with a disturbed question."
    config = ChoicesConfig
    metrics = METRICS
    limits = LIMITS

    def measure(self, subject: Subject, choices: Choices, config: ChoicesConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.choices.answers import Continuing, measure_choices

        return measure_choices(cast(Continuing, subject), choices, config)

    def combine(self, documents: Sequence[DocumentScores], config: ChoicesConfig) -> DocumentScores:
        """Return scores of all documents together."""
        from wherewhat.measures.choices.answers import combine_items

        return combine_items(documents, config)

    def more_metrics(self, config: ChoicesConfig) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config."""
        return more_metrics(config)
