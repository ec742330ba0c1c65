"""Whether swapping the positions of tokens acts like swapping what stands there.

Swapping the positions of tokens i < j, or their hidden states at the first layer, makes the same pairs of content and
position. Who sees whom differs: causality goes by the order of tokens, so what i brings along is seen between i and j
after one swap and not after the other. Hence, in a model that knows positions by rotation alone,

- tokens in front of i are those of the untouched model, after either swap;
- queries of the first layer that were not moved, and see all of a swap or nothing of it, attend alike after both;
- later layers differ, because the tokens between i and j do; how much is what is measured here.

Swapping hidden states at the first layer is swapping the tokens themselves, exactly, unless later layers are given the
tokens once more (embeddings of each layer).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.base import Subject, Text
from wherewhat.measure.correlation import correlation
from wherewhat.measure.perturb.change import Change, swapped_order
from wherewhat.measure.perturb.draws import adjacent_pairs, random_pairs
from wherewhat.measure.perturb.making import units
from wherewhat.measure.perturb.passes import perform


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
