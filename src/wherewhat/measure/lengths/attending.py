"""What attention is like under a length method: where it goes, how far it spreads, how additive its logits are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.extend import LengthMethod
from wherewhat.measure.attention.spread import SpreadSums
from wherewhat.measure.attention.weights import WeightBlock
from wherewhat.measure.axes.blocked import blocked_margins
from wherewhat.measure.axes.fit import fit_margins

SINKS = 4
"""First keys that count as attention sink."""
_BLOCKS, _ROWS = 8, 16
"""Queries looked at: so many groups of so many, evenly spread."""
_STRETCH = 256
"""Side of the triangle of logits whose axes are fitted, at most."""


def look(attention: LayerAttention, method: LengthMethod, queries: slice, limit: int) -> dict[str, Tensor]:
    """Numbers of one layer under a method, from some of its queries.

    Args:
        attention: One layer, batch 1.
        method: The method.
        queries: Queries to choose from.
        limit: Distance from which keys count as far.

    Returns:
        Values ``(heads,)`` by name, NaN where there are none: ``entropy`` and ``sink_mass`` of the weights;
        ``far_mass``, the weight on keys at far distances, the sink aside; ``far_logit``, by how much the largest logit
        of such keys exceeds the largest of near ones at the query where it does so most; ``axes_r`` and
        ``axes_distance``, the correlation of logits with their three axes and the share of variance that distance alone
        explains, in the last stretch of the queries.
    """
    sums = SpreadSums(attention, SINKS)
    device = attention.rot_q.device
    mass = torch.zeros(attention.heads, dtype=torch.float64, device=device)
    margin = torch.full((attention.heads,), -torch.inf, dtype=torch.float64, device=device)
    j = torch.arange(attention.m, device=device)
    count = 0
    for rows in sample(queries):
        scores = method.scores(attention, rows)
        weights = attention.weigh(scores, rows)[0]
        seen = scores[0].isfinite()
        missing = torch.zeros_like(weights[..., 0]) if attention.sinks is None else (1 - weights.sum(-1)).clamp_min(0)
        sums.add(WeightBlock(rows, weights, seen.any(0), missing))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        far = (i - j >= limit) & (j >= SINKS)
        near = i - j < limit
        mass += (weights * far).sum((-1, -2)).double()
        best = (scores[0].masked_fill(~x, -torch.inf).amax(-1) for x in (far, near))
        over = torch.sub(*best).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        margin = torch.maximum(margin, over.amax(-1).double())
        count += rows.stop - rows.start
    spread = sums.result()
    return {
        "entropy": spread.entropy,
        "sink_mass": spread.sink_mass,
        "far_mass": (mass / count).cpu(),
        "far_logit": torch.where(margin.isfinite(), margin, torch.nan).cpu(),
    } | axes(attention, method, queries)


def axes(attention: LayerAttention, method: LengthMethod, queries: slice) -> dict[str, Tensor]:
    """``axes_r`` and ``axes_distance`` ``(heads,)`` of the triangle of logits in the last stretch of the queries."""
    side = min(_STRETCH, queries.stop - queries.start)
    rows = slice(queries.stop - side, queries.stop)
    logits = method.scores(attention, rows)[0, ..., rows].double()
    i = torch.arange(side, device=logits.device)
    distance = i[:, None] - i
    hidden = ~logits.isfinite().all(0) & (distance >= 0)
    width = int(distance[hidden].min()) if bool(hidden.any()) else side
    if width < 3 or side < 4:
        nothing = torch.full((attention.heads,), torch.nan, dtype=torch.float64)
        return {"axes_r": nothing, "axes_distance": nothing}
    logits = logits.masked_fill(~logits.isfinite(), 0.0)
    margins = blocked_margins(
        lambda i0, i1, j0, j1: logits[:, i0:i1, j0:j1].clone(),
        attention.heads,
        side,
        width,
        device=logits.device,
        block=side,
    )
    fit = fit_margins(margins, torch.zeros_like(margins.sums), method="blocked")
    return {"axes_r": fit.r.cpu(), "axes_distance": fit.unique["a"].cpu()}


def sample(queries: slice) -> Iterator[slice]:
    """Groups of queries, evenly spread over ``queries`` and as far as there are so many, the last one at its end."""
    room = queries.stop - queries.start
    rows = min(_ROWS, max(1, room // _BLOCKS))
    count = min(_BLOCKS, room // rows)
    for group in range(1, count + 1):
        stop = queries.start + round(room * group / count)
        yield slice(stop - rows, stop)
