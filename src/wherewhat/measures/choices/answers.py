"""``wherewhat choices``: accuracy on questions with alternatives, intact and perturbed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measures.choices.measurement import ChoicesConfig
from wherewhat.measures.measurement import Curve, DocumentScores, Subject, Text
from wherewhat.measures.perturb.changes import Change, make_change, nothing
from wherewhat.measures.perturb.measurement import PerturbConfig, labels, percent
from wherewhat.measures.statistics import change_bounds, change_error


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
    """The text disturbed; as it is where it has no two units to exchange, as at any rate that makes up none."""
    try:
        return make_change(text, kind, rate, seed, config, layer=layer)
    except MeasureError:
        if text.spans.words is None:
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


@dataclass(frozen=True)
class Paired:
    """Right answers before and after.

    Attributes:
        change: Share of right answers after, less that before.
        low: Lower end of its 95 % interval over items (Bonett & Price 2012).
        high: Upper end.
        error: Their standard error, above 0 also where no answer changed.
        p: Chance of a split at least as uneven if changes to right and to wrong were as likely: exact McNemar test.
    """

    change: float
    low: float
    high: float
    error: float
    p: float


def paired(before: Sequence[float], after: Sequence[float]) -> Paired:
    """Compare answers, 1 for right and 0 for wrong, item by item."""
    n = len(before)
    gained = sum(1 for one, other in zip(before, after, strict=True) if other > one)
    lost = sum(1 for one, other in zip(before, after, strict=True) if other < one)
    low, high = change_bounds(gained, lost, n)
    return Paired((gained - lost) / n, low, high, change_error(gained, lost, n), mcnemar(gained, lost))


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact McNemar test: of gained + lost changed answers, each is a gain with probability one half."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


_FAITHFUL = 1e-5
_FAITHFUL_HALF = 2e-2
"""Share of itself by which disturbing nothing may change a log-probability, and the same in half precision."""


def measure_choices(subject: Continuing, item: Choices, config: ChoicesConfig) -> DocumentScores:
    """Right or wrong on the untouched context, without it, and under each kind and rate.

    Args:
        subject: The model.
        item: The question.
        config: Options.
    """
    untouched = nothing(item.context.ids[0].cpu())
    plain = answer(subject, item, untouched)
    whole = {
        "accuracy": float(plain.right),
        "accuracy_norm": float(plain.right_by_character),
        "chance": 1 / len(item.continuations),
        "probability": plain.probability,
        "margin": plain.margin,
        "logprob": float(plain.logprobs[item.gold]),
        "right_place": float(item.gold),
    }
    if item.blank:
        without = answer(subject, item, nothing(torch.tensor(item.blank)))
        whole |= {"accuracy_blank": float(without.right), "accuracy_norm_blank": float(without.right_by_character)}
    perturbing = config.perturbing()
    for kind, label, layer in _labelled(config):
        for rate in sorted(config.rates):
            change = disturbed(item.context, kind, rate, config.seed + item.seed, perturbing, layer=layer)
            found = plain if _same(change, untouched) else answer(subject, item, change, kind=kind)
            if rate == 0:
                _check(subject, kind, plain, found, item)
            whole |= _scores(f"{label}_at_{percent(rate)}", plain, found, change)
    return DocumentScores([], whole)


def _labelled(config: ChoicesConfig) -> Iterator[tuple[str, str, int | None]]:
    for kind in config.kinds:
        for label, layer in labels(kind, config.layers).items():
            yield kind, label, layer


def _same(change: Change, untouched: Change) -> bool:
    """Whether nothing at all is asked of the model that differs; undisturbed positions and features are tried."""
    return change.positions is None and not change.orders and torch.equal(change.ids, untouched.ids)


def _check(subject: Subject, kind: str, plain: Answer, found: Answer, item: Choices) -> None:
    gap = float(((found.logprobs - plain.logprobs).abs() / plain.logprobs.abs().clamp_min(1.0)).max())
    if gap <= _FAITHFUL:
        return
    dtypes: set[torch.dtype] = set()
    subject.run(item.context.ids[:, :8], lambda attention: dtypes.add(attention.rot_q.dtype))
    allowed = _FAITHFUL_HALF if dtypes & {torch.float16, torch.bfloat16} else _FAITHFUL
    if not gap <= allowed:
        raise MeasureError(
            f"{kind} at rate 0 changes a log-probability by {gap:.2g} of itself (allowed {allowed:.2g}): this model "
            "cannot be disturbed faithfully in that way"
        )


def _scores(name: str, plain: Answer, found: Answer, change: Change) -> dict[str, float]:
    return {
        f"accuracy_{name}": float(found.right),
        f"accuracy_norm_{name}": float(found.right_by_character),
        f"flipped_{name}": float(found.chosen != plain.chosen),
        f"probability_change_{name}": found.probability - plain.probability,
        f"moved_{name}": float(change.moved.double().mean()),
    }


def combine_items(documents: Sequence[DocumentScores], config: ChoicesConfig) -> DocumentScores:
    """Changes against the untouched context item by item, and the best that choosing always one place can do."""

    def all_of(name: str) -> list[float]:
        return [document.whole[name] for document in documents]

    places = Counter(all_of("right_place"))
    whole = {"accuracy_one_place": max(places.values()) / len(documents)}
    curves = {}
    for _, label, _ in _labelled(config):
        rows = []
        for rate in sorted(config.rates):
            name = f"{label}_at_{percent(rate)}"
            row = [rate, _mean(all_of(f"moved_{name}"))]
            for norm in ("", "_norm"):
                found = paired(all_of(f"accuracy{norm}"), after := all_of(f"accuracy{norm}_{name}"))
                whole |= {
                    f"change{norm}_{name}": found.change,
                    f"change{norm}_{name}_low": found.low,
                    f"change{norm}_{name}_high": found.high,
                    f"change{norm}_{name}_error": found.error,
                    f"change{norm}_{name}_p": found.p,
                }
                row += [_mean(after), found.change, found.error, found.p]
            rows.append(row)
        columns = "rate, share of tokens moved, then accuracy, change, its error, p, and the same by character"
        curves[f"accuracy_by_rate_{label}"] = Curve(torch.tensor(rows, dtype=torch.float64), ("rate", columns))
    return DocumentScores([], whole, curves)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
