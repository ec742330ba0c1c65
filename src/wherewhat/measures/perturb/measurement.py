"""``wherewhat perturb``: loss under word-order and position perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import CaptureError, MeasureError
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Measurement, Metric, Subject, Text
from wherewhat.measures.perturb.changes import KINDS, Change, PerturbConfig, labels, make_change, nothing, percent
from wherewhat.measures.perturb.heads import LayerView, equivalence, ignore, last_untouched, perform, sensitivity, view
from wherewhat.measures.statistics import allowed_change, correlation

METRICS = (
    Metric("loss", "loss", "nats", "Mean next-token loss of the untouched text."),
    Metric("rise_at_5", "rise, 5 % of words", "nats", "Rise of the loss when 5 % of the words are transposed."),
    Metric("rise_at_10", "rise, 10 % of words", "nats", "Rise of the loss when 10 % of the words are transposed."),
    Metric(
        "rise_at_5_untouched",
        "the same, untouched",
        "nats",
        "Rise at 5 % on targets whose own word and the token before were not moved: what the rest of the text feels.",
    ),
    Metric("rise_at_10_untouched", "the same at 10 %", "nats", "Rise at 10 % on targets that were not touched."),
    Metric(
        "index_minus_feature",
        "positions − features",
        "nats",
        "Loss on untouched targets after swapping positions, less that after swapping hidden states; 0: alike.",
    ),
    Metric(
        "index_feature_correlation",
        "positions × features",
        "",
        "Correlation over untouched targets of what the two swaps do to the loss; 1: they act alike on each.",
    ),
    Metric(
        "identity_first_layer",
        "first layer differs by",
        "",
        "Difference of the first layer's attention after the two swaps, where there must be none: rounding.",
    ),
    Metric(
        "identity_tokens",
        "tokens differ by",
        "nats",
        "Difference of swapped tokens and swapped hidden states at the first layer, which are the same: rounding.",
    ),
    Metric("share_a", "unique: distance", "", "Share of the logits' variance only the distance term explains."),
)


def more_metrics(config: PerturbConfig) -> tuple[Metric, ...]:
    """Words for what depends on kinds and rates."""
    found: list[Metric] = []
    kinds = [
        (label, KINDS[kind], layer)
        for kind in config.kinds or KINDS
        for label, layer in labels(kind, config.layers).items()
    ]
    for label, title, layer in kinds:
        where = title if layer is None else f"{title}, layer {layer}"
        for rate in sorted(config.rates):
            if rate > 0:
                what = f"{where}, {percent(rate)} %"
                found.append(Metric(f"rise_{label}_at_{percent(rate)}", what, "nats", f"Rise of the loss: {what}."))
    at = percent(config.at)
    for label, title, layer in kinds if config.axes else []:
        where = title if layer is None else f"{title}, layer {layer}"
        found += (
            Metric(
                f"rise_{label}_at_{at}_untouched",
                f"untouched: {where}",
                "nats",
                f"Rise of the loss on untouched targets: {where}, {at} %.",
            ),
            Metric(
                f"sensitivity_{label}",
                f"heads: {where}",
                "",
                f"Relative change of heads' output at untouched last tokens: {where}, {at} %.",
            ),
            Metric(
                f"predicted_{label}",
                f"× distance: {where}",
                "",
                "Correlation over heads of that change with the share of distance; 1: the axes predict who suffers.",
            ),
            Metric(f"r_change_{label}", f"r: {where}", "", f"Change of r of the three axes: {where}, {at} %."),
            *(
                Metric(
                    f"share_{axis}_change_{label}",
                    f"{word}: {where}",
                    "",
                    f"Change of the share only the {word} term explains: {where}, {at} %.",
                )
                for axis, word in (("a", "distance"), ("b", "query"), ("c", "key"))
            ),
        )
    return tuple(found)


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
