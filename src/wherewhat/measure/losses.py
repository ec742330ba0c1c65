"""Next-token losses, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1024
"""Tokens whose logits are held in float32 at a time."""


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
