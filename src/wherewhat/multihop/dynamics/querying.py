"""Scores of all heads at one query, with layers, sequences and heads side by side in one dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measure.swaps.placing import place
from wherewhat.measure.swaps.scores import TAU, QueryLogits, score_swaps
from wherewhat.multihop.dynamics.watching import Watched


@dataclass(frozen=True)
class AtQuery:
    """What heads do at one query of each sequence.

    Attributes:
        s_pos: Positional score, ``(layers, count, heads)`` float64.
        s_sym: Symbolic score, likewise.
        entropy: Entropy of the attention weights, the query's own key included, in nats, likewise.
        use: Largest absolute contribution of each rotated plane to the logits of the keys before the query,
            ``(layers, count, heads, planes)``; no planes where nothing is rotated.
    """

    s_pos: Tensor
    s_sym: Tensor
    entropy: Tensor
    use: Tensor


def score_query(watched: Watched, query: int, rows: Tensor | None = None, *, tau: float = TAU) -> AtQuery:
    """Scores at the token ``query``, from all swaps of two keys before it.

    Args:
        watched: Queries and keys.
        query: Position of the query; two keys must come before it.
        rows: Sequences to look at, an index ``(rows,)``; all if not given.
        tau: Temperature of the weights of swaps.
    """
    q, k = watched.rot_q[..., query, :], watched.rot_k[..., : query + 1, :]
    if rows is not None:
        q, k = q[:, rows], k[:, rows]
    shape, scale, rotation = q.shape[:3], watched.scale, watched.rotation
    q, k = q.flatten(0, 2), k.flatten(0, 2)  # (pairs, d) and (pairs, query + 1, d)
    # In float64: weights enter an exponential divided by τ, and τ is small.
    logits = (k.double() @ q.double()[..., None])[..., 0] * scale
    bias: Tensor | None = None
    if watched.bias is not None:
        bias = watched.bias[:, None, :, query, : query + 1].expand(*shape, -1).flatten(0, 2)
        logits = logits + bias.double()
    weights = logits.softmax(-1)
    before = k[:, :query]
    positions = torch.arange(query, device=k.device)
    scores = score_swaps(
        QueryLogits(
            contents=before if rotation is None else rotation.unrotate(before, positions),
            placed=place(q, rotation, positions) * scale,
            logits=logits[:, :query].contiguous(),
            weights=weights[:, :query].contiguous(),
            bias=None if bias is None else bias[:, :query],
        ),
        taus=(tau,),
    )
    # The laboratory's rotations pair neighbouring dimensions, from the first on.
    turned = 0 if rotation is None else 2 * rotation.planes
    products = q[:, None, :turned] * before[..., :turned]
    use = (products[..., 0::2] + products[..., 1::2]).abs_().amax(1) * scale
    entropy = torch.special.entr(weights).sum(-1)
    return AtQuery(*(x.unflatten(0, shape) for x in (scores.s_pos[:, 0], scores.s_sym[:, 0], entropy, use)))
