"""How well a recorded layer is reproduced from what was captured of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.calls import AttentionCall
from wherewhat.capturing.learn import LayerPlan
from wherewhat.capturing.session import describe


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
        window: Sliding window the model declares for it, also where the proof's prompt does not reach it.
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
    window: int | None = None


def layer_proof(plan: LayerPlan, native: AttentionCall, eager: AttentionCall, drift: float) -> LayerProof:
    """Compare one layer's attention, in its normal and in its eager implementation, with ours."""
    positions = torch.arange(native.key.shape[2], device=native.key.device)
    normal, slow = describe(plan, native, positions), describe(plan, eager, positions)
    half = eager.query.dtype in (torch.float16, torch.bfloat16)
    weights = eager.reweigh() if half and eager.reweigh is not None else eager.weights
    weights_error = torch.inf
    if weights is not None and weights.shape == (slow.rot_q.shape[0], slow.heads, slow.n, slow.m):
        ours = slow.pattern()
        weights_error = float((ours - weights).abs().max())
        if slow.sinks is not None:
            # Some families return the weights before the sink takes its share; the output shows it is taken.
            without = ours / ours.sum(-1, keepdim=True)
            weights_error = min(weights_error, float((without - weights).abs().max()))
    return LayerProof(
        plan=plan,
        heads=normal.heads,
        kv_heads=normal.kv_heads,
        head_dim=normal.rot_q.shape[-1],
        rotation_error=0.0 if plan.rotary is None else plan.rotary.error,
        weights_error=weights_error,
        output_error=_output_error(normal),
        drift=drift,
        features=tuple(_features(normal)),
        window=normal.declared_window,
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


def _output_error(attention: LayerAttention) -> float:
    """Our attention output against the model's, relative to the largest entry."""
    groups = attention.heads // attention.value.shape[1]
    pattern = attention.pattern()
    value = attention.value.to(pattern.dtype).repeat_interleave(groups, 1)
    ours = (pattern @ value).transpose(1, 2)
    theirs = attention.output.to(pattern.dtype)
    if theirs.numel() != ours.numel():
        return torch.inf
    theirs = theirs.reshape(ours.shape)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
