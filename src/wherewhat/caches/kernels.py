"""Windowed attention with PyTorch's fused kernels, merged with a few far keys by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.caches.attention import FarKeys, query_blocks, rotated_to
from wherewhat.captures.attention import LayerAttention, shared_product
from wherewhat.numerics import has_triton

Kernel = Literal["cpu", "flash", "cudnn", "efficient"]
"""Fused kernel that returns its log-sum-exp."""

_MOST_CHUNKS = 65_535
"""Limit of a GPU in one dimension of its grid."""


def kernel_available(attention: LayerAttention, window: int) -> bool:
    """Return whether there is a fused kernel for the layer's device, dtype and shapes."""
    q = attention.rot_q
    if q.requires_grad or q.shape[-1] != attention.value.shape[-1]:
        return False
    if not q.is_cuda:
        return q.device.type == "cpu" and q.dtype == torch.float32
    chunks = q.shape[0] * -(-attention.n // window)
    known = q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and chunks <= _MOST_CHUNKS


def band_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the attention of each query ``(batch, heads, n, d)`` to the last ``window`` keys up to itself.

    Returns:
        Output ``(batch, heads, n, d)`` and log-sum-exp ``(batch, heads, n)`` of the logits, float32.
    """
    kernel = kernel or kernel_for(q)
    # In memory by tokens, as the model continues with it.
    output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for rows, own, back in window_halves(q, k, v, window=window, scale=scale, kernel=kernel):
        out, sums = own
        if back is not None:
            behind, behind_lse = (x.flip(3) for x in back)
            first = out.shape[1] - behind.shape[1]
            merge_attention(out[:, first:, :, :-1], sums[:, first:, :, :-1], behind, behind_lse)
        count, size = rows.stop - rows.start, out.shape[3]
        if count % size:
            output[:, :, rows] = _joined(out)[:, :, :count]
        else:
            _chunks(output[:, :, rows], size).copy_(out)
        lse[:, :, rows] = _joined(sums)[:, :, :count]
    return output, lse


def merge_attention(first: Tensor, first_lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention to other keys into that to some keys: outputs ``(..., d)`` and log-sum-exps ``(...)``."""
    share = torch.sigmoid(other_lse - first_lse).to(first.dtype)[..., None]
    first[...], first_lse[...] = torch.lerp(first, other.to(first.dtype), share), torch.logaddexp(first_lse, other_lse)


Half = tuple[Tensor, Tensor]
"""Output ``(batch, chunks, heads, rows, d)`` and log-sum-exp of queries over one half of their windows."""


def window_halves(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, kernel: Kernel
) -> Iterator[tuple[slice, Half, Half | None]]:
    """Compute attention to a query's own chunk, and to the part of its window in the chunk before.

    Queries are ``(batch, heads, n, d)``, keys and values ``(batch, kv_heads, n, d)``.

    Yields:
        The queries; their first half, padded to whole chunks; their second half, in reverse order of rows, without the
        last row of each chunk and without the first chunk of the text. None if no window reaches the chunk before.
    """
    n = q.shape[2]
    size = min(window, n)
    whole = n - n % size
    # The last chunk may be short; its padding comes after its queries and is not visible.
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
            # Query r of a chunk sees keys r + 1 and later of the one before: causal in reverse order.
            back_k, back_v = (_reversed(x[:, :-1, :, 1:]) for x in (keys, values))
            back = _causal(_reversed(mine[:, first:, :, :-1]), back_k, back_v, scale, kernel)
        yield slice(start, stop), own, back


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: Kernel) -> Half:
    """Compute causal attention inside every chunk, with its log-sum-exp."""
    batch, count, heads, size, _ = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    ops = torch.ops.aten
    if kernel == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)[:2]
    elif kernel == "flash":
        out, lse = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[:2]
    elif kernel == "efficient":  # it does not share keys, and its log-sum-exp is padded
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        out, lse = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)[:2]
        lse = lse[..., :size]
    else:
        out, lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]
    lse = lse.reshape(batch * count, heads, size).float()
    return torch.unflatten(out, 0, (batch, count)), torch.unflatten(lse, 0, (batch, count))


def _reversed(x: Tensor) -> Tensor:
    """Return the rows of ``x`` ``(batch, chunks, heads, rows, d)`` in reverse order."""
    if has_triton(x.device):
        from wherewhat.caches.cuda import reversed_rows

        return reversed_rows(x)
    return x.flip(3)


def kernel_for(q: Tensor) -> Kernel:
    """Return the fastest kernel for the device."""
    if not q.is_cuda:
        return "cpu"
    if q.dtype == torch.float32:
        return "efficient"
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9 and q.shape[-1] <= 128
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return "cudnn" if hopper and enabled else "flash"


def _cut(x: Tensor, start: int, stop: int, size: int) -> Tensor:
    """Return some tokens in chunks, the last one padded."""
    part = x[:, :, start:stop]
    short = -part.shape[2] % size
    return _chunks(pad(part, (0, 0, 0, short)) if short else part, size)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Return ``(batch, heads, n, d)`` as ``(batch, chunks, heads, size, d)``, without a copy."""
    return torch.unflatten(x, 2, (-1, size)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """Undo :func:`_chunks`, also for tensors without the last dimension."""
    return x.transpose(1, 2).flatten(2, 3)


MOST_FAR = 64
"""Largest number of far keys of the Triton kernel."""


def attend_by_kernels(attention: LayerAttention, window: int, far: FarKeys | None, *, block_mib: int) -> Tensor:
    """Compute the output ``(batch, n, heads, d_v)`` over the last ``window`` keys and far ones.

    Args:
        attention: One layer with a causal mask and nothing else.
        window: Keys at a smaller distance are seen at that distance.
        far: The keys beyond it, a few first ones or all; None for none.
        block_mib: Memory for the queries of one block in float32.
    """
    if attention.n <= window:
        far = None
    half = attention.rot_q.dtype != torch.float32
    if half and has_triton(attention.rot_q.device) and (far is None or far.count <= MOST_FAR):
        return attend_on_gpu(attention, window, far)
    output, _ = merged_attention(attention, window, far, block_mib=block_mib)
    return output.transpose(1, 2)


def merged_attention(
    attention: LayerAttention, window: int, far: FarKeys | None, *, block_mib: int
) -> tuple[Tensor, Tensor]:
    """Compute the same by :func:`merge_attention`.

    Returns:
        Output ``(batch, heads, n, d_v)`` and log-sum-exp ``(batch, heads, n)`` of the logits, float32.
    """
    q, k, value = attention.rot_q, attention.rot_k, attention.value
    output, lse = band_attention(q, k, value, window=window, scale=attention.scale)
    if far is None or attention.n <= window:
        return output, lse
    if far.count >= attention.m:
        # A query that is ``window`` later than another sees one key more than it: that is a causal triangle.
        i = torch.arange(window, attention.n, device=output.device)
        q = rotated_to(attention, attention.rot_q[:, :, window:], i, far.query(i))
        j = i - window
        k = rotated_to(attention, attention.rot_k[:, :, : len(j)], j, far.key(j))
        value = attention.value[:, :, : len(j)]
        q, k, value = (x.to(value.dtype)[:, None] for x in (q, k, value))
        beyond, beyond_lse = (x[:, 0] for x in _causal(q, k, value, attention.scale, kernel_for(value)))
        merge_attention(output[:, :, window:], lse[:, :, window:], beyond, beyond_lse)
        return output, lse
    rotated = _RotatedScores(attention, far)
    j = torch.arange(rotated.keys.shape[2], device=output.device)
    value = attention.value[:, :, : len(j)]
    for block in query_blocks(attention, 2 * attention.rot_q.shape[-1], block_mib=block_mib):
        rows = slice(max(block.start, window), block.stop)
        if rows.start >= rows.stop:
            continue
        i = torch.arange(rows.start, rows.stop, device=output.device)
        scores = rotated.scores(attention, rows).masked_fill(i[:, None] - j < window, -torch.inf)
        weights = torch.softmax(scores, -1).to(value.dtype)
        beyond = shared_product(weights, value)
        merge_attention(output[:, :, rows], lse[:, :, rows], beyond, scores.logsumexp(-1))
    return output, lse


def attend_on_gpu(attention: LayerAttention, window: int, far: FarKeys | None, *, lse: Tensor | None = None) -> Tensor:
    """Compute the same with a Triton kernel that merges all parts in one pass over the queries.

    The layer is in half precision, with at most ``MOST_FAR`` far keys. The log-sum-exp of the logits is written to
    ``lse`` ``(batch, heads, n)`` float32 if it is given.
    """
    from wherewhat.caches.cuda import FarTensors, merge_parts

    q, k, v = attention.rot_q, attention.rot_k, attention.value
    few: FarTensors | None = None
    output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    for rows, own, back in window_halves(q, k, v, window=window, scale=attention.scale, kernel=kernel_for(q)):
        if far is not None and few is None:  # its many small kernels are launched while attention runs
            rotated = _RotatedScores(attention, far)
            keys, turned = rotated.keys.half(), None if rotated.turned is None else rotated.turned.half()
            few = FarTensors(q, rotated.cos, rotated.sin, keys, turned, v[:, :, : keys.shape[2]], window)
        merge_parts(output.transpose(1, 2), own, back, few, start=rows.start, scale=attention.scale, lse=lse)
    return output


class _RotatedScores:
    """Logits of far keys from queries that are rotated during the multiplication.

    A query rotated by an angle is ``cos ⊙ q + sin ⊙ q'``, with q' the query rotated by 90°. Rotating the keys back by
    90° instead leaves two products of the queries, multiplied by cosines and by sines.
    """

    def __init__(self, attention: LayerAttention, far: FarKeys) -> None:
        keys = far.rotated(attention)
        self.keys = keys
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        self.turned: Tensor | None = None
        rotation = attention.rotation
        if rotation is None:
            return
        i = torch.arange(attention.n, device=keys.device)
        # The difference of two angles, not the angle of the difference: the model has rounded the second angle.
        theta = rotation.angles(far.query(i)) - rotation.angles(attention.positions.to(keys.device))
        left, right = rotation.halves
        # At least as precise as the half-precision queries, with half the memory to read.
        narrow = torch.float16 if attention.rot_q.dtype in (torch.float16, torch.bfloat16) else keys.dtype
        shape = (*theta.shape[:-1], keys.shape[-1])  # dimensions that do not rotate have an angle of 0
        self.cos = torch.ones(shape, dtype=narrow, device=keys.device)
        self.sin = torch.zeros(shape, dtype=narrow, device=keys.device)
        for by_dimension, by_plane in ((self.cos, theta.cos()), (self.sin, theta.sin())):
            by_dimension[..., left] = by_dimension[..., right] = by_plane.to(narrow)
        turned = torch.zeros_like(keys)
        turned[..., left], turned[..., right] = keys[..., right], -keys[..., left]
        self.turned = turned

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """Return the logits of some queries, ``(batch, heads, rows, c)`` float32."""
        q, dtype = attention.rot_q[:, :, rows], self.keys.dtype
        if self.cos is None or self.sin is None or self.turned is None:
            return shared_product(q.to(dtype), self.keys.mT) * attention.scale
        cos, sin = (x[..., rows, :] if x.ndim == 2 else x[:, None, rows] for x in (self.cos, self.sin))
        straight = shared_product(q.to(dtype) * cos, self.keys.mT)
        across = shared_product(q.to(dtype) * sin, self.turned.mT)
        return (straight + across) * attention.scale
