"""Declaration of ``wherewhat prompts``: accuracy on prompts with a known answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.boundary import MOST_REPEATS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import (
    SHARE,
    DocumentScores,
    Metric,
    PromptSet,
    Question,
    QuestionMeasurement,
    Subject,
    check_minimum,
)
from wherewhat.options import option

_SIZE = {"binding": "pairs", "numbers": "length", "letters": "pairs"}
"""Kinds of prompts with a question, and the option for the number of alternatives."""

THIRDS = ("first", "middle", "last")
"""Thirds of a list of alternatives."""


@dataclass(frozen=True)
class PromptsConfig:
    """Options of the prompts measurement."""

    kinds: tuple[str, ...] = option(
        tuple(_SIZE), "binding (who likes what), numbers (which place), letters (which pair)"
    )
    sizes: tuple[int, ...] = option((4, 8, 16, 32), "numbers of alternatives: pairs, or symbols of a list")
    count: int = option(12, "prompts of each kind and size; positions of answers are equally frequent")

    def __post_init__(self) -> None:
        """Check the values."""
        for kind in self.kinds:
            if kind not in _SIZE:
                raise ConfigError(f"there are no questions of the kind '{kind}': known: {', '.join(_SIZE)}")
        if not self.kinds or not self.sizes or min(self.sizes) < 2:
            raise ConfigError(f"kinds={self.kinds} and sizes={self.sizes}: give one or more, sizes from 2 on")
        if len(set(self.kinds)) < len(self.kinds) or len(set(self.sizes)) < len(self.sizes):
            raise ConfigError(f"kinds={self.kinds} and sizes={self.sizes}: give each once")
        check_minimum(self, 1, "count", most=MOST_REPEATS)
        check_at_most(MOST_REPEATS, sizes=self.sizes)


def _kind_metrics(kind: str, sizes: Sequence[int]) -> list[Metric]:
    """Return the accuracy of one kind of prompts: of all, by size, and by third of the list."""
    unit = "symbols" if kind == "numbers" else "pairs"
    groups = [("", kind), *((f"_{size}", f"{kind}, {size} {unit}") for size in sizes)]
    return [
        Metric(
            f"accuracy_{kind}{suffix}",
            title,
            "Share of prompts with the right answer among the candidates.",
            control=f"chance_{kind}{suffix}",
            control_title="chance",
            proportion=True,
        )
        for suffix, title in groups
    ] + [
        Metric(
            name := f"accuracy_{kind}_{third}",
            f"{kind}, answer in the {third} third",
            "Accuracy, averaged with equal weights over sizes with prompts in all thirds, so that thirds do not differ "
            "by size.",
            control=f"chance_{kind}_{third}",
            control_title="chance",
            bounds=(f"{name}_low", f"{name}_high"),
            range=SHARE,
        )
        for third in THIRDS
    ]


class PromptsMeasurement(QuestionMeasurement):
    """``wherewhat prompts``."""

    name = "prompts"
    group = "Behaviour"
    revision = 2
    summary = "Accuracy on prompts with a known answer, by kind, length and position of the answer."
    config = PromptsConfig
    metrics = (
        Metric(
            "accuracy",
            "right answers",
            "Share of prompts whose right answer is the most likely of the candidates.",
            control="chance",
            control_title="chance",
            proportion=True,
        ),
        Metric(
            "said",
            "right as next token",
            "Share of prompts whose most likely next token, of the whole vocabulary, begins the right answer.",
            proportion=True,
        ),
        Metric("answer_logprob", "log-probability", "Mean log-probability of the right answer.", unit="nats"),
        Metric("answer_margin", "margin", "The same minus that of the best wrong candidate.", unit="nats"),
    )
    limits = (
        "Synthetic prompts in one wording: another wording, or more solved examples, may give other numbers. Intervals "
        "are over prompts. Thirds of the list are means over sizes with equal weights; of 4 places one is in the "
        "first, two in the middle and one in the last. A small model's failure says nothing about the mechanism; "
        "heads --prompts measures attention on the same prompts."
    )

    def measure(self, subject: Subject, question: Question, config: PromptsConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.prompts.answers import measure_question

        return measure_question(subject, question)

    def combine(self, documents: Sequence[DocumentScores], config: PromptsConfig) -> DocumentScores:
        """Return scores of all documents together."""
        from wherewhat.measures.prompts.answers import combine_prompts

        return combine_prompts(documents, config)

    def more_metrics(self, config: PromptsConfig) -> tuple[Metric, ...]:
        """Return the metrics of every kind of prompts."""
        return tuple(metric for kind in config.kinds for metric in _kind_metrics(kind, config.sizes))

    def prompts(self, config: PromptsConfig) -> Sequence[PromptSet]:
        """Return the prompts to generate: each kind in each size."""
        return [
            PromptSet(f"{kind}-{size}", kind, config.count, {_SIZE[kind]: size})
            for kind in config.kinds
            for size in config.sizes
        ]
