"""A question with alternatives in tokens, and how a model answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measure.base import Subject, Text
from wherewhat.measure.perturb.change import Change, nothing
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.perturb.making import make_change


class Continuing(Subject, Protocol):
    """A model that also says how likely a text goes on in given ways."""

    def continued(
        self,
        ids: Tensor,
        continuations: Sequence[Sequence[int]],
        *,
        positions: Tensor | None = None,
        orders: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each continuation of ``ids`` ``(1, n)``, float64, and whether the model would say it.

        Positions are those of text and longest continuation but its last token; orders those of the text.
        """


@dataclass(frozen=True)
class Choices:
    """A text and the continuations to choose from.

    Attributes:
        context: The text in tokens, with where its words and sentences are.
        continuations: Token ids of each alternative.
        lengths: Characters of each alternative, without the space in front.
        gold: Which of them is right.
        blank: Tokens that stand for no context: what the model puts in front of a text, else BOS or EOS; may be empty.
        seed: Number of the item, by which its draws differ from those of others.
    """

    context: Text
    continuations: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    gold: int
    blank: tuple[int, ...]
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the longest alternative."""
        return max(map(len, self.continuations))


@dataclass(frozen=True)
class Answer:
    """How a model answers.

    Attributes:
        logprobs: Log-probability of each alternative, the sum over its tokens, ``(choices,)`` float64 in nats.
        chosen: The alternative with the largest.
        right: Whether that is the right one.
        right_by_character: The same of log-probability divided by number of characters.
        probability: Probability of the right alternative if one of them is certain to follow.
        margin: Its log-probability less that of the best wrong one.
    """

    logprobs: Tensor
    chosen: int
    right: bool
    right_by_character: bool
    probability: float
    margin: float


def judged(logprobs: Tensor, item: Choices) -> Answer:
    """What log-probabilities ``(choices,)`` say.

    ``right`` and ``right_by_character`` are ``acc`` and ``acc_norm`` of lm-evaluation-harness; the first of equal ones
    is chosen.

    Raises:
        MeasureError: If a log-probability is not a number.
    """
    if bool(logprobs.isnan().any()):
        raise MeasureError(f"the model gives {logprobs.tolist()} as log-probabilities: try another dtype")
    chosen = _first_largest(logprobs)
    by_character = logprobs / torch.tensor(item.lengths, dtype=torch.float64)
    wrong = torch.cat([logprobs[: item.gold], logprobs[item.gold + 1 :]])
    return Answer(
        logprobs=logprobs,
        chosen=chosen,
        right=chosen == item.gold,
        right_by_character=_first_largest(by_character) == item.gold,
        probability=float(logprobs.softmax(0)[item.gold]),
        margin=float(logprobs[item.gold] - wrong.max()),
    )


def answer(subject: Continuing, item: Choices, change: Change, *, kind: str = "") -> Answer:
    """Ask with a disturbed context; the alternatives are never disturbed.

    Args:
        subject: The model.
        item: The question.
        change: Its context, disturbed or not.
        kind: What was disturbed.
    """
    positions = with_behind(change.positions, item.longest - 1, kind=kind)
    logprobs, _ = subject.continued(change.ids[None], item.continuations, positions=positions, orders=change.orders)
    return judged(logprobs, item)


def disturbed(text: Text, kind: str, rate: float, seed: int, config: PerturbConfig, *, layer: int | None) -> Change:
    """The text disturbed; as it is where it has no two units to exchange, as at any rate that makes up none.

    Raises:
        MeasureError: If words or sentences are asked for and the tokenizer does not tell where they are.
    """
    try:
        return make_change(text, kind, rate, seed, config, layer=layer)
    except MeasureError:
        if text.words is None:
            raise
        return nothing(text.ids[0].cpu())


def with_behind(positions: Tensor | None, count: int, *, kind: str) -> Tensor | None:
    """Positions ``(n,)`` of a disturbed context and those of ``count`` tokens behind it, ``(n + count,)``.

    They stand at n, n+1, …, and behind the last token where the kind moves all that follows (gaps, shift).
    """
    if positions is None:
        return None
    slides = kind in ("position_gaps", "position_shift")
    start = int(positions[-1]) + 1 if slides else len(positions)
    return torch.cat([positions, start + torch.arange(count)])


def _first_largest(values: Tensor) -> int:
    # Which of equal values torch's argmax takes is not fixed.
    return int((values == values.max()).nonzero()[0])
