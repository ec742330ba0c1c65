"""``wherewhat prompts``: accuracy on prompts with a known answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measures.measurement import Curve, DocumentScores, Question, Subject
from wherewhat.measures.prompts.measurement import _THIRDS, PromptsConfig
from wherewhat.measures.statistics import share_bounds


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


def measure_question(subject: Subject, question: Question, config: PromptsConfig) -> DocumentScores:
    """Return whether the model answers a question, and with which log-probability."""
    del config
    found = answer(subject, question)
    chance = 1 / len(question.candidates)
    kind = question.kind
    whole = {"accuracy": float(found.correct), "chance": chance, "said": float(found.said)}
    whole |= {"answer_logprob": found.logprob, "answer_margin": found.margin}
    whole |= {"answer_place": question.place, "answer_among": float(question.size)}
    for name in (kind, f"{kind}_{question.size}"):
        whole |= {f"accuracy_{name}": float(found.correct), f"chance_{name}": chance}
    return DocumentScores([], whole)


def _third(place: float) -> int:
    """Which third of a list a place from 0 to 1 is in; what lies on a border is in the middle, from either end."""
    return 0 if 3 * place < 1 else 2 if 3 * place > 2 else 1


def combine_prompts(documents: Sequence[DocumentScores], config: PromptsConfig) -> DocumentScores:
    """Accuracy of each kind by size and third of the answer's place, NaN where there is no prompt."""
    right = [document.whole["accuracy"] for document in documents]
    whole = {"accuracy_together": sum(right) / len(right)}
    curves = {}
    for kind in config.kinds:
        sums = torch.zeros(3, len(config.sizes), len(_THIRDS), dtype=torch.float64)  # prompts, right ones, their chance
        for document in documents:
            found = document.whole
            for row, size in enumerate(config.sizes):
                if f"accuracy_{kind}_{size}" in found:
                    one = [1.0, found["accuracy"], found["chance"]]
                    sums[:, row, _third(found["answer_place"])] += torch.tensor(one, dtype=torch.float64)
        counts = sums[0]
        curves[f"accuracy_{kind}"] = Curve((sums[1] / counts).float(), ("size", "third of the list"))
        whole |= _by_third(kind, counts, sums[1] / counts, sums[2] / counts)
    return DocumentScores([], whole, curves)


def _by_third(kind: str, counts: Tensor, accuracy: Tensor, chance: Tensor) -> dict[str, float]:
    """Accuracy of each third with its interval, from tables ``(sizes, thirds)``.

    A third of a short list holds another share of the places than one of a long list, so each size counts alike, and
    only sizes that have prompts in all thirds do: what depends on the size alone is then the same in each third.
    """
    whole = (counts > 0).all(1)
    found: dict[str, float] = {}
    if bool(whole.any()):
        for column, third in enumerate(_THIRDS):
            share = float(accuracy[whole, column].mean())
            # Prompts of equal weight that give as exact a mean.
            worth = float(whole.sum() ** 2 / (1 / counts[whole, column]).sum())
            low, high = share_bounds(share, worth)
            name = f"accuracy_{kind}_{third}"
            found |= {name: share, f"{name}_low": low, f"{name}_high": high}
            found[f"chance_{kind}_{third}"] = float(chance[whole, column].mean())
    return found
