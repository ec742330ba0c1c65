"""Statistics of tensors: intervals over documents, correlations, ranks, and next-token losses."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from wherewhat.measures.statistics import interval, share_bounds


def over_documents(values: Tensor) -> Tensor:
    """95 % Student intervals of means over documents, ``(heads, 2)`` float64.

    Queries of one text are less independent than texts, so that each document counts once, by its mean. Of a single
    document the interval is over its queries, and says nothing of other texts. NaN values are left out; the bounds are
    NaN where fewer than two are left.

    Args:
        values: ``(heads, documents, queries)``.
    """
    units = values[:, 0] if values.shape[1] == 1 else values.double().nanmean(-1)
    found = []
    for row in units.double().cpu():
        known = row[~row.isnan()].tolist()
        about = interval(known) if len(known) > 1 else None
        found.append((torch.nan, torch.nan) if about is None else (about.low, about.high))
    return torch.tensor(found, dtype=torch.float64).view(-1, 2)


def share_intervals(hits: Tensor, counts: Tensor) -> Tensor:
    """Wilson's 95 % intervals of shares, ``(..., 2)`` float64; NaN where nothing was counted.

    Args:
        hits: Number of hits, any shape.
        counts: Number of trials, broadcastable to the same shape.
    """
    n = counts.double().expand(hits.shape)
    pairs = zip((hits.double() / n).flatten().tolist(), n.flatten().tolist(), strict=True)
    bounds = [share_bounds(share, count) if count else (math.nan, math.nan) for share, count in pairs]
    return torch.tensor(bounds, dtype=torch.float64).view(*hits.shape, 2)


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson correlation of two ``(n,)`` where both are defined; NaN for fewer than 3, or if one is constant."""
    known = ~(x.isnan() | y.isnan())
    if int(known.sum()) < 3:
        return torch.nan
    both = torch.stack([x[known], y[known]]).double()
    centred = both - both.mean(1, keepdim=True)
    squares = centred.square().sum(1)
    if bool((squares <= 1e-28 * both.square().sum(1)).any()):  # of a constant, rounding is left
        return torch.nan
    return float(centred.prod(0).sum() / squares.prod().sqrt())


def centred_ranks(x: Tensor) -> Tensor:
    """Ranks along the last dimension of ``x`` ``(..., m)``, around zero, float64; equal values share a mean rank."""
    m = x.shape[-1]
    ordered, order = x.sort(-1)
    place = torch.arange(m, device=x.device).expand(x.shape)
    step = ordered[..., 1:] != ordered[..., :-1]
    if bool(step.all()):
        ranks = place.double() - (m - 1) / 2
        return torch.empty_like(ranks).scatter_(-1, order, ranks)
    first = torch.nn.functional.pad(step, (1, 0), value=True)
    last = torch.nn.functional.pad(step, (0, 1), value=True)
    # Every run of equal values gets the mean of its first and its last place.
    start = torch.where(first, place, 0).cummax(-1).values
    end = torch.where(last, place, m - 1).flip(-1).cummin(-1).values.flip(-1)
    ranks = (start + end).double() / 2 - (m - 1) / 2
    return torch.empty_like(ranks).scatter_(-1, order, ranks)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between ``x`` and ``y`` along the last dimension; NaN where one of them is zero."""
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    return torch.where(norms > 0, ((x * y).sum(-1) / norms).clamp(-1, 1), torch.nan)


_BLOCK = 1024
"""Tokens whose logits are held in float32 at a time."""

_HALF = 2e-2
"""Precision of a loss in half precision, where models round to three digits what a replacement computes in float32."""


def allowed_change(untouched: float, dtypes: Collection[torch.dtype], precision: float) -> float:
    """Largest change of a loss, in nats, through a replacement that changes nothing.

    Args:
        untouched: Loss of the untouched model. Logits, and so losses above one, are as precise as they are large.
        dtypes: Types that the model computes in.
        precision: Share of the loss, of one nat at least, that may change in float32.
    """
    half = any(torch.finfo(dtype).eps > torch.finfo(torch.float32).eps for dtype in dtypes)
    return (_HALF if half else precision) * max(1.0, untouched)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Loss of every token but the first, by the place it is foretold from, ``(n - 1,)`` float64 on the CPU.

    Args:
        logits: Logits ``(1, n or n - 1, vocabulary)``.
        ids: Tokens ``(1, n)``.
    """
    targets = ids[0, 1:].to(logits.device)
    predicting = logits[0, : len(targets)]
    parts = [
        torch.nn.functional.cross_entropy(predicting[i : i + _BLOCK].float(), targets[i : i + _BLOCK], reduction="none")
        for i in range(0, len(targets), _BLOCK)
    ]
    return torch.cat(parts).double().cpu()


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    """Mean cross-entropy of the next token, in nats; arguments as for :func:`token_losses`."""
    return float(token_losses(logits, ids).mean())
