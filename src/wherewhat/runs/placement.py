"""Run a model at chosen positions, or with hidden states in another order."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.comparison import random_prompt
from wherewhat.captures.proof import Proof
from wherewhat.errors import CaptureError, ConfigError, one_line
from wherewhat.models.loaded import max_positions

_PROBE_TOKENS = 8


def placed(model: Any, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over ``ids`` ``(batch, n)`` that put the tokens at ``positions`` ``(n,)``.

    Without a mask, transformers takes every step other than 1 for the start of another text and masks what is before.
    A mask of ones marks it as one text; windows and the causal mask follow the order of the tokens.
    """
    if positions.shape != ids.shape[1:]:
        raise ConfigError(f"{positions.shape[-1]} positions were given for {ids.shape[1]} tokens: give one for each")
    low, high = int(positions.min()), int(positions.max())
    if low < 0:
        raise ConfigError(f"position {low} is negative: positions start at 0")
    limit, hard = max_positions(model)
    if hard and limit is not None and high >= limit:
        raise ConfigError(f"position {high} is beyond the last of the model's {limit} positions: ask for fewer tokens")
    return {
        "position_ids": positions.to(ids.device)[None].expand(ids.shape),
        "attention_mask": torch.ones_like(ids),
    }


@contextmanager
def computing(model: Any, positions: Tensor | None) -> Iterator[None]:
    """Turn the error of a model that cannot run at given positions into a CaptureError of one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        if positions is None:
            raise
        reason = one_line(error)
        raise CaptureError(
            f"{type(model).__name__} cannot be run at other positions ({reason}): leave kinds of positions out"
        ) from error


def positions_refused(model: Any) -> str:
    """Return in one line why the positions of tokens cannot be set in a model; empty if they can.

    A short pass with reversed positions must differ from a plain one, and one with the usual positions must not.
    """
    kind = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"{kind} takes no position_ids: positions cannot be perturbed; leave kinds of positions out"
    ids = random_prompt(model, _PROBE_TOKENS)
    usual = torch.arange(_PROBE_TOKENS, device=ids.device)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits.float()
        same = model(input_ids=ids, use_cache=False, **placed(model, ids, usual)).logits.float()
        other = model(input_ids=ids, use_cache=False, **placed(model, ids, usual.flip(0))).logits.float()
    size = float(plain.abs().max().clamp_min(1e-30))
    rounding = 1e-4 if next(model.parameters()).element_size() >= 4 else 2e-2
    if float((same - plain).abs().max()) > rounding * size:
        return f"{kind} changes its output when it is given its default positions: positions cannot be perturbed"
    if float((other - plain).abs().max()) <= 1e-6 * size:
        return f"{kind} ignores position_ids (ALiBi or no positions): leave kinds of positions out"
    return ""


@contextmanager
def reordered(model: nn.Module, proof: Proof, orders: Mapping[int, Tensor]) -> Iterator[None]:
    """Permute the hidden states that enter blocks until the context ends.

    Args:
        model: The model.
        proof: Its proof, which names its blocks.
        orders: Order ``(n,)`` by index of the block: position i takes the hidden state of token ``order[i]``.
    """
    # All blocks are looked up before the first hook, so that an error leaves the model unchanged.
    blocks = {layer: _block(model, proof, layer) for layer in orders}
    with ExitStack() as stack:
        for layer, block in blocks.items():
            hook = _permuting(layer, orders[layer])
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _block(model: nn.Module, proof: Proof, layer: int) -> nn.Module:
    """Return the block of a layer's attention: the numbered module that contains it."""
    plans = [plan for plan in proof.plan.layers if plan.layer == layer]
    if not plans:
        known = sorted(plan.layer for plan in proof.plan.layers)
        raise ConfigError(f"there is no layer {layer} with attention: choose one from {known[0]} to {known[-1]}")
    name = plans[0].name
    found = re.match(r"(.*\.\d+)\.", name)
    if found is None or sum(plan.name == name for plan in proof.plan.layers) > 1:
        raise CaptureError(f"{name} is not in its own block: its input cannot be reordered")
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
