"""One token at every position: what then still depends on the position is rotation, and must be accounted for.

Each attention module is given the same hidden states at every position, whatever embeddings and other layers add to
them. Queries and keys before rotation must then be the same too. This asks nothing of the model's rotary function, so
it also finds rotations that go by a name nobody knows.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.learn import Plan
from wherewhat.capturing.session import capture_with

_STEP = 8
"""Positions apart at which tokens are compared: further than a convolution reaches."""


def position_drift(model: Any, plan: Plan, ids: Tensor) -> list[float]:
    """Change of queries or keys before rotation from one position to another, where nothing else changed.

    Args:
        model: The model.
        plan: How to capture it.
        ids: Tokens ``(1, n)``; the last one is used at every position.

    Returns:
        Per attention call the norm of the difference of the two directions, between 0 and 2; 0 where there is no
        tensor before rotation.
    """
    n = ids.shape[1]
    now, earlier = n - 1, n - 1 - min(_STEP, n // 2)
    drifts: list[float] = []
    undefined = {layer.name for layer in plan.layers if layer.rotary is None and layer.note}

    def look(attention: LayerAttention) -> None:
        both = (_turned(x, now, earlier) for x in (attention.q, attention.k))
        drifts.append(0.0 if attention.name in undefined else max(both))

    with ExitStack() as stack:
        for name in {layer.name for layer in plan.layers}:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(_repeat_last_token, with_kwargs=True).remove)
        stack.enter_context(capture_with(model, plan, look))
        model(input_ids=ids[:, -1:].expand(-1, n).contiguous(), use_cache=False)
    return drifts


def _repeat_last_token(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook that gives a module the last token's hidden states ``(1, n, width)`` at every position.

    They differ between positions where embeddings or other layers know of positions, in ways that cannot be told from
    rounding: next to one channel a thousand times larger, those of a learned position are as small.
    """

    def repeated(x: Any) -> Any:
        hidden = isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3
        return x[:, -1:].expand_as(x).contiguous() if hidden else x

    return tuple(map(repeated, args)), {name: repeated(x) for name, x in kwargs.items()}


def _turned(x: Tensor, now: int, earlier: int) -> float:
    """How far the direction of ``x`` ``(batch, heads, n, d)`` turned between two tokens, over heads at most."""
    x = x.double()
    x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return float((x[:, :, now] - x[:, :, earlier]).norm(dim=-1).max())
