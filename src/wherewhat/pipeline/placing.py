"""Tokens at positions of one's choice: what a model must be given for it, and whether it listens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing.passes import prompt
from wherewhat.errors import CaptureError, ConfigError, one_line
from wherewhat.positions import max_positions

_PROBE_TOKENS = 8


def placed(model: Any, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward pass over ``ids`` ``(batch, n)`` that put the tokens at ``positions`` ``(n,)``.

    Without a mask, transformers takes every step other than 1 for the start of another text and hides what is before.
    A mask of ones says that it is one text; windows and causality stay those of the tokens' order.

    Raises:
        ConfigError: If the model has no such positions, or there is not one for each token.
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
    """Say in one line that a model breaks at positions it was not made for, such as with gaps among them.

    Raises:
        CaptureError: In the place of torch's own error.
    """
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
    """Why the positions of tokens cannot be set in a model, in one line; empty if they can.

    A short pass with reversed positions must differ from a plain one, and one with the usual positions must not.
    """
    kind = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"{kind} takes no position_ids: positions cannot be perturbed; leave kinds of positions out"
    ids = prompt(model, _PROBE_TOKENS)
    usual = torch.arange(_PROBE_TOKENS, device=ids.device)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits.float()
        same = model(input_ids=ids, use_cache=False, **placed(model, ids, usual)).logits.float()
        other = model(input_ids=ids, use_cache=False, **placed(model, ids, usual.flip(0))).logits.float()
    size = float(plain.abs().max().clamp_min(1e-30))
    rounding = 1e-4 if next(model.parameters()).element_size() >= 4 else 2e-2
    if float((same - plain).abs().max()) > rounding * size:
        return f"{kind} changes when it is told the positions it has anyway: positions cannot be perturbed"
    if float((other - plain).abs().max()) <= 1e-6 * size:
        return f"{kind} ignores position_ids (ALiBi or no positions): leave kinds of positions out"
    return ""
