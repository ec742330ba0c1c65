"""What each of RoPE's planes does by itself: every plane scored as a head of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measure.frequencies.use import dimensions, partial_logits
from wherewhat.measure.swaps.placing import places_before, query_logits
from wherewhat.measure.swaps.scores import TAU, QueryLogits, score_swaps

_ENTRIES = 2**21
"""Pairs of planes and keys held at a time, 32 bytes each."""


@dataclass(frozen=True)
class PlaneSwaps:
    """Swap scores of single planes at one query.

    Attributes:
        s_pos: Positional score of each plane, ``(heads, planes)``; dimensions that do not rotate come last, as one.
        s_sym: Symbolic score, ``(heads, planes)``.
    """

    s_pos: Tensor
    s_sym: Tensor


def plane_swaps(attention: LayerAttention, query: int, *, tau: float = TAU, skip: int = 0) -> PlaneSwaps:
    """Positional and symbolic score of every plane of every head, each as if it were the whole head.

    A plane's logits are what it adds to those of its head, before soft-cap and bias, which are not made of planes. Its
    attention is their softmax over the keys before the query: the query's own key and sinks do not take part.

    Args:
        attention: One layer of a pass over one text without cache, with rotation, whose keys are made token by token.
        query: Position of the query.
        tau: Temperature of the weights of swaps.
        skip: Leave the first so many keys where they are.

    Raises:
        MeasureError: If the layer does not rotate, τ is not positive, or the query sees fewer than two keys before it.
    """
    if tau <= 0:
        raise MeasureError(f"tau={tau} must be positive: it divides the weights of swaps")
    groups = plane_queries(attention, query, skip=skip)
    found = [score_swaps(planes, taus=(tau,)) for planes in groups]
    s_pos, s_sym = (
        torch.cat([part.view(attention.heads, -1) for part in parts], 1)
        for parts in zip(*((scores.s_pos, scores.s_sym) for scores in found), strict=True)
    )
    return PlaneSwaps(s_pos, s_sym)


def plane_queries(attention: LayerAttention, query: int, *, skip: int = 0) -> Iterator[QueryLogits]:
    """One query's planes as heads of their own: some planes at a time, then what is not rotated.

    Each has ``heads · planes`` heads, those of one real head together. Summed over planes, ``contents · placed`` and
    ``logits`` are those of :func:`~wherewhat.measure.swaps.placing.query_logits` before soft-cap and bias.
    """
    if attention.rotation is None:
        raise MeasureError(f"layer {attention.layer} does not rotate its queries and keys: it has no planes")
    whole = query_logits(attention, query, skip=skip)
    keys = places_before(attention, query, skip=skip)
    step = max(1, _ENTRIES // (attention.heads * len(keys)))
    for dims in (part for kind in dimensions(attention) for part in torch.split(kind, step)):
        # (heads, keys, planes) with the planes moved to the heads
        logits = partial_logits(attention, query, keys, dims).movedim(-1, 1).flatten(0, 1)
        where = dims.to(whole.contents.device)
        yield QueryLogits(
            contents=whole.contents[..., where].movedim(2, 1).flatten(0, 1),
            placed=whole.placed[..., where].movedim(2, 1).flatten(0, 1),
            logits=logits,
            weights=logits.softmax(-1),
        )
