"""Effect of a perturbation on losses and single heads, and position swaps compared with feature swaps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.measurement import Subject, Text
from wherewhat.measures.perturb.changes import Change, adjacent_pairs, random_pairs, swapped_order, units
from wherewhat.measures.tensors import correlation, token_losses


def ignore(_: LayerAttention) -> None:
    """Ignore a layer: the reducer of passes that need only logits."""


def perturbed_losses(
    subject: Subject,
    change: Change,
    reducer: Callable[[LayerAttention], None] = ignore,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the loss of each target of a perturbed text in nats, ``(m - 1,)`` float64.

    Args:
        subject: The model.
        change: The perturbed text.
        reducer: Called with each layer.
        targets: Tokens ``(m,)`` to score in place of those of the text.
    """
    with subject.reordered(change.orders) if change.orders else nullcontext():
        logits = subject.run(change.ids[None], reducer, logits=True, positions=change.positions)
    assert logits is not None
    return token_losses(logits, (change.ids if targets is None else targets)[None])


@dataclass(frozen=True)
class LayerState:
    """Fit and output of one layer in one pass.

    Attributes:
        r: Correlation of logits with the three axes, ``(heads,)``.
        shares: Decrease of R² without an axis, ``(heads,)`` by axis.
        output: Attention output of some tokens, ``(rows, heads, d_v)``.
    """

    r: Tensor
    shares: dict[str, Tensor]
    output: Tensor


class PerturbedRuns:
    """Runs a model on perturbed texts, and keeps the losses: the same text, positions and orders are run once.

    Kinds have perturbations in common: at rate 0, where a rate is too low for a swap, and where positions and features
    are compared.

    Args:
        subject: The model.

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
        found: dict[int, LayerState] = {}

        def measure(attention: LayerAttention) -> None:
            self._seen(attention)
            fit = fit_layer(attention)
            output = attention.output[0, rows.to(attention.output.device)].detach().float().cpu()
            shares = {axis: fit.unique[axis].cpu().double() for axis in "abc"}
            found[attention.layer] = LayerState(fit.r.cpu().double(), shares, output)

        self._known[_key(change)] = perturbed_losses(self.subject, change, measure)
        return found

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


def equivalence(
    runs: PerturbedRuns, text: Text, plain: Tensor, *, rate: float, seeds: range, first: int
) -> dict[str, float]:
    """Compare swapped positions with swapped hidden states, for the same swaps.

    Args:
        runs: Runs of the model.
        text: The text.
        plain: Loss of each target of the intact text, ``(n - 1,)``.
        rate: Share of the tokens to swap.
        seeds: Seeds of the draws.
        first: Index of the first layer.

    Returns:
        Over untouched targets, which are the same after both: ``index_minus_feature`` (mean difference of losses),
        ``index_feature_correlation`` (of the two changes of the loss, over targets); with rotary positions also the
        identities ``identity_first_layer`` and ``identity_tokens``, which are rounding errors.
    """
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
    found = {
        "index_minus_feature": float(torch.tensor(gaps).double().mean()),
        "index_feature_correlation": float(torch.tensor(correlations).double().nanmean()),
    }
    # If other blocks precede the first attention layer, its hidden states do not depend on single tokens.
    identity = first_layer_identity(runs.subject, text, rate, seeds[0], first) if first == 0 else None
    if identity is not None:
        found |= {"identity_first_layer": identity, "identity_tokens": max(tokens, default=torch.nan)}
    return found


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
    one, other = (output[rows] for output in outputs)
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
