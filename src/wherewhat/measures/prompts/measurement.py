"""``wherewhat prompts``: accuracy on prompts with a known answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import DocumentScores, Metric, PromptSet, Question, QuestionMeasurement, Subject
from wherewhat.options import option

_SIZE = {"binding": "pairs", "numbers": "length", "letters": "pairs"}
"""Kinds with a question, and the option that says how many alternatives there are."""

_THIRDS = ("first", "middle", "last")


@dataclass(frozen=True)
class PromptsConfig:
    """Options of the prompts measurement."""

    kinds: tuple[str, ...] = option(
        tuple(_SIZE), "binding (who likes what), numbers (which place), letters (which pair)"
    )
    sizes: tuple[int, ...] = option((4, 8, 16, 32), "numbers of alternatives: pairs, or symbols of a list")
    count: int = option(12, "prompts of each kind and size; answers stand in every place equally often")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for kind in self.kinds:
            if kind not in _SIZE:
                raise ConfigError(f"there are no questions of the kind '{kind}': known: {', '.join(_SIZE)}")
        if not self.kinds or not self.sizes or min(self.sizes) < 2:
            raise ConfigError(f"kinds={self.kinds} and sizes={self.sizes}: give one or more, sizes from 2 on")
        if len(set(self.kinds)) < len(self.kinds) or len(set(self.sizes)) < len(self.sizes):
            raise ConfigError(f"kinds={self.kinds} and sizes={self.sizes}: give each once")
        if self.count < 1:
            raise ConfigError(f"count is {self.count}: at least 1 prompt is needed")


def _sets(config: PromptsConfig) -> Sequence[PromptSet]:
    return [
        PromptSet(f"{kind}-{size}", kind, config.count, {_SIZE[kind]: size})
        for kind in config.kinds
        for size in config.sizes
    ]


def _metrics(config: PromptsConfig) -> tuple[Metric, ...]:
    words = []
    for kind in config.kinds:
        what = "symbols" if kind == "numbers" else "pairs"
        parts = [("", kind), *((f"_{size}", f"{kind}, {size} {what}") for size in config.sizes)]
        words += [
            Metric(
                f"accuracy_{kind}{suffix}",
                title,
                "",
                "Share of right answers among the candidates.",
                f"chance_{kind}{suffix}",
                "chance",
                proportion=True,
            )
            for suffix, title in parts
        ]
        words += [
            Metric(
                name := f"accuracy_{kind}_{third}",
                f"{kind}, answer in the {third} third",
                "",
                "Share of right answers, the mean over sizes with prompts in all thirds: each counts alike, so that "
                "thirds do not differ by size.",
                f"chance_{kind}_{third}",
                "chance",
                bounds=(f"{name}_low", f"{name}_high"),
            )
            for third in _THIRDS
        ]
    return tuple(words)


class PromptsMeasurement(QuestionMeasurement):
    """``wherewhat prompts``."""

    name = "prompts"
    group = "Behaviour"
    revision = 2
    summary = "Whether the model finds what a prompt asks for, by kind of question, length and place of the answer."
    config = PromptsConfig
    metrics = (
        Metric(
            "accuracy",
            "right answers",
            "",
            "Share of prompts where the right answer is the most likely of the candidates.",
            "chance",
            "chance",
            proportion=True,
        ),
        Metric(
            "said",
            "said unprompted",
            "",
            "Share where the likeliest token of all begins the right answer.",
            proportion=True,
        ),
        Metric("answer_logprob", "log-probability", "nats", "Mean log-probability of the right answer."),
        Metric("answer_margin", "margin", "nats", "The same less that of the best wrong candidate."),
    )
    limits = (
        "Made-up prompts in one wording: another wording, or more solved examples, may give other numbers. Intervals "
        "are over prompts. Thirds of the list are means over sizes, each of which counts alike; of 4 places one is in "
        "the first, two in the middle and one in the last. A small model's failure says nothing of the mechanism; "
        "where its heads look on the same prompts is measured by heads --prompts."
    )

    def measure(self, subject: Subject, question: Question, config: PromptsConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.prompts.answers import measure_question

        return measure_question(subject, question, config)

    def combine(self, documents: Sequence[DocumentScores], config: PromptsConfig) -> DocumentScores:
        """Return scores of all documents together."""
        from wherewhat.measures.prompts.answers import combine_prompts

        return combine_prompts(documents, config)

    def more_metrics(self, config: PromptsConfig) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config."""
        return _metrics(config)

    def prompts(self, config: PromptsConfig) -> Sequence[PromptSet]:
        """Return the prompts to make."""
        return _sets(config)
