"""Vectors of tokens on a GPU, whose backward pass repeats bit by bit.

Torch adds up the gradients of a token's vector in whatever order its threads finish. With few tokens in the vocabulary
the same sum is a matrix product, which has one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def look_up(tokens: Tensor, vectors: Tensor) -> Tensor:
    """Vectors ``(batch, n, width)`` of ``tokens`` ``(batch, n)`` from a table ``(vocabulary, width)``."""
    found: Tensor = _LookUp.apply(tokens, vectors)  # type: ignore[no-untyped-call]
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.count = len(vectors)
        return functional.embedding(tokens, vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            chosen = functional.one_hot(tokens.flatten(), ctx.count).to(grad.dtype)
            return None, chosen.mT @ grad.flatten(0, 1)
