"""Probes of retrieval: planted sequences, a second copy of a text, facts asked for at its end, and remembered facts."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.numerics import constant_tensor

Encode = Callable[[str], Sequence[int]]
"""Function that returns the token ids of a text without those that a model expects in front of it."""

_NAMES = (
    *("Amber", "Basil", "Cedar", "Dahlia", "Ebony", "Fern", "Hazel", "Iris"),
    *("Jade", "Laurel", "Maple", "Olive", "Pearl", "Ruby", "Sage", "Violet"),
)
_KEYS = 4
"""Number of names with a code."""
_RELATIONS = (
    (
        "The capital of {} is",
        *("France Paris", "Germany Berlin", "Italy Rome", "Spain Madrid", "England London"),
        *("Russia Moscow", "Japan Tokyo", "China Beijing", "Egypt Cairo", "Greece Athens"),
    ),
    (
        "The people of {} speak",
        *("France French", "Germany German", "Italy Italian", "Spain Spanish", "England English"),
        *("Russia Russian", "Japan Japanese", "China Chinese", "Egypt Arabic", "Greece Greek"),
    ),
    (
        "The opposite of {} is",
        *("hot cold", "big small", "up down", "good bad", "black white"),
        *("happy sad", "fast slow", "old young", "left right", "day night"),
    ),
    (
        "The color of {} is",
        *("snow white", "grass green", "blood red", "coal black", "gold yellow"),
        *("chocolate brown", "oranges orange", "ashes gray", "lavender purple", "flamingos pink"),
    ),
    (
        "The month after {} is",
        *("January February", "February March", "March April", "April May", "May June"),
        *("June July", "July August", "August September", "September October", "October November"),
    ),
)
"""Questions and the pairs of subject and answer that they are asked about."""
_ASKED = 5
"""Number of subjects for each of these questions."""
_FIRST = 16
"""Number of first tokens without planted sequences or facts: sinks, and keys that some methods always keep."""


@dataclass(frozen=True)
class Planting:
    """A text whose last runs of tokens are also planted earlier in it.

    Attributes:
        control: Token ids ``(1, n)`` of the intact text.
        planted: Token ids ``(1, n)`` with each run copied to its depth.
        places: First token of each planted sequence, ``(depths,)``.
        run: Tokens of a run.
    """

    control: Tensor
    planted: Tensor
    places: Tensor
    run: int

    @property
    def cue(self) -> int:
        """Number of first tokens of a run that only announce the others and are not scored."""
        return max(1, self.run // 4)

    @property
    def body(self) -> int:
        """Number of tokens before the runs at the end."""
        return self.control.shape[1] - len(self.places) * self.run

    @property
    def needed(self) -> int:
        """Number of last tokens whose logits are used."""
        return len(self.places) * self.run + 1

    @property
    def distances(self) -> Tensor:
        """Distance in tokens of each run at the end from the planted one, ``(depths,)``."""
        return self.body + self.run * torch.arange(len(self.places)) - self.places


@dataclass(frozen=True)
class PlantedGain:
    """Gain from planted sequences, by depth.

    Attributes:
        gain: Mean log-probability of the runs' tokens after the cue, minus that without planting, nats, ``(depths,)``.
        exact: Share of them that are the most likely token, minus that without planting, ``(depths,)``.
    """

    gain: Tensor
    exact: Tensor


def _places(n: int, depths: tuple[int, ...], run: int) -> Tensor | None:
    """Return where runs are planted in a text of ``n`` tokens, ``(runs,)``; None if they do not fit."""
    count = len(depths)
    # The last planted sequence is one run's length before the end, so that it is not repeated immediately.
    last = n - count * run - 2 * run
    first = min(_FIRST, max(0, last - count * run))
    places = torch.tensor([first + round(depth / 100 * (last - first)) for depth in depths])
    apart = last >= first and not bool((places.sort().values.diff() < run).any())
    return places if apart else None


def plant(ids: Tensor, depths: tuple[int, ...], *, run: int) -> Planting:
    """Plant the last runs of a text ``(1, n)``, of ``run`` tokens each, one per depth.

    Depths are in percent of the text: 0 is its beginning, 100 just before its last runs.
    """
    n, count = ids.shape[1], len(depths)
    places = _places(n, depths, run)
    if places is None:
        gap = min((y - x for x, y in itertools.pairwise(sorted(depths))), default=100)
        enough = _FIRST + 100 * (run + 1) // max(1, gap) + (count + 2) * run + 1
        least = bisect.bisect_left(range(enough), True, key=lambda more: _places(more, depths, run) is not None)
        raise MeasureError(
            f"{n} tokens are too few for {count} planted sequences of {run} tokens: {least} are needed (in wherewhat "
            "extend, fewer with fewer depths or a shorter run)"
        )
    body = n - count * run
    planted = ids.clone()
    for index, place in enumerate(places.tolist()):
        start = body + index * run
        planted[:, place : place + run] = ids[:, start : start + run]
    return Planting(ids, planted, places, run)


def planted_gain(planting: Planting, planted: Tensor, control: Tensor) -> PlantedGain:
    """Return the gain at the end of the text, from logits ``(1, n, vocabulary)`` on the planted and the intact text.

    Logits of the last :attr:`Planting.needed` tokens are sufficient.
    """
    return PlantedGain(*(run_scores(planting, planted[0]) - run_scores(planting, control[0])).cpu())


def run_scores(planting: Planting, logits: Tensor) -> Tensor:
    """Return mean log-probability and share of most likely tokens of the runs at the end, ``(2, depths)`` float64.

    The logits are ``(n, vocabulary)``, or those of the last tokens.
    """
    predicting = logits[-planting.needed : -1].float()
    targets = planting.control[0, planting.body :].to(logits.device)
    logprob = predicting.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double()
    best = (predicting.argmax(-1) == targets).double()
    by_run: Tensor = torch.stack([logprob, best]).view(2, -1, planting.run)[..., planting.cue :].mean(-1)
    return by_run


def copy_attention(planting: Planting, attention: LayerAttention) -> Tensor:
    """Return the attention that reads planted sequences, ``(texts, heads, depths, tokens)`` float64.

    For each token of a run at the end that is scored, it is the weight from the token before it to its planted copy.
    Passes are over planted texts, which have the same places.
    """
    offsets = torch.arange(planting.cue, planting.run)
    rows = torch.arange(len(planting.places))[:, None] * planting.run + offsets - 1
    keys = planting.places[:, None] + offsets
    weights = attention.pattern(slice(planting.body, attention.n))
    row, key = (constant_tensor(tuple(x.flatten().tolist()), weights.device).view(x.shape) for x in (rows, keys))
    read: Tensor = weights[..., row, key].double()
    return read


@dataclass(frozen=True)
class SecondCopy:
    """A text that ends with a copy of its beginning.

    The copy begins with the second token, because the first is often an attention sink.

    Attributes:
        ids: Token ids ``(1, n)``.
        tokens: Tokens of the copy.
        skipped: First tokens of the copy that do not count, because they have little context when they are read first.
    """

    ids: Tensor
    tokens: int
    skipped: int

    @property
    def distance(self) -> int:
        """Distance of each token of the copy from its first occurrence, in tokens."""
        return self.ids.shape[1] - self.tokens - 1

    def difference(self, losses: Tensor, once: Tensor) -> float:
        """Return the mean loss of the copy's tokens minus that of the same tokens read once; negative if it is used.

        Losses, of this text and of the original one, are by the index they are predicted from, ``(n - 1,)`` each.
        """
        return float((losses[-self.tokens :] - once[: self.tokens])[self.skipped :].mean())


def second_copy(ids: Tensor, *, trained: int, distance: int = 0) -> SecondCopy:
    """Replace the end of a text ``(1, n)`` by a copy of its first half, or of less if ``distance`` requires it."""
    n = ids.shape[1]
    tokens = min((n - 1) // 2, n - 1 - distance)
    copied = torch.cat([ids[:, : n - tokens], ids[:, 1 : tokens + 1]], 1)
    return SecondCopy(copied, tokens, min(trained // 4, tokens // 2))


@dataclass(frozen=True)
class Questions:
    """A text in which a pass key and four codes are stated, with the questions and their answers at its end.

    Attributes:
        ids: Token ids ``(1, n)``.
        answers: First token of each answer and one past its last; that of the pass key is first.
        distance: Smallest distance in tokens of a statement from the questions.
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...]
    distance: int

    def scores(self, logits: Tensor) -> dict[str, float]:
        """Return scores of the answers from logits ``(1, n, vocabulary)``.

        ``passkey`` and ``keys`` are mean log-probabilities per token; ``answered`` is the share of all answers of which
        every token is the most likely one, as in greedy decoding.
        """
        return self.summary(self.answer_scores(logits[0]).cpu())

    def answer_scores(self, logits: Tensor) -> Tensor:
        """Return the log-probability per token of each answer, and 1 if all are the most likely, ``(2, answers)``.

        The logits are ``(n, vocabulary)``.
        """
        text = self.ids[0].to(logits.device)
        logprobs, exact = [], []
        for start, stop in self.answers:
            targets = text[start:stop]
            predicting = logits[start - 1 : stop - 1].float().log_softmax(-1)
            logprobs.append(predicting.gather(-1, targets[:, None]).double().mean())
            exact.append((predicting.argmax(-1) == targets).all().double())
        return torch.stack([torch.stack(logprobs), torch.stack(exact)])

    @staticmethod
    def summary(answers: Tensor) -> dict[str, float]:
        """Return the scores from those of each answer, ``(2, answers)``."""
        logprobs, exact = answers.tolist()
        return {
            "passkey": logprobs[0],
            "keys": sum(logprobs[1:]) / len(logprobs[1:]),
            "answered": sum(exact) / len(exact),
        }


def ask(ids: Tensor, encode: Encode, *, trained: int, stated: bool = True) -> Questions:
    """State facts in a text ``(1, n)`` and ask for them at its end; each replaces tokens of the text.

    Statements are spread evenly over the part of the text that is at least a trained length before the questions, or
    over the whole text if that part is too short. Values, names and the order of statements depend on the first trained
    length of the text, and are the same in longer and shorter texts. If facts are not ``stated``, the answers can only
    be guessed.
    """
    n = ids.shape[1]
    chooser = random.Random(_seed(ids[:, :trained]))  # noqa: S311 - reproducible, not secret
    facts = [("The pass key is", str(chooser.randrange(10_000, 100_000)))]
    for name in chooser.sample(_NAMES, _KEYS):
        facts.append((f"The code of {name} is", str(chooser.randrange(1_000, 10_000))))
    order = chooser.sample(range(len(facts)), len(facts))
    asked, answers = _asked(facts, encode)
    body = n - len(asked)
    ends = (". Remember it.\n", *[".\n"] * _KEYS)
    statements = [list(encode(f"\n{start} {value}{end}")) for (start, value), end in zip(facts, ends, strict=True)]
    longest = max(map(len, statements))
    first, needed = max(_FIRST, trained // 16), longest * len(facts)
    last = next((x - longest for x in (body - trained, body) if x - first >= needed), -1)
    if last < 0:
        raise MeasureError(
            f"{n} tokens are too few for {len(facts)} statements and the questions for them: give a longer text, or "
            "set retrieval=false"
        )
    text = ids.clone()
    text[0, body:] = torch.tensor(asked, dtype=ids.dtype)
    places = [first + (last - first) * slot // (len(facts) - 1) for slot in range(len(facts))]
    if stated:
        for index, place in zip(order, places, strict=True):
            statement = statements[index]
            text[0, place : place + len(statement)] = torch.tensor(statement, dtype=ids.dtype)
    return Questions(text, tuple((body + start, body + stop) for start, stop in answers), body - last - longest)


def _asked(facts: Sequence[tuple[str, str]], encode: Encode) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of all questions with their answers, and where in them each answer begins and ends."""
    tokens: list[int] = []
    answers = []
    for start, value in facts:
        question, answered, whole = (list(encode(f"\n{start}{end}")) for end in ("", f" {value}", f" {value}."))
        begin, stop = _common(question, whole), _common(answered, whole)
        answers.append((len(tokens) + begin, len(tokens) + stop))
        tokens += whole
    return tokens, answers


@dataclass(frozen=True)
class RememberedFacts:
    """Short prompts whose next token is the answer to a question of general knowledge.

    Attributes:
        ids: Token ids ``(prompts, n)``, filled at the end.
        last: Index of the last token of each prompt, ``(prompts,)``.
        answers: First token of each answer, ``(prompts,)``.
        others: True where prompt i asks the question of prompt j about another subject, with another answer,
            ``(prompts, prompts)``; every column has at least one.
    """

    ids: Tensor
    last: Tensor
    answers: Tensor
    others: Tensor

    def logprobs(self, logits: Tensor, prompt: int) -> Tensor:
        """Return the log-probability of every answer after one prompt, ``(prompts,)``, from its logits ``(n, …)``."""
        after_prompt = logits[int(self.last[prompt])].float().log_softmax(-1)
        return after_prompt[constant_tensor(tuple(self.answers.tolist()), logits.device)].double()

    def gain(self, logprobs: Tensor) -> float:
        """Return the mean log-probability of the answers, minus that of the same answers for other subjects, nats.

        It is computed from the log-probability of answer j after prompt i, ``(prompts, prompts)``.
        """
        elsewhere = (logprobs * self.others).sum(0) / self.others.sum(0)
        return float((logprobs.diagonal() - elsewhere).mean())


def remembered_facts(ids: Tensor, encode: Encode, *, prefix: int = 0) -> RememberedFacts | None:
    """Return questions of general knowledge; None if the tokenizer cannot distinguish their answers.

    Args:
        ids: Token ids ``(1, n)`` of a text, which determines the subjects that are chosen.
        encode: The tokenizer.
        prefix: Number of leading tokens of the text that every prompt begins with, such as BOS.
    """
    chooser = random.Random(_seed(ids))  # noqa: S311 - reproducible, not secret
    prompts: list[list[int]] = []
    answers: list[int] = []
    questions: list[int] = []
    for index, (question, *pairs) in enumerate(_RELATIONS):
        for pair in chooser.sample(pairs, _ASKED):
            subject, answer = pair.split()
            asked, whole = (list(encode(question.format(subject) + end)) for end in ("", f" {answer}"))
            begin = _common(asked, whole)
            if 0 < begin < len(whole):
                prompts.append([*ids[0, :prefix].tolist(), *whole[:begin]])
                answers.append(whole[begin])
                questions.append(index)
    same, target = torch.tensor(questions), torch.tensor(answers)
    others = (same[:, None] == same) & (target[:, None] != target)
    chosen = others.any(0).nonzero()[:, 0]
    if not len(chosen):
        return None
    longest = max(len(prompts[index]) for index in chosen.tolist())
    # Prompts are filled at the end, which tokens before it do not see.
    filled = [prompts[index] + prompts[index][-1:] * (longest - len(prompts[index])) for index in chosen.tolist()]
    last = torch.tensor([len(prompts[index]) - 1 for index in chosen.tolist()])
    return RememberedFacts(torch.tensor(filled, dtype=ids.dtype), last, target[chosen], others[chosen][:, chosen])


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _seed(ids: Tensor) -> int:
    data = cast("Any", ids.to(torch.int64).cpu().contiguous().numpy()).tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:5], "big")
