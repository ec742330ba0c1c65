"""Losses and changes of heads under each kind and rate of perturbation."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from wherewhat.errors import CaptureError, MeasureError
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject, Text
from wherewhat.measures.perturb.changes import Change, make_change, no_change
from wherewhat.measures.perturb.heads import (
    LayerState,
    PerturbedRuns,
    equivalence,
    last_unmoved,
    sensitivity,
)
from wherewhat.measures.perturb.measurement import KINDS, PerturbConfig, percent, perturbations
from wherewhat.measures.tensors import check_faithful, correlation, defined

_FAITHFUL = 1e-5
"""Largest relative change of the loss at rate 0."""


@dataclass(frozen=True)
class Rise:
    """Losses under a perturbation, in nats.

    Attributes:
        loss: Sum over all targets, per target of the intact text.
        untouched: Mean over untouched targets; NaN if there are none.
        rise: Loss minus that of the intact text.
        rise_untouched: The same over untouched targets, each compared with itself.
        moved: Share of the tokens that were moved.
    """

    loss: float
    untouched: float
    rise: float
    rise_untouched: float
    moved: float


def loss_rise(change: Change, losses: Tensor, plain: Tensor) -> Rise:
    """Compare losses ``(m - 1,)`` of a perturbed text with those of the intact one, ``(n - 1,)``.

    Two adjacent tokens that were not moved are also adjacent in the intact text, so each such target has a loss there.
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


def rises_by_rate(
    runs: PerturbedRuns, text: Text, plain: Tensor, kind: str, config: PerturbConfig, *, layer: int | None = None
) -> dict[float, Rise]:
    """Return the losses of one kind at every rate, averaged over seeds.

    Args:
        runs: Runs of the model.
        text: The text.
        plain: Loss of each target of the intact text, ``(n - 1,)``.
        kind: Kind of perturbation.
        config: Options.
        layer: Layer at which features are swapped.
    """
    losses = runs.losses(make_change(text, kind, 0.0, config.seed, config, layer=layer))
    loss, expected = float(losses.mean()), float(plain.mean())
    check_faithful(f"perturbation of {kind}", loss, expected, dtypes=runs.dtypes, precision=_FAITHFUL)
    found = {}
    for rate in sorted(config.rates):
        rises = []
        for seed in _seeds(kind, config) if rate > 0 else (config.seed,):
            change = make_change(text, kind, rate, seed, config, layer=layer)
            rises.append(loss_rise(change, runs.losses(change), plain))
        columns = zip(*(astuple(rise) for rise in rises), strict=True)
        found[rate] = Rise(*(float(torch.tensor(column).double().nanmean()) for column in columns))
    return found


def _seeds(kind: str, config: PerturbConfig) -> range:
    """Return the seeds to average over; a constant shift is not random."""
    return range(config.seed, config.seed + (1 if kind == "position_shift" else config.seeds))


_SHORTEST = 8

_LEAST_CHANGE = 1e-3
"""Smallest change of a head's output that is not rounding: under a constant shift, no change is larger."""


def measure_perturb(subject: Subject, text: Text, config: PerturbConfig) -> DocumentScores:
    """Return losses by kind and rate, changes of heads and axes at one rate, and the equivalence of position swaps.

    Args:
        subject: The model.
        text: The text.
        config: Options.
    """
    n = text.ids.shape[1]
    if n - text.prefix < _SHORTEST:
        raise MeasureError(f"{n - text.prefix} tokens of text are too few to perturb: use {_SHORTEST} or more")
    runs = PerturbedRuns(subject)
    kinds = config.kinds or _possible(runs, text, config)
    # First, because the losses of the same passes are needed below.
    heads, predicted = _heads(runs, text, kinds, config) if config.axes else ({}, {})
    plain = runs.losses(no_change(text.ids[0].cpu()))
    whole: dict[str, float] = {"loss": float(plain.mean())}
    curves: dict[str, Curve] = {}
    for kind, label, _, layer in perturbations(kinds, config.layers):
        found = rises_by_rate(runs, text, plain, kind, config, layer=layer)
        for rate, rise in found.items():
            whole[f"rise_{label}_at_{percent(rate)}"] = rise.rise
            whole[f"rise_{label}_at_{percent(rate)}_untouched"] = rise.rise_untouched
        rows = [[rate, x.loss, x.untouched, x.rise_untouched, x.moved] for rate, x in found.items()]
        columns = "rate, loss, loss on untouched targets, its rise, share of tokens moved"
        curves[f"loss_by_rate_{label}"] = Curve(torch.tensor(rows), ("rate", columns))
    for p in ("5", "10"):
        for end in ("", "_untouched"):
            if (name := f"rise_words_at_{p}{end}") in whole:
                whole[f"rise_at_{p}{end}"] = whole[name]
    if config.equivalence and "position_swap" in kinds and "features" in kinds:
        seeds = range(config.seed, config.seed + config.seeds)
        whole |= equivalence(runs, text, plain, rate=config.at, seeds=seeds, first=min(runs.layers))
    scores = [LayerScores(layer, values) for layer, values in sorted(heads.items())]
    return DocumentScores(scores, defined(whole | predicted), curves)


def _possible(runs: PerturbedRuns, text: Text, config: PerturbConfig) -> tuple[str, ...]:
    """Return the kinds of perturbation that the model and the text allow."""
    allowed = []
    for kind in KINDS:
        try:
            change = make_change(text, kind, 0.0, config.seed, config, layer=min(config.layers))
            if change.positions is not None:
                runs.losses(change)
        except (MeasureError, CaptureError):
            continue
        allowed.append(kind)
    return tuple(allowed)


def _heads(
    runs: PerturbedRuns, text: Text, kinds: tuple[str, ...], config: PerturbConfig
) -> tuple[dict[int, dict[str, Tensor]], dict[str, float]]:
    """Return axes and sensitivity of every head under each kind at one rate, and how well the axes predict it."""
    n = text.ids.shape[1]
    last = torch.arange(max(0, n - config.queries), n)
    before = runs.states(no_change(text.ids[0].cpu()), last)
    heads: dict[int, dict[str, Tensor]] = {
        layer: {"r": state.r} | {f"share_{axis}": state.shares[axis] for axis in "abc"}
        for layer, state in before.items()
    }
    predicted: dict[str, float] = {}
    for kind, label, _, swapped_at in perturbations(kinds, config.layers):
        drawn: dict[int, list[dict[str, Tensor]]] = {layer: [] for layer in before}
        for seed in _seeds(kind, config):
            change = make_change(text, kind, config.at, seed, config, layer=swapped_at)
            rows, origin = last_unmoved(change, n, len(last))
            for layer, state in runs.states(change, rows).items():
                drawn[layer].append(_head_changes(label, before[layer], state, origin - last[0]))
        for layer, draws in drawn.items():
            heads[layer] |= {x: torch.stack([values[x] for values in draws]).nanmean(0) for x in draws[0]}
        changes = torch.cat([heads[layer][f"sensitivity_{label}"] for layer in before])
        if not float(changes.max()) > _LEAST_CHANGE:
            continue
        for axis, name in (("a", f"predicted_{label}"), ("c", f"predicted_by_key_{label}")):
            shares = torch.cat([state.shares[axis] for state in before.values()])
            predicted[name] = correlation(changes, shares)
    return heads, predicted


def _head_changes(label: str, before: LayerState, after: LayerState, rows: Tensor) -> dict[str, Tensor]:
    return {
        f"sensitivity_{label}": sensitivity(before.output[rows], after.output),
        f"r_change_{label}": after.r - before.r,
    } | {f"share_{axis}_change_{label}": after.shares[axis] - before.shares[axis] for axis in "abc"}
