"""Declaration of ``wherewhat choices``: accuracy on questions with alternatives, intact and perturbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from wherewhat.measures.measurement import SHARE, ChoicesMeasurement, DocumentScores, Metric, Subject
from wherewhat.measures.perturb.measurement import KINDS, PerturbConfig, percent, titles
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.measures.choices.answers import Choices


@dataclass(frozen=True)
class ChoicesConfig:
    """Options of the choices measurement; those of perturbations are as for ``perturb``."""

    kinds: tuple[str, ...] = option(
        ("words",), f"what to perturb in the context, of {', '.join(KINDS)}; empty for nothing"
    )
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to perturb, 0 to 1")
    seed: int = option(0, "seed of the draws, which differ between items")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose input hidden states are swapped")
    reach: int = option(8, "largest change of a position by jitter")
    gap: int = option(1, "positions left out at a gap")

    def __post_init__(self) -> None:
        """Check the values."""
        self.perturbation()

    def perturbation(self) -> PerturbConfig:
        """Return the options of perturbations."""
        return PerturbConfig(
            kinds=self.kinds, rates=self.rates, seed=self.seed, layers=self.layers, reach=self.reach, gap=self.gap
        )


def _proportion(name: str, title: str, reading: str, control: str = "chance", control_title: str = "chance") -> Metric:
    return Metric(name, title, reading, control=control, control_title=control_title, proportion=True)


def _change(name: str, what: str) -> Metric:
    reading = f"Change from the intact context: {what}."
    return Metric(name, "— its change", reading, bounds=(f"{name}_low", f"{name}_high"))


def _metrics_at(name: str, what: str) -> list[Metric]:
    """Return the metrics of one perturbation at one rate."""
    intact = "intact context"
    return [
        _proportion(f"accuracy_{name}", what, f"Accuracy: {what}.", "accuracy", intact),
        _change(f"change_{name}", what),
        _proportion(
            f"accuracy_norm_{name}", "— by character", f"Accuracy by character: {what}.", "accuracy_norm", intact
        ),
        _change(f"change_norm_{name}", what),
        Metric(
            f"probability_change_{name}", "— probability", f"Change of the right alternative's probability: {what}."
        ),
        Metric(
            f"flipped_{name}",
            "— other answers",
            f"Share of items whose chosen alternative changes, right or wrong: {what}.",
            proportion=True,
        ),
        Metric(
            f"moved_{name}", "— tokens moved", f"Share of the context's tokens that were moved: {what}.", range=SHARE
        ),
    ]


class ItemChoices(ChoicesMeasurement):
    """``wherewhat choices``."""

    name = "choices"
    group = "Behaviour"
    page = "evaluate"
    revision = 2
    summary = "Accuracy on questions with alternatives, intact and perturbed."
    config = ChoicesConfig
    metrics = (
        _proportion(
            "accuracy",
            "right",
            "Share of items whose right alternative has the largest log-probability (acc of lm-evaluation-harness).",
        ),
        _proportion(
            "accuracy_norm",
            "right, by character",
            "The same with log-probabilities divided by the number of characters (acc_norm).",
        ),
        _proportion(
            "accuracy_blank",
            "right without context",
            "Accuracy without the context: the part that does not depend on it.",
        ),
        _proportion(
            "accuracy_norm_blank",
            "the same by character",
            "The same with log-probabilities divided by the number of characters.",
        ),
        Metric(
            "accuracy_one_place",
            "always one place",
            "Accuracy of always choosing the same place, for the best place.",
            range=SHARE,
        ),
        Metric(
            "probability",
            "probability of right",
            "Probability of the right alternative, normalised over the alternatives.",
            control="chance",
            control_title="chance",
            range=SHARE,
        ),
        Metric(
            "margin",
            "margin",
            "Log-probability of the right alternative minus that of the best wrong one.",
            unit="nats",
        ),
    )
    limits = (
        "One wording of each question and one draw per item and rate. A rate is a share of units, rounded to the "
        "nearest swap: 1 % of a short question is none, and 5 % may be one swap, so compare the share of tokens moved. "
        "If accuracy without context, or of always one place, is as high, unchanged accuracy shows nothing. Intervals "
        "are over items: Wilson's for shares, paired ones (Bonett & Price) for changes."
    )

    def measure(self, subject: Subject, choices: Choices, config: ChoicesConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.choices.answers import ContinuationSubject, measure_choices

        return measure_choices(cast(ContinuationSubject, subject), choices, config)

    def combine(self, documents: Sequence[DocumentScores], config: ChoicesConfig) -> DocumentScores:
        """Return scores of all documents together."""
        from wherewhat.measures.choices.answers import combine_items

        return combine_items(documents, config)

    def more_metrics(self, config: ChoicesConfig) -> tuple[Metric, ...]:
        """Return the metrics of every kind and rate."""
        found: list[Metric] = []
        for label, title in titles(config.kinds, config.layers):
            for rate in sorted(config.rates):
                if rate > 0:
                    found += _metrics_at(f"{label}_at_{percent(rate)}", f"{title}, {percent(rate)} %")
        return tuple(found)
