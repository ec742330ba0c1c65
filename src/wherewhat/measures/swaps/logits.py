"""Logits of queries with any of their keys at the position of any other key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from wherewhat.captures.rotation import Rotation
from wherewhat.options import short_repr


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers ``(n,)`` on a device; kept, because a copy to a GPU waits for it."""
    return torch.tensor(values, device=device)


@dataclass(frozen=True)
class QueryLogits:
    """Queries of several heads, and the keys that they see.

    Two head dimensions are one complex number. The logit of key c at the position of key p is
    ``softcap(Re Σ conj(q) k[c] turns[p]) + bias[p]``, summed over planes. Queries that share their keys are a group,
    such as the heads of one key head. A query sees the first keys of its group.

    Attributes:
        q: Queries after rotation, scale included, ``(groups, rows, planes)`` complex.
        k: Keys before rotation, ``(groups, n, planes)`` complex.
        turns: Rotation of each position, ``(groups or 1, n, planes)`` complex; 1 for dimensions without rotation.
        counts: Number of keys of each row, the same in all groups.
        logits: The actual logits, bias included, ``(groups, rows, n)`` float64; undefined after ``counts``.
        weights: The actual attention weights, ``(groups, rows, n)`` float64; they need not sum to one, because other
            keys (the query's own, a sink) may take part in the softmax.
        bias: Additive bias of each position, ``(groups, rows, n)``, if any.
        softcap: ``softcap · tanh(logit / softcap)`` is applied before the bias, if given.
    """

    q: Tensor
    k: Tensor
    turns: Tensor
    counts: tuple[int, ...]
    logits: Tensor
    weights: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    __repr__ = short_repr

    @classmethod
    def of(
        cls,
        rot_q: Tensor,
        k: Tensor,
        rotation: Rotation | None,
        positions: Tensor,
        *,
        counts: tuple[int, ...],
        logits: Tensor,
        weights: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> QueryLogits:
        """Return the logits of real tensors.

        Args:
            rot_q: Queries after rotation, scale included, ``(groups, rows, d)``.
            k: Keys before rotation, ``(groups, n, d)``, of the same dtype.
            rotation: Rotation of both; None for none.
            positions: Positions of the keys, ``(n,)``.
            counts: Number of keys of each row.
            logits: The actual logits, ``(groups, rows, n)`` float64.
            weights: The actual attention weights, ``(groups, rows, n)`` float64.
            bias: Bias of each position, ``(groups, rows, n)``, if any.
            softcap: Soft-cap, if any.
        """
        q, k = to_complex(rot_q, rotation), to_complex(k, rotation)
        turns = torch.ones(1, *k.shape[1:], dtype=k.dtype, device=k.device)
        if rotation is not None:
            angles = rotation.angles(positions.to(k.device)).to(rot_q.dtype)
            turns[..., : rotation.planes] = torch.polar(torch.full_like(angles, rotation.scaling), angles)
        return cls(q, k, turns, counts, logits, weights, bias, softcap)


def to_complex(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Return ``x`` ``(..., d)`` as complex ``(..., planes)``: rotated planes first, then pairs of other dimensions."""
    rest, turned = x, []
    if rotation is not None:
        turned = [torch.complex(*(x[..., half] for half in rotation.halves))]
        end = rotation.offset + 2 * rotation.planes
        rest = torch.cat([x[..., : rotation.offset], x[..., end:]], -1)
    rest = torch.nn.functional.pad(rest, (0, rest.shape[-1] % 2))
    return torch.cat([*turned, torch.complex(rest[..., 0::2], rest[..., 1::2])], -1)


def to_real(x: Tensor) -> Tensor:
    """Return complex ``(..., planes)`` as real ``(..., 2 planes)``: ``Re Σ conj(x) y`` is their dot product."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Return complex keys ``(groups, n, planes)`` as real blocks, ``(groups, block, n // block, 2 planes)``."""
    used = x.shape[1] // block * block
    return torch.unflatten(to_real(x[:, :used]), 1, (-1, block)).transpose(1, 2).contiguous()


def block_logits(x: Tensor, y: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return logits of blocks of keys at blocks of positions, ``(groups, rows, columns)``: log-sum-exp over a block.

    Args:
        x: Product of queries with contents (or positions), ``(groups, block, rows, d)``.
        y: Positions (or contents), ``(groups or 1, block, columns, d)``.
        bias: Bias of the positions, broadcastable to ``(groups, block, rows, columns)``, if any.
        softcap: Soft-cap, if any.
    """
    groups, block, rows, _ = x.shape
    if len(y) == 1 < groups:  # one product instead of one per group
        logits = (x.transpose(0, 1).flatten(1, 2) @ y[0].mT).view(block, groups, rows, -1).transpose(0, 1)
    else:
        logits = x @ y.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return logits[:, 0] if block == 1 else logits.logsumexp(1)
