"""One layer of the small model: attention and MLP, parallel or sequential, with reproducible dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import ENCODINGS, PositionTables, polar
from wherewhat_lab.kernels import fits_flash, flash_attention, is_half


@dataclass(frozen=True)
class LayerMasks:
    """Dropout factors of one layer: 0 where an entry is dropped, 1 / (1 - dropout) elsewhere.

    Attributes:
        pattern: For attention weights, ``(batch, heads, queries, n)``.
        attention: For the attention output that is added to the residual stream, ``(batch, queries, width)``.
        mlp: For the MLP output, ``(batch, queries, width)``.
    """

    pattern: Tensor
    attention: Tensor
    mlp: Tensor


@dataclass(frozen=True)
class Masks:
    """Dropout factors of one training pass.

    Attributes:
        embedding: For embeddings, ``(batch, n, width)``.
        layers: One entry per layer; the last has one query only, that of the last token.
    """

    embedding: Tensor
    layers: tuple[LayerMasks, ...]


class MaskDrawer:
    """Draw the masks of training passes of one shape, in the same memory every time."""

    def __init__(self, config: LabConfig, *, batch: int, n: int, device: torch.device | str = "cpu") -> None:
        shapes: list[tuple[int, ...]] = [(batch, n, config.width)]
        for layer in range(config.layers):
            queries = 1 if layer == config.layers - 1 else n
            shapes += [
                (batch, config.heads, queries, n),
                (batch, queries, config.width),
                (batch, queries, config.width),
            ]
        sizes = [math.prod(shape) for shape in shapes]
        total = sum(sizes)
        # Four entries from each random 64-bit number: 16 bits are enough for the probability, and drawing is slow.
        self._bits = torch.empty(-(-total // 4), dtype=torch.int64, device=device)
        self._factors = torch.empty(4 * len(self._bits), device=device)
        self._highest = round((1 - config.dropout) * 2**16) - 2**15 - 1  # of the 16-bit numbers that keep an entry
        self._kept = 1 - config.dropout
        embedding, *views = (
            part.view(shape) for part, shape in zip(torch.split(self._factors[:total], sizes), shapes, strict=True)
        )
        layers = (LayerMasks(*views[first : first + 3]) for first in range(0, len(views), 3))
        self._masks = Masks(embedding, tuple(layers))

    def draw(self, generator: Generator) -> Masks:
        """Draw the next masks; those drawn before are overwritten."""
        self._bits.random_(-(2**63), None, generator=generator)
        torch.le(self._bits.view(torch.int16), self._highest, out=self._factors)
        self._factors.div_(self._kept)
        return self._masks


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values after rotation, ``(batch, heads, n, d)``; queries may be those of the last token alone."""

EditOutput = Callable[[Heads, Tensor], Tensor | None]
"""Function of heads and their outputs ``(batch, n, heads, d)`` that returns a replacement of the outputs, or None."""


class Block(nn.Module):
    """One layer; queries, keys and values share one matrix.

    Attributes:
        phase: PoPE's phases of keys, ``(heads, d)``; None for other encodings.
        mlp_norm: The norm before the MLP in sequential blocks; None in parallel blocks, where both share one norm.
        mlp_gate: Gate projection of Llama's MLP; None for others.
    """

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        width = config.width
        llama, bias = config.block == "llama", config.inner_bias
        inner = 8 * width // 3 if llama else 4 * width  # three matrices with as many weights as two
        self.heads = config.heads
        self.residual = config.residual
        self.scale = config.head_width**-0.5 if config.scale is None else config.scale
        self.approximate = "tanh" if config.block == "parallel" else "none"  # GPT-J's GELU, and MPT's
        self.norm = make_norm(config)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        is_polar = ENCODINGS[config.encoding].polar
        self.phase = nn.Parameter(torch.zeros(config.heads, config.head_width)) if is_polar else None
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = make_norm(config) if config.mlp and config.block != "parallel" else None
        self.mlp_in = nn.Linear(width, inner, bias=bias) if config.mlp else None
        self.mlp_out = nn.Linear(inner, width, bias=bias) if config.mlp else None
        self.mlp_gate = nn.Linear(width, inner, bias=False) if config.mlp and llama else None

    def forward(
        self, x: Tensor, tables: PositionTables, *, masks: LayerMasks | None, last: bool, edit: EditOutput | None = None
    ) -> Tensor:
        """Return the residual stream after the layer.

        Args:
            x: The stream before the layer, ``(batch, n, width)``.
            tables: Position tables of the layer.
            masks: Dropout factors; None for no dropout.
            last: Return the last token only, ``(batch, 1, width)``.
            edit: Function of queries, keys and values and of the outputs before the output projection,
                ``(batch, n, heads, d)``, that may return a replacement of the outputs.
        """
        if last:
            normed = self.norm(x)
            heads = self.project(normed, tables, last=True)
            x, normed = x[:, -1:], normed[:, -1:]
        else:
            normed, *projected = self.enter(x, self._rotation(x, tables))
            heads = projected[0], projected[1], projected[2]
        attended = self.attend(heads, tables, masks)
        if edit is not None:
            replaced = edit(heads, attended)
            attended = attended if replaced is None else replaced
        return self.combine(x, normed, attended, masks)

    def enter(self, x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalised stream ``(batch, n, width)``, and its rotated queries, rotated keys and values."""
        normed = self.norm(x)
        return (normed, *self._project_all(normed, turn))

    def project(self, normed: Tensor, tables: PositionTables, *, last: bool) -> Heads:
        """Return rotated queries, rotated keys and values of the normalised stream ``(batch, n, width)``."""
        turn = self._rotation(normed, tables)
        if not last:
            return self._project_all(normed, turn)
        of_q, of_kv = torch.split(self.qkv.weight, [self.qkv.in_features, 2 * self.qkv.in_features])
        q = self._apart(functional.linear(normed[:, -1:], of_q), 1)
        k, v = torch.split(self._apart(functional.linear(normed, of_kv), 2), 1, dim=2)
        own_turn = None if turn is None else turn[normed.shape[1] - 1 :]
        if self.phase is None:
            q, k = _rotated(q, own_turn)[:, :, 0], _rotated(k, turn)[:, :, 0]
        else:
            assert turn is not None
            assert own_turn is not None
            q, k = polar(q[:, :, 0], own_turn[:, 0]), polar(k[:, :, 0], turn[:, 0], self.phase)
        return q.transpose(1, 2), k.transpose(1, 2), v[:, :, 0].transpose(1, 2)

    def _project_all(self, normed: Tensor, turn: Tensor | None) -> Heads:
        qk, v = torch.split(self._apart(self.qkv(normed), 3), [2, 1], dim=2)
        if self.phase is None:
            q, k = _rotated(qk, turn).unbind(2)
        else:
            assert turn is not None
            q, k = qk.unbind(2)
            q, k = polar(q, turn[:, 0]).to(v.dtype), polar(k, turn[:, 0], self.phase).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v[:, :, 0].transpose(1, 2)

    def _rotation(self, x: Tensor, tables: PositionTables) -> Tensor | None:
        """Return the rotation as complex numbers, which are faster, or as real ones, for half precision and PoPE."""
        return tables.turn if self.phase is None and not is_half(x) else tables.real_turn

    def _apart(self, projected: Tensor, which: int) -> Tensor:
        """Return ``(batch, n, which · width)`` as ``(batch, n, which, heads, d)``."""
        return projected.view(*projected.shape[:2], which, self.heads, -1)

    def attend(self, heads: Heads, tables: PositionTables, masks: LayerMasks | None) -> Tensor:
        """Return the outputs of attention before the output projection, ``(batch, queries, heads, d)``."""
        q, k, v = heads
        rows = slice(k.shape[2] - q.shape[2], None)
        if masks is not None:
            # Not fused: no fused kernel takes dropout masks, and for 17 tokens it would not be faster.
            logits = torch.matmul(q, k.mT) * self.scale + tables.hidden[:, rows]
            output = torch.matmul(torch.softmax(logits, -1) * masks.pattern, v)
        elif fits_flash(q, k):
            output = flash_attention(q, k, v, tables, scale=self.scale)
        else:
            causal = tables.slopes is None and q.shape[2] > 1
            bias = None if tables.slopes is None else tables.hidden[None, :, rows].to(q.dtype)
            output = functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=self.scale)
        return output.transpose(1, 2)

    def combine(self, x: Tensor, normed: Tensor, attended: Tensor, masks: LayerMasks | None) -> Tensor:
        """Return the stream ``x`` plus the outputs of attention and MLP, ``(batch, queries, width)``.

        Args:
            x: The stream, ``(batch, queries, width)``.
            normed: The normalised stream.
            attended: Outputs of attention, ``(batch, queries, heads, d)``.
            masks: Dropout factors; None for no dropout.
        """
        total = _added(
            x if self.residual else None, self.out(attended.flatten(-2)), None if masks is None else masks.attention
        )
        if self.mlp_in is not None and self.mlp_out is not None:
            if self.mlp_norm is not None:
                normed = self.mlp_norm(total)
            inner = self.mlp_in(normed)
            if self.mlp_gate is None:
                inner = functional.gelu(inner, approximate=self.approximate)
            else:
                inner = inner * functional.silu(self.mlp_gate(normed))
            total = _added(total, self.mlp_out(inner), None if masks is None else masks.mlp)
        return total


def make_norm(config: LabConfig) -> nn.Module:
    """Return the norm before a layer, an MLP or the output."""
    if not config.norm:
        return nn.Identity()
    if config.block == "llama":
        return nn.RMSNorm(config.width, eps=1e-6)
    return nn.LayerNorm(config.width, bias=config.inner_bias)


def _added(total: Tensor | None, part: Tensor, mask: Tensor | None) -> Tensor:
    if total is None:
        return part if mask is None else part * mask
    return total + part if mask is None else torch.addcmul(total, part, mask)


def _rotated(planes: Tensor, turn: Tensor | None) -> Tensor:
    """Return ``(batch, n, which, heads, d)`` with each pair of dimensions rotated.

    Args:
        planes: Queries, keys or both.
        turn: Complex rotation ``(n, 1, heads or 1, d / 2)``, or its cosine and sine, with one more dimension.
    """
    if turn is None:
        return planes
    pairs = planes.view(*planes.shape[:-1], -1, 2)
    if turn.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
    (a, b), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(planes.dtype)
