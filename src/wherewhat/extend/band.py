"""Attention to the last keys only, by the fused kernels of PyTorch and without a multiplication too many.

The text is cut into chunks as long as the window. A query sees its own chunk up to itself, which is causal attention,
and what is left of the window in the chunk before, which is causal attention read backwards. Both run as one batch of
chunks, and their outputs are put together by their log-sum-exp: exact, time O(n · window), memory O(n).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.capturing import LayerAttention
from wherewhat.gpu import has_triton

Kernel = Literal["cpu", "flash", "cudnn", "banded"]
"""Fused kernel that gives its log-sum-exp; ``banded`` is flash attention with a window of its own, without chunks."""

_MOST_CHUNKS = 65_535
"""A GPU starts no more in one dimension of its grid."""


def runs_here(attention: LayerAttention, window: int) -> bool:
    """Whether there is a fused kernel for the layer's device, dtype and shapes."""
    q = attention.rot_q
    if q.requires_grad or q.shape[-1] != attention.value.shape[-1]:
        return False
    if not q.is_cuda:
        return q.device.type == "cpu" and q.dtype == torch.float32
    chunks = q.shape[0] * -(-attention.n // window)
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and chunks <= _MOST_CHUNKS


def band_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the last ``window`` keys up to itself.

    Args:
        q: Queries ``(batch, heads, n, d)``.
        k: Keys ``(batch, kv_heads, n, d)``.
        v: Values ``(batch, kv_heads, n, d)``.
        window: Number of keys a query sees, itself included.
        scale: Factor on the dot product.
        kernel: Which kernel; by default the fastest for the device.

    Returns:
        Output ``(batch, heads, n, d)`` and log-sum-exp ``(batch, heads, n)`` of the logits, float32.
    """
    kernel = kernel or kernel_for(q)
    if kernel == "banded":
        n = q.shape[2]
        by_token = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.ops.aten._flash_attention_forward(
            *by_token, None, None, n, n, 0.0, True, False, scale=scale, window_size_left=window - 1, window_size_right=0
        )
        return found[0].transpose(1, 2), found[1].float()
    # Token by token in memory, as the model goes on with it.
    output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for rows, own, back in two_halves(q, k, v, window=window, scale=scale, kernel=kernel):
        out, sums = own
        if back is not None:
            behind, behind_lse = (x.flip(3) for x in back)
            first = out.shape[1] - behind.shape[1]
            part, part_lse = out[:, first:, :, :-1], sums[:, first:, :, :-1]
            part[...], part_lse[...] = merged(part, part_lse, behind, behind_lse)
        count, size = rows.stop - rows.start, out.shape[3]
        if count % size:
            output[:, :, rows] = _joined(out)[:, :, :count]
        else:
            _chunks(output[:, :, rows], size).copy_(out)
        lse[:, :, rows] = _joined(sums)[:, :, :count]
    return output, lse


def merged(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: outputs ``(..., d)``, log-sum-exps ``(...)``."""
    share = torch.sigmoid(other_lse - one_lse).to(one.dtype)[..., None]
    return torch.lerp(one, other.to(one.dtype), share), torch.logaddexp(one_lse, other_lse)


Half = tuple[Tensor, Tensor]
"""Output ``(batch, chunks, heads, rows, d)`` and log-sum-exp of queries over one half of their windows."""


def two_halves(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, kernel: Kernel
) -> Iterator[tuple[slice, Half, Half | None]]:
    """Attention to the own chunk, and to what is left of the window in the chunk before.

    Args:
        q: Queries ``(batch, heads, n, d)``.
        k: Keys ``(batch, kv_heads, n, d)``.
        v: Values ``(batch, kv_heads, n, d)``.
        window: Number of keys a query sees.
        scale: Factor on the dot product.
        kernel: One of those that work in chunks.

    Yields:
        Which queries; their first half, filled up to whole chunks; their second half, in which each chunk lacks its
        last row and the rows stand in reverse order, and which lacks the first chunk of the text. None if nothing is
        left in the chunk before.
    """
    n = q.shape[2]
    size = min(window, n)
    whole = n - n % size
    # The last chunk may be short; its padding comes after its queries and is never seen.
    for start, stop in ((0, whole), (whole, n)):
        if start == stop:
            continue
        before = max(0, start - size)
        mine, keys, values = _cut(q, start, stop, size), _cut(k, before, stop, size), _cut(v, before, stop, size)
        skip = keys.shape[1] - mine.shape[1]
        own = _causal(mine, keys[:, skip:], values[:, skip:], scale, kernel)
        first = 1 - skip  # the first chunk of a text has none before it
        back: Half | None = None
        if mine.shape[1] > first and size > 1:
            # Query r of a chunk sees keys r + 1 and later of the one before: backwards, a triangle again.
            back_k, back_v = (_reversed(x[:, :-1, :, 1:]) for x in (keys, values))
            back = _causal(_reversed(mine[:, first:, :, :-1]), back_k, back_v, scale, kernel)
        yield slice(start, stop), own, back


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: Kernel) -> Half:
    """Causal attention inside every chunk, with its log-sum-exp."""
    batch, count, heads, size, _ = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    ops = torch.ops.aten
    if kernel == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)[:2]
    elif kernel == "flash":
        out, lse = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[:2]
    else:
        out, lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]
    lse = lse.reshape(batch * count, heads, size).float()
    return torch.unflatten(out, 0, (batch, count)), torch.unflatten(lse, 0, (batch, count))


def _reversed(x: Tensor) -> Tensor:
    """Rows of ``x`` ``(batch, chunks, heads, rows, d)`` in reverse order."""
    if has_triton(x.device):
        from wherewhat.extend.cuda.reverse import reversed_rows

        return reversed_rows(x)
    return x.flip(3)


def kernel_for(q: Tensor) -> Kernel:
    """The fastest kernel for the device."""
    if not q.is_cuda:
        return "cpu"
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9 and q.shape[-1] <= 128
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return "cudnn" if hopper and enabled else "flash"


def _cut(x: Tensor, start: int, stop: int, size: int) -> Tensor:
    """Some tokens in chunks, the last one filled up."""
    part = x[:, :, start:stop]
    short = -part.shape[2] % size
    return _chunks(pad(part, (0, 0, 0, short)) if short else part, size)


def _chunks(x: Tensor, size: int) -> Tensor:
    """``(batch, heads, n, d)`` as ``(batch, chunks, heads, size, d)``, without a copy."""
    return torch.unflatten(x, 2, (-1, size)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """The reverse of :func:`_chunks`, also without the last dimension."""
    return x.transpose(1, 2).flatten(2, 3)
