"""``wherewhat choices``: accuracy on questions with alternatives, intact and perturbed, and changes over items."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Protocol, cast

from wherewhat.errors import MeasureError
from wherewhat.measures.measurement import Choices, ChoicesMeasurement, Subject, Text
from wherewhat.measures.perturb import KINDS, PerturbConfig, percent, perturbations
from wherewhat.measures.statistics import change_bounds, change_error
from wherewhat.options import option
from wherewhat.scores import NON_NEGATIVE, SHARE, Column, Metric, Scores, stored_metric

if TYPE_CHECKING:
    from torch import Tensor

    from wherewhat.measures.perturb.changes import Change

_FAITHFUL = 1e-5
_FAITHFUL_HALF = 2e-2
"""Largest relative change of a log-probability at rate 0, and the same in half precision."""


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
        return PerturbConfig(**asdict(self))


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
    stored = (
        stored_metric("logprob", unit="nats"),
        stored_metric("right_place", range=NON_NEGATIVE),
        *(stored_metric(f"{name}_*_at_*", range=SHARE) for name in ("accuracy", "flipped", "moved")),
        *(stored_metric(f"{name}_*_at_*") for name in ("change", "probability_change")),
    )
    limits = (
        "One wording of each question and one draw per item and rate. A rate is a share of units, rounded to the "
        "nearest swap: 1 % of a short question is none, and 5 % may be one swap, so compare the share of tokens moved. "
        "If accuracy without context, or of always one place, is as high, unchanged accuracy shows nothing. Intervals "
        "are over items: Wilson's for shares, paired ones (Bonett & Price) for changes."
    )

    def measure(self, subject: Subject, choices: Choices, config: ChoicesConfig) -> Scores:
        """Return accuracy with the intact context, without it, and under each kind and rate of perturbation."""
        import torch

        from wherewhat.measures.perturb.changes import no_change

        model = cast("ContinuationSubject", subject)
        ids = choices.context.ids[0].cpu()
        plain = answer_choices(model, choices, no_change(ids))
        whole = {
            "accuracy": float(plain.right),
            "accuracy_norm": float(plain.right_by_character),
            "chance": 1 / len(choices.continuations),
            "probability": plain.probability,
            "margin": plain.margin,
            "logprob": float(plain.logprobs[choices.gold]),
            "right_place": float(choices.gold),
        }
        if choices.blank:
            without = answer_choices(model, choices, no_change(torch.tensor(choices.blank)))
            whole |= {"accuracy_blank": float(without.right), "accuracy_norm_blank": float(without.right_by_character)}
        options = config.perturbation()
        for kind, label, _, layer in perturbations(config.kinds, config.layers):
            for rate in sorted(config.rates):
                change = perturb_context(choices.context, kind, rate, config.seed + choices.seed, options, layer=layer)
                # Unchanged positions and features are run too, to check that they give the same answer.
                unchanged = change.positions is None and not change.orders and torch.equal(change.ids, ids)
                answer = plain if unchanged else answer_choices(model, choices, change, kind=kind)
                if rate == 0:
                    _check(subject, kind, plain, answer, choices)
                name = f"{label}_at_{percent(rate)}"
                whole |= {
                    f"accuracy_{name}": float(answer.right),
                    f"accuracy_norm_{name}": float(answer.right_by_character),
                    f"flipped_{name}": float(answer.chosen != plain.chosen),
                    f"probability_change_{name}": answer.probability - plain.probability,
                    f"moved_{name}": float(change.moved.double().mean()),
                }
        return Scores(whole=whole)

    def combine(self, documents: Sequence[Scores], config: ChoicesConfig) -> Scores:
        """Return paired changes from the intact context over items, and the best accuracy of always one place."""
        import torch

        def all_of(name: str) -> list[float]:
            return [document.whole[name] for document in documents]

        def mean(values: Sequence[float]) -> float:
            return sum(values) / len(values)

        whole = {"accuracy_one_place": max(Counter(all_of("right_place")).values()) / len(documents)}
        curves = {}
        for _, label, _, _ in perturbations(config.kinds, config.layers):
            rows = []
            for rate in sorted(config.rates):
                name = f"{label}_at_{percent(rate)}"
                row = [rate, mean(all_of(f"moved_{name}"))]
                for norm in ("", "_norm"):
                    change = paired_change(all_of(f"accuracy{norm}"), after := all_of(f"accuracy{norm}_{name}"))
                    for ending, value in zip(("", "_low", "_high", "_error", "_p"), astuple(change), strict=True):
                        whole[f"change{norm}_{name}{ending}"] = value
                    row += [mean(after), change.change, change.error, change.p]
                rows.append(row)
            columns = "rate, share of tokens moved, then accuracy, change, its error, p, and the same by character"
            curves[f"accuracy_by_rate_{label}"] = Column(torch.tensor(rows, dtype=torch.float64), ("rate", columns))
        return Scores(whole=whole, curves=curves)

    def more_metrics(self, config: ChoicesConfig) -> tuple[Metric, ...]:
        """Return the metrics of every kind and rate."""
        return tuple(
            metric
            for _, label, title, _ in perturbations(config.kinds, config.layers)
            for rate in sorted(config.rates)
            if rate > 0
            for metric in _metrics_at(f"{label}_at_{percent(rate)}", f"{title}, {percent(rate)} %")
        )


class ContinuationSubject(Subject, Protocol):
    """A model that also returns log-probabilities of continuations."""

    def continued(
        self,
        ids: Tensor,
        continuations: Sequence[Sequence[int]],
        *,
        positions: Tensor | None = None,
        orders: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each continuation of ``ids`` ``(1, n)``, float64, and whether it is greedy.

        Positions are those of the text and the longest continuation without its last token; orders those of the text.
        """


@dataclass(frozen=True)
class ChoiceAnswer:
    """A model's answer to a question with alternatives.

    Attributes:
        logprobs: Log-probability of each alternative, the sum over its tokens, ``(choices,)`` float64 in nats.
        chosen: The alternative with the largest log-probability.
        right: Whether that is the right one.
        right_by_character: The same for log-probabilities divided by the number of characters.
        probability: Probability of the right alternative, normalised over the alternatives.
        margin: Its log-probability minus that of the best wrong one.
    """

    logprobs: Tensor
    chosen: int
    right: bool
    right_by_character: bool
    probability: float
    margin: float


def score_choices(logprobs: Tensor, item: Choices) -> ChoiceAnswer:
    """Return the answer with log-probabilities ``(choices,)``.

    ``right`` and ``right_by_character`` are ``acc`` and ``acc_norm`` of lm-evaluation-harness; of ties the first is
    chosen.
    """
    import torch

    if bool(logprobs.isnan().any()):
        raise MeasureError(f"the model's log-probabilities are {logprobs.tolist()}: try another dtype")
    chosen = _first_largest(logprobs)
    by_character = logprobs / torch.tensor(item.lengths, dtype=torch.float64)
    wrong = torch.cat([logprobs[: item.gold], logprobs[item.gold + 1 :]])
    return ChoiceAnswer(
        logprobs=logprobs,
        chosen=chosen,
        right=chosen == item.gold,
        right_by_character=_first_largest(by_character) == item.gold,
        probability=float(logprobs.softmax(0)[item.gold]),
        margin=float(logprobs[item.gold] - wrong.max()),
    )


def answer_choices(subject: ContinuationSubject, item: Choices, change: Change, *, kind: str = "") -> ChoiceAnswer:
    """Return the answer with a context that a perturbation of a kind has changed, and intact alternatives."""
    positions = continued_positions(change.positions, item.longest - 1, kind=kind)
    logprobs, _ = subject.continued(change.ids[None], item.continuations, positions=positions, orders=change.orders)
    return score_choices(logprobs, item)


def perturb_context(
    text: Text, kind: str, rate: float, seed: int, config: PerturbConfig, *, layer: int | None
) -> Change:
    """Return the perturbed text; unchanged if it has fewer than two units to swap."""
    from wherewhat.measures.perturb.changes import make_change, no_change

    try:
        return make_change(text, kind, rate, seed, config, layer=layer)
    except MeasureError:
        if text.spans.words is None:
            raise
        return no_change(text.ids[0].cpu())


def continued_positions(positions: Tensor | None, count: int, *, kind: str) -> Tensor | None:
    """Return the positions ``(n,)`` of a perturbed context and of ``count`` tokens after it, ``(n + count,)``.

    The tokens after it have the positions n, n+1, …, or follow the last token of kinds that shift all later tokens
    (gaps, shift).
    """
    if positions is None:
        return None
    import torch

    shifts = kind in ("position_gaps", "position_shift")
    start = int(positions[-1]) + 1 if shifts else len(positions)
    return torch.cat([positions, start + torch.arange(count)])


def _first_largest(values: Tensor) -> int:
    # torch's argmax does not define which of equal values it returns.
    return int((values == values.max()).nonzero()[0])


@dataclass(frozen=True)
class PairedChange:
    """Change of accuracy over the same items.

    Attributes:
        change: Accuracy after minus accuracy before.
        low: Lower bound of its 95 % interval over items (Bonett & Price 2012).
        high: Upper bound.
        error: Standard error, positive even if no answer changed.
        p: p-value of the exact McNemar test.
    """

    change: float
    low: float
    high: float
    error: float
    p: float


def paired_change(before: Sequence[float], after: Sequence[float]) -> PairedChange:
    """Compare answers, 1 for right and 0 for wrong, of the same items."""
    n = len(before)
    gained = sum(1 for own, other in zip(before, after, strict=True) if other > own)
    lost = sum(1 for own, other in zip(before, after, strict=True) if other < own)
    low, high = change_bounds(gained, lost, n)
    return PairedChange((gained - lost) / n, low, high, change_error(gained, lost, n), mcnemar(gained, lost))


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of the exact McNemar test: each changed answer is a gain with probability 1/2."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << changed))


def _check(subject: Subject, kind: str, plain: ChoiceAnswer, answer: ChoiceAnswer, item: Choices) -> None:
    """Raise an error if rate 0 changes a log-probability."""
    gap = float(((answer.logprobs - plain.logprobs).abs() / plain.logprobs.abs().clamp_min(1.0)).max())
    if gap <= _FAITHFUL:
        return
    import torch

    dtypes: set[torch.dtype] = set()
    subject.run(item.context.ids[:, :8], lambda attention: dtypes.add(attention.rot_q.dtype))
    allowed = _FAITHFUL_HALF if dtypes & {torch.float16, torch.bfloat16} else _FAITHFUL
    if not gap <= allowed:
        raise MeasureError(
            f"perturbation of {kind} is not faithful on this model: at rate 0 the relative change of a log-probability "
            f"is {gap:.2g} (allowed {allowed:.2g})"
        )
