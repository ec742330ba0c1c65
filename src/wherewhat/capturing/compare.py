"""How well a recorded layer is reproduced from what was captured of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.calls import AttentionCall
from wherewhat.capturing.learn import LayerPlan
from wherewhat.capturing.session import describe

_ROUNDINGS = 3
"""How often a logit is rounded to the model's dtype: after the product, the scale and the bias."""


@dataclass(frozen=True)
class LayerProof:
    """How well one layer was reproduced.

    Attributes:
        plan: The layer and its rotation.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Dimension of queries and keys.
        rotation_error: Our rotation of the model's pre-rotation tensors against its post-rotation ones, relative.
        weights_error: Softmax of our logits under the model's mask against its own eager attention weights.
        output_error: Our attention output against the model's in its normal implementation, relative.
        drift: How far queries or keys before rotation turn with the position alone, see
            :func:`~wherewhat.capturing.same_token.position_drift`.
        features: What else shapes its logits: ``bias``, ``soft-cap``, ``sinks``, ``window`` (or chunk), ``not causal``.
    """

    plan: LayerPlan
    heads: int
    kv_heads: int
    head_dim: int
    rotation_error: float
    weights_error: float
    output_error: float
    drift: float
    features: tuple[str, ...]


def layer_proof(plan: LayerPlan, native: AttentionCall, eager: AttentionCall, drift: float) -> LayerProof:
    """Compare one layer's attention, in its normal and in its eager implementation, with ours."""
    positions = torch.arange(native.key.shape[2], device=native.key.device)
    normal, slow = describe(plan, native, positions), describe(plan, eager, positions)
    return LayerProof(
        plan=plan,
        heads=normal.heads,
        kv_heads=normal.kv_heads,
        head_dim=normal.rot_q.shape[-1],
        rotation_error=0.0 if plan.rotary is None else plan.rotary.error,
        weights_error=_weights_error(slow, eager),
        output_error=_output_error(normal),
        drift=drift,
        features=tuple(_features(normal)),
    )


def _features(attention: LayerAttention) -> Iterator[str]:
    visible = attention.visible()
    bias = attention.bias()
    if bias is not None and bool((bias * visible).any()):
        yield "bias"
    if attention.softcap is not None:
        yield "soft-cap"
    if attention.sinks is not None:
        yield "sinks"
    causal = torch.ones(attention.n, attention.m, dtype=torch.bool, device=visible.device).tril(
        attention.m - attention.n
    )
    if bool((causal & ~visible).any()):
        yield "window"
    if bool((visible & ~causal).any()):
        yield "not causal"


def _weights_error(attention: LayerAttention, call: AttentionCall) -> float:
    """Our attention weights against the model's, beyond what rounding of its logits explains."""
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    again = half and call.reweigh is not None
    weights = call.reweigh() if again and call.reweigh is not None else call.weights
    if weights is None or weights.shape != (attention.rot_q.shape[0], attention.heads, attention.n, attention.m):
        return torch.inf
    ours, rounding = _weights(attention, torch.float32 if again else call.query.dtype)
    error = _largest((ours - weights).abs() - rounding)
    if attention.sinks is not None:
        # Some families return the weights before the sink takes its share; the output shows it is taken.
        without = ours / ours.sum(-1, keepdim=True)
        error = min(error, _largest((without - weights).abs() - rounding))
    return error


def _output_error(attention: LayerAttention) -> float:
    """Our attention output against the model's, relative to the largest entry and likewise."""
    groups = attention.heads // attention.value.shape[1]
    pattern, rounding = _weights(attention, attention.rot_q.dtype)
    value = attention.value.to(pattern.dtype).repeat_interleave(groups, 1)
    ours = (pattern @ value).transpose(1, 2)
    theirs = attention.output.to(pattern.dtype)
    if theirs.numel() != ours.numel():
        return torch.inf
    theirs = theirs.reshape(ours.shape)
    explained = (rounding @ value.abs()).transpose(1, 2)
    return _largest((ours - theirs).abs() - explained) / float(theirs.abs().max().clamp_min(1e-30))


def _largest(excess: Tensor) -> float:
    """The largest entry; zero if none is positive, and not a number if one is not."""
    return float(excess.max().clamp_min(0))


def _weights(attention: LayerAttention, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention weights, and by how much each may differ where logits are rounded to ``dtype`` on their way.

    If every logit is off by at most δ, a weight p moves by at most p·(1 - p)·s / (1 + min(p, 1 - p)·s) with
    s = e²ᵟ - 1: not at all where a query is sure of its key, however large its logits and thus their rounding.
    """
    scores, visible = attention.attn_scores(), attention.visible()
    weights = attention.weigh(scores)
    largest = scores.abs().masked_fill(~visible, 0.0).amax(-1, keepdim=True)
    spread = torch.expm1(torch.finfo(dtype).eps * _ROUNDINGS * largest).clamp(1e-30, 1e30)
    return weights, weights * (1 - weights) / (1 / spread + torch.minimum(weights, 1 - weights))
