"""How far a model's attention may be from ours because its logits are rounded, and no further."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention

_ROUNDINGS = 3
"""How often a logit is rounded to the model's dtype: after the product, the scale and the bias."""


def output_excess(attention: LayerAttention, rows: slice) -> Tensor:
    """How far the output of some queries is from our weights times the values, beyond what rounding explains.

    Returns:
        ``(batch, heads, rows, d_v)``, at or below zero where rounding explains it.
    """
    dtype = torch.promote_types(attention.value.dtype, torch.float32)
    value = attention.value.to(dtype)
    groups = attention.heads // value.shape[1]
    weights, rounding = (x.to(dtype) for x in rounded_weights(attention, rows, attention.rot_q.dtype))

    def times(weights: Tensor, values: Tensor) -> Tensor:
        """One product per head of the values, which are not repeated."""
        batch, heads, count, keys = weights.shape
        return (weights.reshape(batch, -1, groups * count, keys) @ values).view(batch, heads, count, -1)

    theirs = attention.output.to(dtype).reshape(attention.rot_q.shape[0], attention.n, attention.heads, -1)
    return (times(weights, value) - theirs[:, rows].transpose(1, 2)).abs() - times(rounding, value.abs())


def rounded_weights(attention: LayerAttention, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention weights of some queries, and how far each may be off where logits are rounded to ``dtype``.

    With every logit off by at most δ, the log-odds of a weight are off by at most 2δ: nothing where a query is sure of
    its key, however large its logits and thus their rounding.
    """
    scores, visible = attention.attn_scores(rows), attention.visible(rows)
    weights = attention.weigh(scores, rows)
    scores = scores.masked_fill(~visible, -torch.inf)
    if attention.sinks is not None:
        scores = torch.cat([scores, attention.sinks.to(scores.dtype).view(1, -1, 1, 1).expand_as(scores[..., :1])], -1)
    precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # softmax is in float32 even in float64
    off = precision * _ROUNDINGS * scores.abs().masked_fill(scores.isinf(), 0.0).amax(-1, keepdim=True)
    best = scores.argmax(-1, keepdim=True)
    # Sum of the other keys: a difference loses all digits for the best key, and is exact enough for the others.
    total = scores.logsumexp(-1, keepdim=True)
    others = (total + torch.log1p(-(scores - total).exp().clamp_max(0.5))).scatter(
        -1, best, scores.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    )
    odds = (scores - others)[..., : attention.m]
    rounding = torch.maximum((odds + off).sigmoid() - weights, weights - (odds - off).sigmoid())
    return weights, torch.where(visible.any(-1, keepdim=True), rounding, 0.0)
