"""What a model answers: its log-probability of every candidate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measure.base import Question, Subject


@dataclass(frozen=True)
class Answer:
    """A model's answer to one question.

    Attributes:
        chosen: The candidate with the largest log-probability.
        correct: Whether that is the right one.
        logprob: Log-probability of the right answer's tokens, in nats.
        margin: The same less that of the best wrong candidate.
        said: Whether the single most likely next token, of the whole vocabulary, begins the right answer.
    """

    chosen: int
    correct: bool
    logprob: float
    margin: float
    said: bool


def answer(subject: Subject, question: Question) -> Answer:
    """Ask, and compare all candidates by the log-probability of all their tokens.

    One pass where candidates are single tokens, one more for each different beginning of longer ones.
    """
    after: dict[tuple[int, ...], Tensor] = {}

    def next_token(begun: tuple[int, ...]) -> Tensor:
        """Log-probabilities ``(vocabulary,)`` of what follows the text and the beginning of an answer."""
        if begun not in after:
            ids = torch.cat([question.ids, torch.tensor([begun], dtype=torch.int64).view(1, -1)], 1)
            logits = subject.run(ids, lambda _: None, logits=True)
            assert logits is not None
            after[begun] = logits[0, -1].float().log_softmax(-1).cpu()
        return after[begun]

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
    return Answer(
        chosen=chosen,
        correct=chosen == right,
        logprob=float(scores[right]),
        margin=float(scores[right] - wrong.max()) if len(wrong) else 0.0,
        said=int(next_token(()).argmax()) == question.candidates[right][0],
    )
