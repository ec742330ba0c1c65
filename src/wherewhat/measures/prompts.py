"""``wherewhat prompts``: accuracy on prompts with a known answer, by kind, size and position of the answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherewhat.boundary import MOST_REPEATS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import PromptSet, Question, QuestionMeasurement, Subject, check_minimum
from wherewhat.measures.statistics import share_bounds
from wherewhat.options import option
from wherewhat.scores import NON_NEGATIVE, SHARE, Column, Metric, Scores, stored_metric

if TYPE_CHECKING:
    from torch import Tensor

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
    stored = (
        stored_metric("accuracy_together", range=SHARE),
        stored_metric("answer_among", range=NON_NEGATIVE),
        stored_metric("answer_place", range=SHARE),
    )
    limits = (
        "Synthetic prompts in one wording: another wording, or more solved examples, may give other numbers. Intervals "
        "are over prompts. Thirds of the list are means over sizes with equal weights; of 4 places one is in the "
        "first, two in the middle and one in the last. A small model's failure says nothing about the mechanism; "
        "heads --prompts measures attention on the same prompts."
    )

    def measure(self, subject: Subject, question: Question, config: PromptsConfig) -> Scores:
        """Return the accuracy and log-probability of the answer to one question."""
        answer = answer_prompt(subject, question)
        chance = 1 / len(question.candidates)
        kind = question.kind
        whole = {"accuracy": float(answer.correct), "chance": chance, "said": float(answer.said)}
        whole |= {"answer_logprob": answer.logprob, "answer_margin": answer.margin}
        whole |= {"answer_place": question.place, "answer_among": float(question.size)}
        for name in (kind, f"{kind}_{question.size}"):
            whole |= {f"accuracy_{name}": float(answer.correct), f"chance_{name}": chance}
        return Scores(whole=whole)

    def combine(self, documents: Sequence[Scores], config: PromptsConfig) -> Scores:
        """Return the accuracy of each kind by size and third of the list, NaN where there are no prompts."""
        import torch

        whole = {"accuracy_together": sum(document.whole["accuracy"] for document in documents) / len(documents)}
        curves = {}
        for kind in config.kinds:
            # Prompts, right ones, and the sum of their chance.
            counts, right, chance = torch.zeros(3, len(config.sizes), len(THIRDS), dtype=torch.float64)
            for scores in (document.whole for document in documents):
                for row, size in enumerate(config.sizes):
                    if f"accuracy_{kind}_{size}" in scores:
                        cell = row, _third(scores["answer_place"])
                        counts[cell] += 1
                        right[cell] += scores["accuracy"]
                        chance[cell] += scores["chance"]
            curves[f"accuracy_{kind}"] = Column((right / counts).float(), ("size", "third of the list"))
            whole |= _by_third(kind, counts, right / counts, chance / counts)
        return Scores(whole=whole, curves=curves)

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


@dataclass(frozen=True)
class PromptAnswer:
    """A model's answer to one question.

    Attributes:
        chosen: The candidate with the largest log-probability.
        correct: Whether that is the right one.
        logprob: Log-probability of the right answer's tokens, in nats.
        margin: The same minus that of the best wrong candidate.
        said: Whether the most likely next token, of the whole vocabulary, begins the right answer.
    """

    chosen: int
    correct: bool
    logprob: float
    margin: float
    said: bool


def answer_prompt(subject: Subject, question: Question) -> PromptAnswer:
    """Return the candidate whose tokens have the largest log-probability.

    Takes one pass if candidates are single tokens, and one more for each different prefix of longer ones.
    """
    import torch

    @functools.cache
    def next_token(prefix: tuple[int, ...]) -> Tensor:
        """Return log-probabilities ``(vocabulary,)`` of the token after the prompt and the prefix of an answer."""
        ids = torch.cat([question.ids, torch.tensor([prefix], dtype=torch.int64).view(1, -1)], 1)
        logits = subject.run(ids, lambda _: None, logits=True)
        assert logits is not None
        return logits[0, -1].float().log_softmax(-1).cpu()

    scores = torch.tensor(
        [
            sum(float(next_token(candidate[:place])[token]) for place, token in enumerate(candidate))
            for candidate in question.candidates
        ],
        dtype=torch.float64,
    )
    right = question.correct
    wrong = torch.cat([scores[:right], scores[right + 1 :]])
    chosen = int(scores.argmax())
    return PromptAnswer(
        chosen=chosen,
        correct=chosen == right,
        logprob=float(scores[right]),
        margin=float(scores[right] - wrong.max()) if len(wrong) else 0.0,
        said=int(next_token(()).argmax()) == question.candidates[right][0],
    )


def _third(place: float) -> int:
    """Return the third of a list that a place from 0 to 1 is in; borders belong to the middle."""
    return 0 if 3 * place < 1 else 2 if 3 * place > 2 else 1


def _by_third(kind: str, counts: Tensor, accuracy: Tensor, chance: Tensor) -> dict[str, float]:
    """Return the accuracy of each third with its interval, from tables ``(sizes, thirds)``.

    Short and long lists have different shares of places in a third, so sizes have equal weights, and only sizes with
    prompts in all thirds are used: effects of the size alone are then the same in each third.
    """
    whole = (counts > 0).all(1)
    scores: dict[str, float] = {}
    if bool(whole.any()):
        for column, third in enumerate(THIRDS):
            share = float(accuracy[whole, column].mean())
            # Number of prompts of equal weight whose mean has the same variance.
            effective = float(whole.sum() ** 2 / (1 / counts[whole, column]).sum())
            low, high = share_bounds(share, effective)
            name = f"accuracy_{kind}_{third}"
            scores |= {name: share, f"{name}_low": low, f"{name}_high": high}
            scores[f"chance_{kind}_{third}"] = float(chance[whole, column].mean())
    return scores
