"""Effect of a perturbation on single heads, and position swaps compared with content swaps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.measures.axes.layer import fit_layer
from wherewhat.measures.measurement import Subject, Text
from wherewhat.measures.perturb.changes import Change, adjacent_pairs, random_pairs, swapped_order, units
from wherewhat.measures.tensors import correlation, token_losses


def ignore(_: LayerAttention) -> None:
    """A reducer for passes whose layers are of no interest."""


def perform(
    subject: Subject,
    change: Change,
    reducer: Callable[[LayerAttention], None] = ignore,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """Loss of each target of a disturbed text in nats, ``(m - 1,)`` float64.

    Args:
        subject: The model.
        change: The disturbed text.
        reducer: Called with each layer.
        targets: Tokens ``(m,)`` to score in place of those of the text.
    """
    with subject.reordered(change.orders) if change.orders else nullcontext():
        logits = subject.run(change.ids[None], reducer, logits=True, positions=change.positions)
    assert logits is not None
    return token_losses(logits, (change.ids if targets is None else targets)[None])


@dataclass(frozen=True)
class LayerView:
    """One layer in one pass.

    Attributes:
        r: Correlation of logits with the three axes, ``(heads,)``.
        shares: What R² loses without an axis, ``(heads,)`` by axis.
        output: Attention output of some tokens, ``(rows, heads, d_v)``.
    """

    r: Tensor
    shares: dict[str, Tensor]
    output: Tensor


def view(subject: Subject, change: Change, rows: Tensor) -> dict[int, LayerView]:
    """Every layer of a pass over a disturbed text, with the attention output of tokens ``rows`` ``(rows,)``."""
    found: dict[int, LayerView] = {}

    def look(attention: LayerAttention) -> None:
        fit = fit_layer(attention)
        output = attention.output[0, rows.to(attention.output.device)].detach().float().cpu()
        shares = {axis: fit.unique[axis].cpu().double() for axis in "abc"}
        found[attention.layer] = LayerView(fit.r.cpu().double(), shares, output)

    perform(subject, change, look)
    return found


def last_untouched(change: Change, n: int, queries: int) -> tuple[Tensor, Tensor]:
    """Tokens among the last ``queries`` of n that were not moved: their places in the disturbed text, and before."""
    kept = (~change.moved & (change.origin >= n - queries)).nonzero()[:, 0]
    return kept, change.origin[kept]


def sensitivity(before: Tensor, after: Tensor) -> Tensor:
    """Mean over tokens of ‖after − before‖ / ‖before‖ by head, ``(heads,)``, from outputs ``(rows, heads, d_v)``."""
    size = before.norm(dim=-1).clamp_min(1e-30)
    felt: Tensor = ((after - before).norm(dim=-1) / size).double().mean(0)
    return felt


def sees_whole_swaps(order: Tensor) -> Tensor:
    """Places up to which an order ``(n,)`` only exchanges tokens among themselves, ``(n,)`` bool."""
    return order.cummax(0).values == torch.arange(len(order))


def equivalence(
    subject: Subject, text: Text, plain: Tensor, *, rate: float, seeds: range, first: int
) -> dict[str, float]:
    """Swapped positions beside swapped hidden states, the same swaps.

    Args:
        subject: The model.
        text: The text.
        plain: Loss of each target of the untouched text, ``(n - 1,)``.
        rate: Share of the tokens to swap.
        seeds: Seeds of the draws.
        first: Index of the first layer.

    Returns:
        Over untouched targets, which are the same after both: ``index_minus_feature`` (mean difference of losses),
        ``index_feature_correlation`` (of the two changes of the loss, over targets); where positions are rotations also
        the identities ``identity_first_layer`` and ``identity_tokens``, which must be rounding.
    """
    gaps, correlations, tokens = [], [], []
    for seed in seeds:
        index, feature = both(text, random_pairs, rate, seed, first)
        by_index, by_feature = perform(subject, index), perform(subject, feature)
        kept = index.untouched
        if not bool(kept.any()):
            continue
        gaps.append(float((by_index - by_feature)[kept].mean()))
        correlations.append(correlation((by_index - plain)[kept], (by_feature - plain)[kept]))
        order = feature.orders[first]
        swapped = Change(index.ids[order], order, index.moved)
        tokens.append(float((perform(subject, swapped, targets=index.ids) - by_feature).abs().max()))
    found = {
        "index_minus_feature": float(torch.tensor(gaps).double().mean()),
        "index_feature_correlation": float(torch.tensor(correlations).double().nanmean()),
    }
    # Where other blocks come before the first that attends, its hidden states are no longer single tokens'.
    identity = first_layer_identity(subject, text, rate, seeds[0], first) if first == 0 else None
    if identity is not None:
        found |= {"identity_first_layer": identity, "identity_tokens": max(tokens, default=torch.nan)}
    return found


def both(
    text: Text, draw: Callable[[int, float, int], Tensor], rate: float, seed: int, layer: int
) -> tuple[Change, Change]:
    """The same swaps of tokens' positions, and of the hidden states that enter a layer."""
    ids = text.ids[0].cpu()
    spans = units(text, "tokens")
    order, moved = swapped_order(len(ids), spans, draw(len(spans), rate, seed))
    places = torch.arange(len(ids))
    return Change(ids, places, moved, positions=order), Change(ids, places, moved, orders={layer: order})


def first_layer_identity(subject: Subject, text: Text, rate: float, seed: int, first: int) -> float | None:
    """Largest difference of the first layer's attention after the two swaps, where there must be none.

    Swaps of neighbours leave the most queries to compare. Relative to the largest entry; None without rotation.
    """
    outputs: list[Tensor] = []

    def keep(attention: LayerAttention) -> None:
        if attention.layer == first and attention.rotation is not None:
            outputs.append(attention.output[0].detach().float().cpu().clone())

    index, feature = both(text, adjacent_pairs, rate, seed, first)
    rows = sees_whole_swaps(feature.orders[first]) & ~feature.moved
    for change in (index, feature):
        perform(subject, change, keep)
    if len(outputs) < 2 or not bool(rows.any()):
        return None
    one, other = (output[rows] for output in outputs)
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))
