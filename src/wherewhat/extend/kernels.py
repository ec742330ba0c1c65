"""A window by a fused kernel and the few keys beyond it beside it, put together by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.capturing import LayerAttention
from wherewhat.extend.band import Kernel, band_attention, kernel_for, merged, two_halves
from wherewhat.extend.far import Far, blocks, far_keys
from wherewhat.gpu import has_triton

_MOST_FAR = 64
"""Far keys that the one pass of a GPU takes."""


def attend_by_kernels(
    attention: LayerAttention,
    window: int,
    far: Far | None,
    *,
    block_mib: int,
    kernel: Kernel | None = None,
) -> Tensor:
    """Output ``(batch, n, heads, d_v)`` over the last ``window`` keys and a few far ones.

    Args:
        attention: One layer, causal and nothing else.
        window: Keys at a distance below it are seen at that distance.
        far: The keys beyond it; None for none.
        block_mib: Memory for the queries of one block in float32.
        kernel: Kernel for the window; by default the fastest for the device.
    """
    if attention.n <= window:
        far = None
    if kernel is None and has_triton(attention.rot_q.device) and (far is None or far.count <= _MOST_FAR):
        return _attend_on_gpu(attention, window, far)
    output, lse = band_attention(
        attention.rot_q, attention.rot_k, attention.value, window=window, scale=attention.scale, kernel=kernel
    )
    if far is None:
        return output.transpose(1, 2)
    turn = _Turn(attention, far)
    j = torch.arange(turn.keys.shape[-1], device=output.device)
    value = attention.value[:, :, : len(j)]
    for block in blocks(attention, 2 * attention.rot_q.shape[-1], block_mib=block_mib):
        rows = slice(max(block.start, window), block.stop)
        if rows.start >= rows.stop:
            continue
        i = torch.arange(rows.start, rows.stop, device=output.device)
        scores = turn.scores(attention, rows).masked_fill(i[:, None] - j < window, -torch.inf)
        weights = torch.softmax(scores, -1).to(value.dtype)
        batch, heads, count, columns = weights.shape
        beyond = (weights.view(batch, value.shape[1], -1, columns) @ value).view(batch, heads, count, -1)
        output[:, :, rows] = merged(output[:, :, rows], lse[:, :, rows], beyond, scores.logsumexp(-1))[0]
    return output.transpose(1, 2)


def _attend_on_gpu(attention: LayerAttention, window: int, far: Far | None) -> Tensor:
    """The same with all parts put together in one pass over the queries."""
    from wherewhat.extend.cuda.together import FarKeys, put_together

    q, k, v = attention.rot_q, attention.rot_k, attention.value
    few: FarKeys | None = None
    if far is not None:
        turn = _Turn(attention, far)
        keys, turned = turn.keys.mT.half(), None if turn.turned is None else turn.turned.mT.half()
        few = FarKeys(q, turn.cos, turn.sin, keys, turned, v[:, :, : keys.shape[2]], window)
    output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    for rows, own, back in two_halves(q, k, v, window=window, scale=attention.scale, kernel=kernel_for(q)):
        put_together(output.transpose(1, 2), own, back, few, start=rows.start, scale=attention.scale)
    return output


class _Turn:
    """Logits of far keys from queries that are turned while they are multiplied.

    A query turned by an angle is ``cos ⊙ q + sin ⊙ q'``, with q' the query turned by a right angle. Turning the keys
    backwards by it instead leaves two products of the rotated queries with a row of cosines and one of sines.
    """

    def __init__(self, attention: LayerAttention, far: Far) -> None:
        keys = far_keys(attention, far)
        self.keys = keys.transpose(-1, -2)
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        self.turned: Tensor | None = None
        rotation, d = attention.rotation, keys.shape[-1]
        if rotation is None:
            return
        i = torch.arange(attention.n, device=keys.device)
        # Two angles subtracted, not one of the difference: that is how the model rounded the first.
        theta = rotation.angles(far.query(i)) - rotation.angles(attention.positions.to(keys.device))
        left, right = (rotation.pairs[:, side].to(keys.device) for side in (0, 1))
        plane = torch.full((d,), theta.shape[-1], device=keys.device)  # dimensions that do not rotate
        plane[left] = plane[right] = torch.arange(len(left), device=keys.device)
        by_dimension = pad(theta, (0, 1)).index_select(-1, plane)
        # As precise as the half-precision queries they are multiplied with, and more; half the memory to read.
        narrow = torch.float16 if attention.rot_q.dtype in (torch.float16, torch.bfloat16) else keys.dtype
        self.cos, self.sin = by_dimension.cos().to(narrow), by_dimension.sin().to(narrow)
        turned = torch.zeros_like(keys)
        turned[..., left], turned[..., right] = keys[..., right], -keys[..., left]
        self.turned = turned.transpose(-1, -2)

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """Logits of some queries, ``(batch, heads, rows, c)`` float32."""
        q, dtype = attention.rot_q[:, :, rows], self.keys.dtype
        if self.cos is None or self.sin is None or self.turned is None:
            return _times(q.to(dtype), self.keys) * attention.scale
        cos, sin = (x[..., rows, :] if x.ndim == 2 else x[:, None, rows] for x in (self.cos, self.sin))
        straight, across = _times(q.to(dtype) * cos, self.keys), _times(q.to(dtype) * sin, self.turned)
        return (straight + across) * attention.scale


def _times(q: Tensor, k: Tensor) -> Tensor:
    """Queries ``(batch, heads, rows, d)`` times shared keys ``(batch, kv_heads, d, c)``."""
    batch, heads, count, d = q.shape
    return (q.reshape(batch, k.shape[1], -1, d) @ k).view(batch, heads, count, -1)
