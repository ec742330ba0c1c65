"""Loss of a model by kind and rate of perturbation, on all targets and on those that were not touched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measure.base import Subject, Text
from wherewhat.measure.losses import allowed_change
from wherewhat.measure.perturb.change import Change
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.perturb.making import make_change
from wherewhat.measure.perturb.passes import perform

_FAITHFUL = 1e-5
"""Share of the loss that disturbing nothing may change."""


@dataclass(frozen=True)
class Rise:
    """Losses under a perturbation, in nats.

    Attributes:
        loss: Over all targets, per target of the untouched text.
        untouched: Over the targets that were not touched; NaN if there is none.
        rise: Loss minus that of the untouched text.
        rise_untouched: The same over the targets that were not touched, each against itself.
        moved: Share of the tokens that were moved.
    """

    loss: float
    untouched: float
    rise: float
    rise_untouched: float
    moved: float


def compare(change: Change, losses: Tensor, plain: Tensor) -> Rise:
    """Losses ``(m - 1,)`` of a disturbed text beside those of the untouched one, ``(n - 1,)``.

    Two tokens side by side that were not moved are side by side in the untouched text too, so each such target has a
    loss there to be compared with.
    """
    kept = change.untouched
    loss, before = float(losses.sum() / len(plain)), float(plain.mean())
    after = losses[kept]
    return Rise(
        loss=loss,
        untouched=float(after.mean()),
        rise=loss - before,
        rise_untouched=float((after - plain[change.origin[1:][kept] - 1]).mean()),
        moved=float(change.moved.double().mean()),
    )


def by_rate(
    subject: Subject, text: Text, plain: Tensor, kind: str, config: PerturbConfig, *, layer: int | None = None
) -> dict[float, Rise]:
    """Losses of one kind at every rate, mean over seeds.

    Args:
        subject: The model.
        text: The text.
        plain: Loss of each target of the untouched text, ``(n - 1,)``.
        kind: What is disturbed.
        config: Options.
        layer: Where features are swapped.

    Raises:
        MeasureError: If at rate 0 the loss is not that of the untouched text.
    """
    check_nothing(subject, text, plain, kind, config, layer=layer)
    found = {}
    for rate in sorted(config.rates):
        rises = []
        for seed in draws(kind, config) if rate > 0 else (config.seed,):
            change = make_change(text, kind, rate, seed, config, layer=layer)
            rises.append(compare(change, perform(subject, change), plain))
        found[rate] = _mean(rises)
    return found


def draws(kind: str, config: PerturbConfig) -> range:
    """Seeds to average over; a constant shift leaves nothing to draw."""
    return range(config.seed, config.seed + (1 if kind == "position_shift" else config.seeds))


def check_nothing(
    subject: Subject, text: Text, plain: Tensor, kind: str, config: PerturbConfig, *, layer: int | None = None
) -> None:
    """Make sure that disturbing nothing, done the same way, changes no target's loss.

    Raises:
        MeasureError: If it does.
    """
    dtypes: set[torch.dtype] = set()
    change = make_change(text, kind, 0.0, config.seed, config, layer=layer)
    losses = perform(subject, change, lambda attention: dtypes.add(attention.rot_q.dtype))
    gap = float(losses.mean() - plain.mean())
    allowed = allowed_change(float(plain.mean()), dtypes, _FAITHFUL)
    if not abs(gap) <= allowed:
        raise MeasureError(
            f"{kind} at rate 0 changes the loss by {gap:.2g} (allowed {allowed:.2g}): this model cannot be disturbed "
            "faithfully in that way"
        )


def _mean(rises: list[Rise]) -> Rise:
    names = ("loss", "untouched", "rise", "rise_untouched", "moved")
    return Rise(**{name: float(torch.tensor([getattr(x, name) for x in rises]).double().nanmean()) for name in names})
