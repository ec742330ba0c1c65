"""GPU kernels of the small model: attention and embedding lookup with reproducible gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import deterministic

from wherewhat_lab.encodings import PositionTables

_FILLING: Any = deterministic  # its class is changed at import, so type checkers do not know its attribute
_HALF = (torch.bfloat16, torch.float16)
_EXACT = 256
"""Integers up to this are exact in bfloat16."""
_STEP = 8
"""The kernel's widths are multiples of this."""


def is_half(x: Tensor) -> bool:
    """Return whether products with ``x`` are in half precision, by its dtype or by autocast."""
    return x.dtype in _HALF or torch.is_autocast_enabled(x.device.type)


def fits_flash(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernel can be used: half precision, on a GPU, as many queries as keys."""
    return q.is_cuda and q.dtype in _HALF and q.shape[2] == k.shape[2]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, tables: PositionTables, *, scale: float) -> Tensor:
    """Return the output of causal attention, ``(batch, heads, n, d_v)``.

    Args:
        q: Queries after rotation, ``(batch, heads, n, d)``.
        k: Keys after rotation, the same shape.
        v: Values, ``(batch, heads, n, d_v)``.
        tables: Position tables of the layer.
        scale: Factor on the dot products.
    """
    output: Tensor = _Flash.apply(*widen(q, k, v, tables, scale=scale), scale)  # type: ignore[no-untyped-call]
    return output[..., : v.shape[-1]]


def widen(q: Tensor, k: Tensor, v: Tensor, tables: PositionTables, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one width, with ALiBi's bias as further dimensions of q and k."""
    if tables.slopes is not None:
        of_queries, of_keys = _bias_columns(tables, scale, q.dtype)
        q = torch.cat([q, of_queries.expand(*q.shape[:3], -1)], -1)
        k = torch.cat([k, of_keys.expand(*k.shape[:3], -1)], -1)
    width = -(-max(q.shape[-1], v.shape[-1]) // _STEP) * _STEP
    q, k, v = (x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def _bias_columns(tables: PositionTables, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return columns to append to queries, ``(heads, 1, 4)``, and keys, ``(n, 4)``, whose product is ALiBi's bias."""
    assert tables.slopes is not None
    slopes = tables.slopes / scale
    rounded = slopes.to(dtype)
    left = (slopes - rounded).to(dtype)
    rest = tables.positions % _EXACT
    keys = torch.stack([tables.positions - rest, rest], -1).to(dtype)
    return torch.stack([rounded, rounded, left, left], -1)[:, None], keys.repeat(1, 2)


class _Flash(torch.autograd.Function):
    """The flash attention kernel with a deterministic backward pass.

    With deterministic algorithms enabled globally, torch refuses matrix products unless an environment variable was set
    before the process started.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """``(batch, heads, n, d)``."""
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
        output, sums, first_q, first_k, longest_q, longest_k, seed, offset, _ = results
        ctx.save_for_backward(q, k, v, output, sums, first_q, first_k, seed, offset)
        ctx.longest, ctx.scale = (longest_q, longest_k), scale
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        q, k, v, output, sums, first_q, first_k, seed, offset = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        rest = (sums, first_q, first_k, *ctx.longest, 0.0, True, seed, offset)
        with _repeatable():
            return (*backward(grad, q, k, v, output, *rest, scale=ctx.scale), None)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Use kernels with a fixed order of summation, without filling uninitialised memory."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling = _FILLING.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _FILLING.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _FILLING.fill_uninitialized_memory = filling


def look_up(tokens: Tensor, vectors: Tensor) -> Tensor:
    """Return vectors ``(batch, n, width)`` of ``tokens`` ``(batch, n)`` from a table ``(vocabulary, width)``."""
    embeddings: Tensor = _LookUp.apply(tokens, vectors)  # type: ignore[no-untyped-call]
    return embeddings


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
