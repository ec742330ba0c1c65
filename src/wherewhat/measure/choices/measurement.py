"""``wherewhat choices``: does the model choose the right alternative, and still with a disturbed context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from wherewhat.errors import MeasureError
from wherewhat.measure.base import Curve, DocumentScores, Measurement, Subject
from wherewhat.measure.choices.answering import Answer, Choices, Continuing, answer, disturbed
from wherewhat.measure.choices.config import ChoicesConfig
from wherewhat.measure.choices.pairs import paired
from wherewhat.measure.choices.words import LIMITS, METRICS, more_metrics
from wherewhat.measure.perturb.change import Change, nothing
from wherewhat.measure.perturb.names import labels, percent

_FAITHFUL = 1e-5
_FAITHFUL_HALF = 2e-2
"""Share of itself by which disturbing nothing may change a log-probability, and the same in half precision."""


def measure_choices(subject: Continuing, item: Choices, config: ChoicesConfig) -> DocumentScores:
    """Right or wrong on the untouched context, without it, and under each kind and rate.

    Args:
        subject: The model.
        item: The question.
        config: Options.

    Raises:
        MeasureError: If words are asked for and the tokenizer does not tell where they are, or disturbing nothing
            changes an answer's log-probability.
        CaptureError: If positions were asked for and the model takes none.
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


def _measure(subject: Subject, item: Choices, config: ChoicesConfig) -> DocumentScores:
    return measure_choices(cast(Continuing, subject), item, config)


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


def _together(documents: Sequence[DocumentScores], config: ChoicesConfig) -> DocumentScores:
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


CHOICES = Measurement(
    name="choices",
    revision=2,
    summary="Whether the model chooses the right alternative, and still does with a disturbed question.",
    config=ChoicesConfig,
    measure=_measure,
    metrics=METRICS,
    more_metrics=more_metrics,
    combine=_together,
    items=True,
    limits=LIMITS,
)
