"""``wherewhat perturb``: what a model's loss and heads make of disturbed order, positions and features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wherewhat.errors import CaptureError, MeasureError
from wherewhat.measure.base import Curve, DocumentScores, LayerScores, Measurement, Subject, Text
from wherewhat.measure.correlation import correlation
from wherewhat.measure.perturb.change import nothing
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.perturb.equivalence import equivalence
from wherewhat.measure.perturb.heads import LayerView, last_untouched, sensitivity, view
from wherewhat.measure.perturb.losses import Rise, by_rate, draws
from wherewhat.measure.perturb.making import make_change
from wherewhat.measure.perturb.names import KINDS, labels, percent
from wherewhat.measure.perturb.passes import ignore, perform
from wherewhat.measure.perturb.words import METRICS, more_metrics

_SHORTEST = 8

_FELT = 1e-3
"""Where no head's output changes by more, as under a constant shift, there is only rounding to predict."""


def measure_perturb(subject: Subject, text: Text, config: PerturbConfig) -> DocumentScores:
    """Losses by kind and rate, heads and axes at one rate, and positions against features.

    Args:
        subject: The model.
        text: The text.
        config: Options.

    Raises:
        MeasureError: If the text is too short, a kind that was asked for has nothing to disturb in it, or disturbing
            nothing changes the loss.
        CaptureError: If positions were asked for and the model takes none.
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


PERTURB = Measurement(
    name="perturb",
    revision=2,
    summary="What the loss and the heads make of transposed words, disturbed positions and swapped features.",
    config=PerturbConfig,
    measure=measure_perturb,
    metrics=METRICS,
    more_metrics=more_metrics,
    spans=True,
    limits=(
        "All targets count disturbed text too, which is harder to predict for anybody; untouched targets show what the "
        "model itself loses. A rate is a share of units, to the nearest swap: 1 % of a short text may be none. "
        "Swapping two equal tokens counts as a swap. Features swapped at a layer are scored on the untouched text. "
        "Axes of disturbed positions are still by order in the text. Correlations over heads say nothing about causes."
    ),
)
