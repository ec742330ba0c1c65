"""One layer's attention as the model computed it: everything needed to rebuild its logits, nothing n by n."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wherewhat.capturing.masking import Mask, Rows
from wherewhat.capturing.rotation import Rotation


@dataclass(frozen=True)
class LayerAttention:
    """What one attention layer did with one forward pass.

    Names follow TransformerLens: ``q`` and ``k`` are before rotation, ``rot_q`` and ``rot_k`` after it,
    ``attn_scores`` the logits, ``pattern`` the attention weights. The tensors belong to the running forward
    pass: a reducer that wants to keep one must copy it.

    The logits are ``softcap(scale · rot_q · rot_kᵀ) + bias``, hidden by the mask, with ``sinks`` as one more
    column in the softmax.

    Attributes:
        layer: Index of the block in the model.
        name: Path of the attention module in the model.
        rot_q: Queries after rotation (and any norm), ``(batch, heads, n, d)``.
        rot_k: Keys after rotation, cached ones included, ``(batch, kv_heads, m, d)``.
        value: Values, ``(batch, kv_heads, m, d_v)``.
        output: Attention output per head before the output projection, ``(batch, n, heads, d_v)``.
        scale: Factor on the dot product.
        mask: Mask and additive bias.
        rotation: How queries and keys were rotated; None for layers without rotation.
        positions: Position of every key, ``(m,)`` or ``(batch, m)``; the last n are the queries'.
        softcap: ``softcap · tanh(logit / softcap)`` is applied before the mask, if given.
        sinks: Logit of the extra column each head may attend to, ``(heads,)``.
        declared_window: Sliding window the model declares for this layer, if any.
    """

    layer: int
    name: str
    rot_q: Tensor
    rot_k: Tensor
    value: Tensor
    output: Tensor
    scale: float
    mask: Mask
    rotation: Rotation | None
    positions: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None
    declared_window: int | None = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.rot_q.shape[1]

    @property
    def kv_heads(self) -> int:
        """Number of key heads; query head h reads key head ``h // (heads // kv_heads)``."""
        return self.rot_k.shape[1]

    @property
    def n(self) -> int:
        """Number of queries."""
        return self.rot_q.shape[2]

    @property
    def m(self) -> int:
        """Number of keys."""
        return self.rot_k.shape[2]

    @cached_property
    def q(self) -> Tensor:
        """Queries before rotation in the layout of ``rot_q``, ``(batch, heads, n, d)``.

        In float32 at least; ``rot_q`` itself, in the model's dtype, where the layer does not rotate.
        """
        if self.rotation is None:
            return self.rot_q
        return self.rotation.unrotate(self.rot_q, self._broadcast(self.positions[..., self.m - self.n :]))

    @cached_property
    def k(self) -> Tensor:
        """Keys before rotation in the layout of ``rot_k``, ``(batch, kv_heads, m, d)``; their dtype as for ``q``."""
        if self.rotation is None:
            return self.rot_k
        return self.rotation.unrotate(self.rot_k, self._broadcast(self.positions))

    def attn_scores(self, rows: Rows = slice(None)) -> Tensor:
        """Logits of some queries, scale, soft-cap and bias included, unmasked: ``(batch, heads, rows, m)``."""
        dtype = torch.promote_types(self.rot_q.dtype, torch.float32)
        q = self.rot_q[:, :, rows].to(dtype)
        k = self.rot_k.to(dtype)
        groups = self.heads // self.kv_heads
        batch, _, count, d = q.shape
        # One batched product per key head instead of a repeated copy of the keys.
        grouped = q.reshape(batch, self.kv_heads, groups * count, d) @ k.transpose(-1, -2)
        scores = grouped.view(batch, self.heads, count, self.m) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        bias = self.bias(rows)
        return scores if bias is None else scores + bias.to(dtype)

    def bias(self, rows: Rows = slice(None)) -> Tensor | None:
        """Additive bias (ALiBi and the like) of some queries, broadcastable to ``(batch, heads, rows, m)``."""
        return self.mask.bias(rows, self.n, self.m)

    def visible(self, rows: Rows = slice(None)) -> Tensor:
        """True where a query may see a key, broadcastable to ``(batch, heads, rows, m)``."""
        return self.mask.visible(rows, self.n, self.m)

    def pattern(self, rows: Rows = slice(None)) -> Tensor:
        """Attention weights of some queries, ``(batch, heads, rows, m)``; rows that see nothing are zero."""
        return self.weigh(self.attn_scores(rows), rows)

    def weigh(self, scores: Tensor, rows: Rows = slice(None)) -> Tensor:
        """Attention weights that logits ``(batch, heads, rows, m)`` of some queries give under the layer's mask."""
        visible = self.visible(rows)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        weights = torch.softmax(scores, -1)[..., : self.m]
        return torch.where(visible.any(-1, keepdim=True), weights, 0.0)

    @staticmethod
    def _broadcast(positions: Tensor) -> Tensor:
        """Positions ``(n,)`` or ``(batch, n)`` as something that broadcasts over heads."""
        return positions if positions.ndim == 1 else positions[:, None]
