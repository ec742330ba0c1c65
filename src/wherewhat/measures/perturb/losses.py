"""``wherewhat perturb``: loss under word-order and position perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import CaptureError, MeasureError
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject, Text
from wherewhat.measures.perturb.changes import Change, make_change, nothing
from wherewhat.measures.perturb.heads import LayerView, equivalence, ignore, last_untouched, perform, sensitivity, view
from wherewhat.measures.perturb.measurement import KINDS, PerturbConfig, labels, percent
from wherewhat.measures.tensors import allowed_change, correlation

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
    """Make sure that disturbing nothing, done the same way, changes no target's loss."""
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


_SHORTEST = 8

_FELT = 1e-3
"""Where no head's output changes by more, as under a constant shift, there is only rounding to predict."""


def measure_perturb(subject: Subject, text: Text, config: PerturbConfig) -> DocumentScores:
    """Losses by kind and rate, heads and axes at one rate, and positions against features.

    Args:
        subject: The model.
        text: The text.
        config: Options.
    """
    n = text.ids.shape[1]
    if n - text.prefix < _SHORTEST:
        raise MeasureError(f"{n - text.prefix} tokens of text are too few to disturb: use {_SHORTEST} or more")
    layers: list[int] = []
    plain = perform(subject, nothing(text.ids[0].cpu()), lambda attention: layers.append(attention.layer))
    whole: dict[str, float] = {"loss": float(plain.mean())}
    curves: dict[str, Curve] = {}
    kinds = config.kinds or _possible(subject, text, config)
    for kind in kinds:
        for label, layer in labels(kind, config.layers).items():
            found = by_rate(subject, text, plain, kind, config, layer=layer)
            whole |= _rises(label, found)
            curves[f"loss_by_rate_{label}"] = _curve(found)
    for p in ("5", "10"):
        for end in ("", "_untouched"):
            if (name := f"rise_words_at_{p}{end}") in whole:
                whole[f"rise_at_{p}{end}"] = whole[name]
    if config.equivalence and "position_swap" in kinds and "features" in kinds:
        seeds = range(config.seed, config.seed + config.seeds)
        whole |= equivalence(subject, text, plain, rate=config.at, seeds=seeds, first=min(layers))
    scores: list[LayerScores] = []
    if config.axes:
        heads, predicted = _heads(subject, text, kinds, config)
        scores = [LayerScores(layer, values) for layer, values in sorted(heads.items())]
        whole |= predicted
    return DocumentScores(scores, {name: value for name, value in whole.items() if value == value}, curves)


def _possible(subject: Subject, text: Text, config: PerturbConfig) -> tuple[str, ...]:
    """Kinds that the model and the text allow."""
    allowed = []
    for kind in KINDS:
        try:
            change = make_change(text, kind, 0.0, config.seed, config, layer=min(config.layers))
            if change.positions is not None:
                subject.run(text.ids, ignore, positions=change.positions)
        except (MeasureError, CaptureError):
            continue
        allowed.append(kind)
    return tuple(allowed)


def _rises(label: str, found: Mapping[float, Rise]) -> dict[str, float]:
    whole = {}
    for rate, rise in found.items():
        whole[f"rise_{label}_at_{percent(rate)}"] = rise.rise
        whole[f"rise_{label}_at_{percent(rate)}_untouched"] = rise.rise_untouched
    return whole


def _curve(found: Mapping[float, Rise]) -> Curve:
    rows = [[rate, x.loss, x.untouched, x.rise_untouched, x.moved] for rate, x in found.items()]
    names = "rate, loss, loss on untouched targets, its rise, share of tokens moved"
    return Curve(torch.tensor(rows), ("rate", names))


def _heads(
    subject: Subject, text: Text, kinds: tuple[str, ...], config: PerturbConfig
) -> tuple[dict[int, dict[str, Tensor]], dict[str, float]]:
    """Axes and sensitivity of every head under each kind at one rate, and how well the axes predict it."""
    n = text.ids.shape[1]
    last = torch.arange(max(0, n - config.queries), n)
    before = view(subject, nothing(text.ids[0].cpu()), last)
    heads: dict[int, dict[str, Tensor]] = {
        layer: {"r": seen.r} | {f"share_{axis}": seen.shares[axis] for axis in "abc"} for layer, seen in before.items()
    }
    predicted: dict[str, float] = {}
    for kind in kinds:
        for label, place in labels(kind, config.layers).items():
            drawn: dict[int, list[dict[str, Tensor]]] = {layer: [] for layer in before}
            for seed in draws(kind, config):
                change = make_change(text, kind, config.at, seed, config, layer=place)
                rows, origin = last_untouched(change, n, len(last))
                for layer, seen in view(subject, change, rows).items():
                    drawn[layer].append(_changes(label, before[layer], seen, origin - last[0]))
            for layer, changes in drawn.items():
                heads[layer] |= {x: torch.stack([values[x] for values in changes]).nanmean(0) for x in changes[0]}
            felt = torch.cat([heads[layer][f"sensitivity_{label}"] for layer in before])
            if not float(felt.max()) > _FELT:
                continue
            for axis, name in (("a", f"predicted_{label}"), ("c", f"predicted_by_key_{label}")):
                predicted[name] = correlation(felt, torch.cat([seen.shares[axis] for seen in before.values()]))
    return heads, predicted


def _changes(label: str, before: LayerView, after: LayerView, rows: Tensor) -> dict[str, Tensor]:
    return {
        f"sensitivity_{label}": sensitivity(before.output[rows], after.output),
        f"r_change_{label}": after.r - before.r,
    } | {f"share_{axis}_change_{label}": after.shares[axis] - before.shares[axis] for axis in "abc"}
