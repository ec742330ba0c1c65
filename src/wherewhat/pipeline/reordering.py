"""Hidden states in another order: what enters a block of a running model is permuted over tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from wherewhat.capturing import Proof
from wherewhat.errors import CaptureError, ConfigError


@contextmanager
def reordered(model: nn.Module, proof: Proof, orders: Mapping[int, Tensor]) -> Iterator[None]:
    """Permute the hidden states that enter blocks until the context ends.

    Args:
        model: The model.
        proof: Its proof, which knows where its blocks are.
        orders: By index of the block, ``(n,)``: place i takes the hidden state of token ``order[i]``.

    Raises:
        ConfigError: If there is no such block.
        CaptureError: If the block cannot be told from others, or takes no hidden states.
    """
    # All found before the first is hooked: a refusal leaves the model as it was.
    blocks = {layer: _block(model, proof, layer) for layer in orders}
    with ExitStack() as stack:
        for layer, block in blocks.items():
            hook = _permuting(layer, orders[layer])
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _block(model: nn.Module, proof: Proof, layer: int) -> nn.Module:
    """The block around a layer's attention: the numbered module it is in."""
    plans = [plan for plan in proof.plan.layers if plan.layer == layer]
    if not plans:
        known = sorted(plan.layer for plan in proof.plan.layers)
        raise ConfigError(f"there is no layer {layer} with attention: choose of {known[0]} to {known[-1]}")
    name = plans[0].name
    found = re.match(r"(.*\.\d+)\.", name)
    if found is None or sum(plan.name == name for plan in proof.plan.layers) > 1:
        raise CaptureError(f"{name} is not in a block of its own: what enters it cannot be reordered")
    return model.get_submodule(found[1])


def _permuting(layer: int, order: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = (kwargs.get("hidden_states"), *args)
        before = next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)
        if before is None or before.ndim != 3 or before.shape[1] != len(order):
            shape = "nothing" if before is None else f"a tensor {tuple(before.shape)}"
            raise CaptureError(f"layer {layer} is entered by {shape}, not by hidden states of {len(order)} tokens")
        after = before[:, order.to(before.device)]
        return (
            tuple(after if x is before else x for x in args),
            {name: after if x is before else x for name, x in kwargs.items()},
        )

    return hook
