"""One token at every position: what then still depends on the position is rotation, and must be accounted for.

All values of a layer are then equal, so attention returns that value whatever its weights, and, unless the model
adds positions to its embeddings or is recurrent, the input of the next layer is again the same at every position.
Queries and keys before rotation must be too. This asks nothing of the model's rotary function, so it also finds
rotations that go by a name nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.learn import Plan
from wherewhat.capturing.session import capture_with

_STEP = 8
"""Positions apart at which tokens are compared: further than a convolution reaches."""


def position_drift(model: Any, plan: Plan, ids: Tensor, *, same_input: float) -> list[float]:
    """Change of queries or keys before rotation from one position to another, where nothing else changed.

    Args:
        model: The model.
        plan: How to capture it.
        ids: Tokens ``(1, n)``; the last one is used at every position.
        same_input: Relative change up to which a layer's input counts as the same at both positions.

    Returns:
        Per attention call the norm of the difference of the two directions, between 0 and 2; 0 where the layer's
        input depends on the position or there is no tensor before rotation.
    """
    n = ids.shape[1]
    now, earlier = n - 1, n - 1 - min(_STEP, n // 2)
    changes: dict[str, float] = {}
    drifts: list[float] = []
    undefined = {layer.name for layer in plan.layers if layer.rotary is None and layer.note}

    def look(attention: LayerAttention) -> None:
        known = attention.name not in undefined and changes.get(attention.name, torch.inf) <= same_input
        both = (_turned(x, now, earlier) for x in (attention.q, attention.k))
        drifts.append(max(both) if known else 0.0)

    with ExitStack() as stack:
        for name in {layer.name for layer in plan.layers}:
            hook = _input_change(changes, name, now, earlier)
            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove)
        stack.enter_context(capture_with(model, plan, look))
        model(input_ids=ids[:, -1:].expand(-1, n).contiguous(), use_cache=False)
    return drifts


def _input_change(changes: dict[str, float], name: str, now: int, earlier: int) -> Callable[..., None]:
    """Hook that notes how much a module's input ``(..., n, width)`` differs between two tokens."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        hidden = next((x for x in given if x.ndim > 1 and x.shape[-2] == now + 1), None)
        if hidden is not None:
            difference = (hidden[..., now, :] - hidden[..., earlier, :]).abs().max()
            changes[name] = float(difference / hidden.abs().max().clamp_min(1e-30))

    return hook


def _turned(x: Tensor, now: int, earlier: int) -> float:
    """How far the direction of ``x`` ``(batch, heads, n, d)`` turned between two tokens, over heads at most."""
    x = x.double()
    x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return float((x[:, :, now] - x[:, :, earlier]).norm(dim=-1).max())
