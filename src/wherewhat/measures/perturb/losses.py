"""Losses and changes of heads under each kind and rate of perturbation, and position swaps against feature swaps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import CaptureError, MeasureError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.measurement import Subject, Text
from wherewhat.measures.perturb import KINDS, PerturbConfig, percent, perturbations
from wherewhat.measures.perturb.changes import (
    Change,
    adjacent_pairs,
    make_change,
    no_change,
    random_pairs,
    swapped_order,
    units,
)
from wherewhat.measures.tensors import check_faithful, correlation, defined, token_losses
from wherewhat.scores import Column, Scores

_FAITHFUL = 1e-5
"""Largest relative change of the loss at rate 0."""

_SHORTEST = 8

_LEAST_CHANGE = 1e-3
"""Smallest change of a head's output that is not rounding: under a constant shift, no change is larger."""


def measure_perturb(subject: Subject, text: Text, config: PerturbConfig) -> Scores:
    """Return losses by kind and rate, changes of heads and axes at one rate, and the equivalence of position swaps."""
    n = text.ids.shape[1]
    if n - text.prefix < _SHORTEST:
        raise MeasureError(f"{n - text.prefix} tokens of text are too few to perturb: use {_SHORTEST} or more")
    runs = PerturbedRuns(subject)
    kinds = config.kinds or _possible(runs, text, config)
    # First, because the losses of the same passes are needed below.
    heads, predicted = _heads(runs, text, kinds, config) if config.axes else ({}, {})
    plain = runs.losses(no_change(text.ids[0].cpu()))
    whole: dict[str, float] = {"loss": float(plain.mean())}
    curves: dict[str, Column] = {}
    for kind, label, _, layer in perturbations(kinds, config.layers):
        rises = rises_by_rate(runs, text, plain, kind, config, layer=layer)
        for rate, rise in rises.items():
            whole[f"rise_{label}_at_{percent(rate)}"] = rise.rise
            whole[f"rise_{label}_at_{percent(rate)}_untouched"] = rise.rise_untouched
        rows = [[rate, x.loss, x.untouched, x.rise_untouched, x.moved] for rate, x in rises.items()]
        columns = "rate, loss, loss on untouched targets, its rise, share of tokens moved"
        curves[f"loss_by_rate_{label}"] = Column(torch.tensor(rows), ("rate", columns))
    for p in ("5", "10"):
        for end in ("", "_untouched"):
            if (name := f"rise_words_at_{p}{end}") in whole:
                whole[f"rise_at_{p}{end}"] = whole[name]
    if config.equivalence and "position_swap" in kinds and "features" in kinds:
        seeds = range(config.seed, config.seed + config.seeds)
        whole |= equivalence(runs, text, plain, rate=config.at, seeds=seeds)
    scores = [Scores(layer=layer, heads=values) for layer, values in sorted(heads.items())]
    return Scores(layers=scores, whole=defined(whole | predicted), curves=curves)


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
    heads = {layer: dict(state.axes) for layer, state in before.items()}
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
        for share, name in (("share_a", f"predicted_{label}"), ("share_c", f"predicted_by_key_{label}")):
            predicted[name] = correlation(changes, torch.cat([state.axes[share] for state in before.values()]))
    return heads, predicted


def _head_changes(label: str, before: LayerState, after: LayerState, rows: Tensor) -> dict[str, Tensor]:
    changes = {f"{name}_change_{label}": after.axes[name] - x for name, x in before.axes.items()}
    return {f"sensitivity_{label}": sensitivity(before.output[rows], after.output)} | changes


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
    """Return the losses of one kind at every rate, averaged over seeds; those of the intact text are ``plain``."""
    losses = runs.losses(make_change(text, kind, 0.0, config.seed, config, layer=layer))
    loss, expected = float(losses.mean()), float(plain.mean())
    check_faithful(f"perturbation of {kind}", loss, expected, dtypes=runs.dtypes, precision=_FAITHFUL)
    by_rate = {}
    for rate in sorted(config.rates):
        rises = []
        for seed in _seeds(kind, config) if rate > 0 else (config.seed,):
            change = make_change(text, kind, rate, seed, config, layer=layer)
            rises.append(loss_rise(change, runs.losses(change), plain))
        columns = zip(*(astuple(rise) for rise in rises), strict=True)
        by_rate[rate] = Rise(*(float(torch.tensor(column).double().nanmean()) for column in columns))
    return by_rate


def _seeds(kind: str, config: PerturbConfig) -> range:
    """Return the seeds to average over; a constant shift is not random."""
    return range(config.seed, config.seed + (1 if kind == "position_shift" else config.seeds))


def perturbed_losses(
    subject: Subject,
    change: Change,
    reducer: Callable[[LayerAttention], None] = lambda _: None,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the loss of each target of a perturbed text in nats, ``(m - 1,)`` float64.

    ``targets`` ``(m,)`` are tokens to score in place of those of the text.
    """
    with subject.reordered(change.orders) if change.orders else nullcontext():
        logits = subject.run(change.ids[None], reducer, logits=True, positions=change.positions)
    assert logits is not None
    return token_losses(logits, (change.ids if targets is None else targets)[None])


@dataclass(frozen=True)
class LayerState:
    """Fit and output of one layer in one pass.

    Attributes:
        axes: Correlation ``r`` of logits with the three axes, and decrease of R² without one, ``share_a`` to
            ``share_c``, ``(heads,)`` each.
        output: Attention output of some tokens, ``(rows, heads, d_v)``.
    """

    axes: dict[str, Tensor]
    output: Tensor


class PerturbedRuns:
    """Runs a model on perturbed texts, and keeps the losses: the same text, positions and orders are run once.

    Kinds have perturbations in common: at rate 0, where a rate is too low for a swap, and where positions and features
    are compared.

    Attributes:
        layers: Indices of the layers that were run.
        dtypes: Dtypes of their queries.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.layers: set[int] = set()
        self.dtypes: set[torch.dtype] = set()
        self._known: dict[tuple[object, ...], Tensor] = {}

    def losses(self, change: Change) -> Tensor:
        """Return the loss of each target of a perturbed text in nats, ``(m - 1,)`` float64."""
        key = _key(change)
        if key not in self._known:
            self._known[key] = perturbed_losses(self.subject, change, self._seen)
        return self._known[key]

    def states(self, change: Change, rows: Tensor) -> dict[int, LayerState]:
        """Return fits of all layers on a perturbed text, with the attention output of tokens ``rows`` ``(rows,)``."""
        states: dict[int, LayerState] = {}

        def measure(attention: LayerAttention) -> None:
            self._seen(attention)
            fit = fit_layer(attention)
            output = attention.output[0, rows.to(attention.output.device)].detach().float().cpu()
            axes = {"r": fit.r} | {f"share_{axis}": fit.unique[axis] for axis in "abc"}
            states[attention.layer] = LayerState({name: x.cpu().double() for name, x in axes.items()}, output)

        self._known[_key(change)] = perturbed_losses(self.subject, change, measure)
        return states

    def _seen(self, attention: LayerAttention) -> None:
        self.layers.add(attention.layer)
        self.dtypes.add(attention.rot_q.dtype)


def _key(change: Change) -> tuple[object, ...]:
    """Return what the pass over a perturbed text depends on."""
    positions = None if change.positions is None else tuple(change.positions.tolist())
    orders = tuple((layer, tuple(order.tolist())) for layer, order in sorted(change.orders.items()))
    return tuple(change.ids.tolist()), positions, orders


def last_unmoved(change: Change, n: int, queries: int) -> tuple[Tensor, Tensor]:
    """Return indices of the last ``queries`` of n tokens that were not moved, in the perturbed and the intact text."""
    kept = (~change.moved & (change.origin >= n - queries)).nonzero()[:, 0]
    return kept, change.origin[kept]


def sensitivity(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean over tokens of ‖after − before‖ / ‖before‖, ``(heads,)``, of outputs ``(rows, heads, d_v)``."""
    size = before.norm(dim=-1).clamp_min(1e-30)
    relative: Tensor = ((after - before).norm(dim=-1) / size).double().mean(0)
    return relative


def closed_prefixes(order: Tensor) -> Tensor:
    """Return True where an order ``(n,)`` maps all indices up to there onto themselves, ``(n,)`` bool."""
    return order.cummax(0).values == torch.arange(len(order))


def equivalence(runs: PerturbedRuns, text: Text, plain: Tensor, *, rate: float, seeds: range) -> dict[str, float]:
    """Compare swapped positions with swapped hidden states, for the same swaps of a share of the tokens.

    The intact text must have been run; its losses are ``plain`` ``(n - 1,)``.

    Returns:
        Over untouched targets, which are the same after both: ``index_minus_feature`` (mean difference of losses),
        ``index_feature_correlation`` (of the two changes of the loss, over targets); with rotary positions also the
        identities ``identity_first_layer`` and ``identity_tokens``, which are rounding errors.
    """
    first = min(runs.layers)
    gaps, correlations, tokens = [], [], []
    for seed in seeds:
        index, feature = same_swaps(text, random_pairs, rate, seed, first)
        by_index, by_feature = (runs.losses(change) for change in (index, feature))
        kept = index.untouched
        if not bool(kept.any()):
            continue
        gaps.append(float((by_index - by_feature)[kept].mean()))
        correlations.append(correlation((by_index - plain)[kept], (by_feature - plain)[kept]))
        order = feature.orders[first]
        swapped = Change(index.ids[order], order, index.moved)
        by_tokens = perturbed_losses(runs.subject, swapped, targets=index.ids)
        tokens.append(float((by_tokens - by_feature).abs().max()))
    scores = {
        "index_minus_feature": float(torch.tensor(gaps).double().mean()),
        "index_feature_correlation": float(torch.tensor(correlations).double().nanmean()),
    }
    # If other blocks precede the first attention layer, its hidden states do not depend on single tokens.
    identity = first_layer_identity(runs.subject, text, rate, seeds[0], first) if first == 0 else None
    if identity is not None:
        scores |= {"identity_first_layer": identity, "identity_tokens": max(tokens, default=torch.nan)}
    return scores


def same_swaps(
    text: Text, draw: Callable[[int, float, int], Tensor], rate: float, seed: int, layer: int
) -> tuple[Change, Change]:
    """Return the same swaps of positions, and of the hidden states that enter a layer."""
    ids = text.ids[0].cpu()
    spans = units(text, "tokens")
    order, moved = swapped_order(len(ids), spans, draw(len(spans), rate, seed))
    places = torch.arange(len(ids))
    return Change(ids, places, moved, positions=order), Change(ids, places, moved, orders={layer: order})


def first_layer_identity(subject: Subject, text: Text, rate: float, seed: int, first: int) -> float | None:
    """Return the largest difference of the first layer's outputs after the two swaps where they are equivalent.

    Swaps of neighbours leave the most queries to compare. Relative to the largest entry; None without rotation.
    """
    outputs: list[Tensor] = []

    def keep(attention: LayerAttention) -> None:
        if attention.layer == first and attention.rotation is not None:
            outputs.append(attention.output[0].detach().float().cpu().clone())

    index, feature = same_swaps(text, adjacent_pairs, rate, seed, first)
    rows = closed_prefixes(feature.orders[first]) & ~feature.moved
    for change in (index, feature):
        perturbed_losses(subject, change, keep)
    if len(outputs) < 2 or not bool(rows.any()):
        return None
    before, other = (output[rows] for output in outputs)
    return float((before - other).abs().max() / before.abs().max().clamp_min(1e-30))
