"""A window by a fused kernel and the few keys beyond it beside it, put together by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.capturing import LayerAttention
from wherewhat.extend.band import Kernel, band_attention, merged
from wherewhat.extend.far import Far, blocks


def attend_by_kernels(
    attention: LayerAttention,
    window: int,
    far: Far | None,
    keys: Tensor | None,
    *,
    block_mib: int,
    kernel: Kernel | None = None,
) -> Tensor:
    """Output ``(batch, n, heads, d_v)`` over the last ``window`` keys and a few far ones.

    Args:
        attention: One layer, causal and nothing else.
        window: Keys at a distance below it are seen at that distance.
        far: The keys beyond it; None for none.
        keys: Those keys where queries see them from, ``(batch, kv_heads, c, d)``.
        block_mib: Memory for the queries of one block in float32.
        kernel: Kernel for the window; by default the fastest for the device.
    """
    # All that waits for the device comes first, so that the work below is queued without a stop.
    turn = None if far is None or keys is None else _Turn(attention, far, keys)
    output, lse = band_attention(
        attention.rot_q, attention.rot_k, attention.value, window=window, scale=attention.scale, kernel=kernel
    )
    if turn is None or keys is None or attention.n <= window:
        return output.transpose(1, 2)
    j = torch.arange(keys.shape[2], device=output.device)
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


class _Turn:
    """Logits of far keys from queries that are turned while they are multiplied.

    A query turned by an angle is ``cos ⊙ q + sin ⊙ q'``, with q' the query turned by a right angle. Turning the keys
    backwards by it instead leaves two products of the rotated queries with a row of cosines and one of sines.
    """

    def __init__(self, attention: LayerAttention, far: Far, keys: Tensor) -> None:
        self.keys = keys.transpose(-1, -2)
        self.cos: Tensor | None = None
        rotation, d = attention.rotation, keys.shape[-1]
        if rotation is None:
            return
        i = torch.arange(attention.n, device=keys.device)
        # Two angles subtracted, not one of the difference: that is how the model rounded the first.
        theta = rotation.angles(far.query(i)) - rotation.angles(attention.positions.to(keys.device))
        left, right = (rotation.pairs[:, side].to(keys.device) for side in (0, 1))
        cos = torch.ones(*theta.shape[:-1], d, dtype=keys.dtype, device=keys.device)
        sin = torch.zeros_like(cos)
        cos[..., left] = cos[..., right] = theta.cos().to(cos.dtype)
        sin[..., left] = sin[..., right] = theta.sin().to(cos.dtype)
        turned = torch.zeros_like(keys)
        turned[..., left], turned[..., right] = keys[..., right], -keys[..., left]
        self.cos, self.sin = (x if x.ndim == 2 else x[:, None] for x in (cos, sin))
        self.turned = turned.transpose(-1, -2)

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """Logits of some queries, ``(batch, heads, rows, c)`` float32."""
        q = attention.rot_q[:, :, rows]
        if self.cos is None:
            return _times(q.to(self.keys.dtype), self.keys) * attention.scale
        straight = _times(q * self.cos[..., rows, :], self.keys)
        across = _times(q * self.sin[..., rows, :], self.turned)
        return (straight + across) * attention.scale


def _times(q: Tensor, k: Tensor) -> Tensor:
    """Queries ``(batch, heads, rows, d)`` times shared keys ``(batch, kv_heads, d, c)``."""
    batch, heads, count, d = q.shape
    return (q.reshape(batch, k.shape[1], -1, d) @ k).view(batch, heads, count, -1)
