"""Next-token losses, token by token."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

_BLOCK = 1024
"""Tokens whose logits are held in float32 at a time."""

_HALF = 2e-2
"""Precision of a loss in half precision, where models round to three digits what a replacement computes in float32."""


def allowed_change(untouched: float, dtypes: Collection[torch.dtype], precision: float) -> float:
    """Largest change of a loss, in nats, through a replacement that changes nothing.

    Args:
        untouched: Loss of the untouched model. Logits, and so losses above one, are as precise as they are large.
        dtypes: Types that the model computes in.
        precision: Share of the loss, of one nat at least, that may change in float32.
    """
    half = any(torch.finfo(dtype).eps > torch.finfo(torch.float32).eps for dtype in dtypes)
    return (_HALF if half else precision) * max(1.0, untouched)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Loss of every token but the first, by the place it is foretold from, ``(n - 1,)`` float64 on the CPU.

    Args:
        logits: Logits ``(1, n or n - 1, vocabulary)``.
        ids: Tokens ``(1, n)``.
    """
    targets = ids[0, 1:].to(logits.device)
    predicting = logits[0, : len(targets)]
    parts = [
        torch.nn.functional.cross_entropy(predicting[i : i + _BLOCK].float(), targets[i : i + _BLOCK], reduction="none")
        for i in range(0, len(targets), _BLOCK)
    ]
    return torch.cat(parts).double().cpu()


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    """Mean cross-entropy of the next token, in nats; arguments as for :func:`token_losses`."""
    return float(token_losses(logits, ids).mean())
