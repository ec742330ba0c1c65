"""How well a recorded layer is reproduced from what was captured of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.calls import AttentionCall
from wherewhat.capturing.learn import LayerPlan
from wherewhat.capturing.rounding import output_excess, rounded_weights
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


def _weights_error(attention: LayerAttention, call: AttentionCall) -> float:
    """Our attention weights against the model's, beyond what rounding of its logits explains."""
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    again = call.reweigh if half else None
    weights = call.weights if again is None else again()
    if weights is None or weights.shape != (attention.rot_q.shape[0], attention.heads, attention.n, attention.m):
        return torch.inf
    dtype = call.query.dtype if again is None else torch.float32

    def error(given: LayerAttention) -> float:
        parts = ((rows, *rounded_weights(given, rows, dtype)) for rows in _blocks_of_rows(given.n))
        return max(_largest((ours - weights[:, :, rows]).abs() - rounding) for rows, ours, rounding in parts)

    if attention.sinks is None:
        return error(attention)
    # Some families return the weights before the sink takes its share; the output shows it is taken.
    return min(error(attention), error(replace(attention, sinks=None)))


def _output_error(attention: LayerAttention) -> float:
    """Our attention output against the model's, relative to the largest entry and likewise."""
    if attention.output.numel() != attention.value[0, 0, 0].numel() * attention.rot_q[..., 0].numel():
        return torch.inf
    largest = max(_largest(output_excess(attention, rows)) for rows in _blocks_of_rows(attention.n))
    return largest / float(attention.output.abs().max().clamp_min(1e-30))


def _blocks_of_rows(n: int, size: int = 256) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _largest(excess: Tensor) -> float:
    """The largest entry; zero if none is positive, and infinite if one is not a number."""
    return float(excess.nan_to_num(nan=torch.inf).max().clamp_min(0))
