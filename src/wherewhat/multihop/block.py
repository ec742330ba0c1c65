"""One layer of GPT-J: attention and MLP side by side, from the same normalised input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.dropout import LayerMasks
from wherewhat.multihop.places import Place

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values after rotation, ``(batch, heads, n, d)``; queries may be those of the last token alone."""

EditOutput = Callable[[Tensor], Tensor | None]


class Block(nn.Module):
    """One layer; weights are named after what they do, queries, keys and values in one matrix."""

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.residual = config.residual
        self.scale = config.head_width**-0.5 if config.scale is None else config.scale
        self.norm: nn.Module = nn.LayerNorm(width) if config.norm else nn.Identity()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width) if config.mlp else None
        self.mlp_out = nn.Linear(4 * width, width) if config.mlp else None

    def forward(
        self, x: Tensor, place: Place, *, masks: LayerMasks | None, last: bool, edit: EditOutput | None = None
    ) -> Tensor:
        """The residual stream after the layer.

        Args:
            x: The stream before it, ``(batch, n, width)``.
            place: What positions do here.
            masks: Factors of dropout; None for none.
            last: Whether only the last token is wanted: ``(batch, 1, width)`` comes out.
            edit: Given what attention gives before the output projection, ``(batch, n, heads, d)``, may return
                something in its place.
        """
        normed = self.norm(x)
        attended = self.attend(self.project(normed, place, last=last), place, masks)
        if edit is not None:
            replaced = edit(attended)
            attended = attended if replaced is None else replaced
        if last:
            x, normed = x[:, -1:], normed[:, -1:]
        return self.combine(x, normed, attended, masks)

    def project(self, normed: Tensor, place: Place, *, last: bool) -> Heads:
        """Rotated queries, rotated keys and values of the normalised stream ``(batch, n, width)``."""
        n = normed.shape[1]
        if not last:
            qk, v = torch.split(self._apart(self.qkv(normed), 3), [2, 1], dim=2)
            q, k = _turned(qk, place.turn).unbind(2)
        else:
            of_q, of_kv = torch.split(self.qkv.weight, [self.qkv.in_features, 2 * self.qkv.in_features])
            q = self._apart(functional.linear(normed[:, -1:], of_q), 1)
            k, v = torch.split(self._apart(functional.linear(normed, of_kv), 2), 1, dim=2)
            q = _turned(q, None if place.turn is None else place.turn[n - 1 :])[:, :, 0]
            k = _turned(k, place.turn)[:, :, 0]
        return q.transpose(1, 2), k.transpose(1, 2), v[:, :, 0].transpose(1, 2)

    def _apart(self, projected: Tensor, which: int) -> Tensor:
        """``(batch, n, which · width)`` as ``(batch, n, which, heads, d)``."""
        return projected.view(*projected.shape[:2], which, self.heads, -1)

    def attend(self, heads: Heads, place: Place, masks: LayerMasks | None) -> Tensor:
        """What attention gives before the output projection, ``(batch, queries, heads, d)``."""
        q, k, v = heads
        rows = slice(k.shape[2] - q.shape[2], None)
        if masks is not None:
            # By hand: there is no fused kernel for 17 tokens that would take masks, or pay.
            logits = torch.matmul(q, k.mT) * self.scale + place.hidden[:, rows]
            output = torch.matmul(torch.softmax(logits, -1) * masks.pattern, v)
        else:
            causal = place.bias is None and q.shape[2] > 1
            bias = None if place.bias is None else place.hidden[None, :, rows]
            output = functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=self.scale)
        return output.transpose(1, 2)

    def combine(self, x: Tensor, normed: Tensor, attended: Tensor, masks: LayerMasks | None) -> Tensor:
        """The stream ``x`` with what attention and the MLP add, ``(batch, queries, width)``."""
        added = [(self.out(attended.flatten(-2)), None if masks is None else masks.attention)]
        if self.mlp_in is not None and self.mlp_out is not None:
            added.append(
                (
                    self.mlp_out(functional.gelu(self.mlp_in(normed), approximate="tanh")),
                    None if masks is None else masks.mlp,
                )
            )
        total: Tensor | None = x if self.residual else None
        for part, mask in added:
            if total is None:
                total = part if mask is None else part * mask
            else:
                total = total + part if mask is None else torch.addcmul(total, part, mask)
        assert total is not None
        return total


def _turned(planes: Tensor, turn: Tensor | None) -> Tensor:
    """``(batch, n, which, heads, d)`` with each pair of dimensions turned, as one multiplication of complex numbers."""
    if turn is None:
        return planes
    return torch.view_as_real(torch.view_as_complex(planes.view(*planes.shape[:-1], -1, 2)) * turn).flatten(-2)
