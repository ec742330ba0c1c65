"""Mask or un-rotate planes of heads, or fix single dimensions, inside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import attention_output
from wherewhat.measures.measurement import Subject
from wherewhat.measures.tensors import check_faithful, next_token_loss


def frequency_bands(inv_freq: Tensor, bands: int) -> Tensor:
    """Return the planes of each band, ``(bands, planes)`` bool: equal parts in order of frequency, fastest first."""
    planes = len(inv_freq)
    if planes < bands:
        raise MeasureError(f"bands={bands} cannot be made of {planes} planes: choose at most {planes}")
    order = inv_freq.abs().argsort(descending=True, stable=True).cpu()
    members = torch.zeros(bands, planes, dtype=torch.bool)
    for row, which in zip(members, order.tensor_split(bands), strict=True):
        row[which] = True
    return members


PlaneChange = Literal["mask", "unrotate"]
"""What is done to planes: ``mask`` sets their queries to zero, ``unrotate`` their angles."""


def without_planes(
    attention: LayerAttention, keep: Tensor, *, heads: Tensor | None = None, how: PlaneChange = "mask"
) -> LayerAttention:
    """Return the layer with some planes masked or un-rotated.

    Masked planes contribute to no logit: their queries are zero. Un-rotated planes have angle 0 at every position: they
    contribute the product of query and key before rotation, and ignore positions. Unrotated dimensions, scaling, bias,
    soft-cap, sinks and values are unchanged.

    Args:
        attention: One layer, with rotation.
        keep: True for the planes to keep as they are, ``(planes,)``.
        heads: True for the heads to change, ``(heads,)``; None for all.
        how: What to do to the other planes.

    Returns:
        The changed layer. With planes un-rotated in some heads only, every head has its own keys, and the rotation,
        which is no longer the same for all heads, is None.
    """
    if attention.rotation is None:
        raise MeasureError(f"layer {attention.layer} does not rotate its queries and keys: it has no planes to mask")
    if keep.shape != (attention.rotation.planes,):
        raise MeasureError(
            f"keep {tuple(keep.shape)} must hold one entry for each of {attention.rotation.planes} planes"
        )
    if heads is not None and heads.shape != (attention.heads,):
        raise MeasureError(f"heads {tuple(heads.shape)} must hold one entry for each of {attention.heads} heads")
    if how == "unrotate":
        return _unrotated(attention, keep.bool().cpu(), heads)
    device = attention.rot_q.device
    gone = torch.zeros(attention.rot_q.shape[-1], dtype=torch.bool, device=device)
    gone[attention.rotation.pairs[~keep.bool().cpu()].flatten().to(device)] = True
    changed = torch.ones(attention.heads, dtype=torch.bool) if heads is None else heads.bool()
    both = changed.to(device)[:, None] & gone  # (heads, d)
    return replace(attention, rot_q=attention.rot_q.masked_fill(both[None, :, None], 0.0))


def _unrotated(attention: LayerAttention, keep: Tensor, heads: Tensor | None) -> LayerAttention:
    """Return the layer with the planes that are not kept turned back to angle 0."""
    rotation = attention.rotation
    assert rotation is not None
    inv_freq = rotation.inv_freq
    chosen = keep.to(inv_freq.device)
    # Only these planes turn back; without a scaling, so that the model's own stays.
    back = replace(rotation, inv_freq=inv_freq.masked_fill(chosen, 0.0), scaling=1.0)

    def turned_back(x: Tensor, positions: Tensor) -> Tensor:
        return back.unrotate(x, positions if positions.ndim == 1 else positions[:, None]).to(x.dtype)

    rot_q = turned_back(attention.rot_q, attention.positions[..., attention.m - attention.n :])
    rot_k = turned_back(attention.rot_k, attention.positions)
    if heads is None or bool(heads.all()):
        left = replace(rotation, inv_freq=inv_freq.masked_fill(~chosen, 0.0))
        return replace(attention, rot_q=rot_q, rot_k=rot_k, rotation=left)
    changed = heads.bool().to(rot_q.device)[:, None, None]
    before, after = (x.repeat_interleave(attention.heads // attention.kv_heads, 1) for x in (attention.rot_k, rot_k))
    return replace(
        attention,
        rot_q=torch.where(changed, rot_q, attention.rot_q),
        rot_k=torch.where(changed, after, before),
        rotation=None,
    )


MASSIVE = 5.0
"""Smallest norm of a massive dimension, relative to the mean over the dimensions of its head (arXiv 2502.01563)."""


def relative_norms(x: Tensor) -> Tensor:
    """Return the norm over tokens of each dimension, relative to the mean over dimensions, ``(heads, d)`` float64.

    ``x`` ``(heads, n, d)`` are queries, keys or values of one text.
    """
    norms: Tensor = x.double().norm(dim=1)
    return norms / norms.mean(-1, keepdim=True).clamp_min(1e-300)


@dataclass(frozen=True)
class FixedDimensions:
    """Dimensions of a layer's queries and keys after rotation, and the values that replace them at every token.

    Attributes:
        q: True for dimensions of queries that are replaced, ``(heads, d)``.
        k: True for dimensions of keys, ``(kv_heads, d)``.
        mean_q: Values of queries, ``(heads, d)``.
        mean_k: Values of keys, ``(kv_heads, d)``.
    """

    q: Tensor
    k: Tensor
    mean_q: Tensor
    mean_k: Tensor

    @classmethod
    def massive(cls, attention: LayerAttention) -> FixedDimensions:
        """Return the massive dimensions of a layer on one text, and means over its tokens."""
        q, k = attention.rot_q[0], attention.rot_k[0]
        chosen = (relative_norms(x) > MASSIVE for x in (q, k))
        return cls(*chosen, *(x.double().mean(1).to(x.dtype) for x in (q, k)))

    def random(self, generator: torch.Generator) -> FixedDimensions:
        """Return as many random dimensions of each head, without those of this one."""

        def drawn(chosen: Tensor) -> Tensor:
            order = torch.rand(chosen.shape, generator=generator).to(chosen.device).masked_fill(chosen, 2.0)
            return order.argsort(-1).argsort(-1) < chosen.sum(-1, keepdim=True)

        return replace(self, q=drawn(self.q), k=drawn(self.k))

    def none(self) -> FixedDimensions:
        """Return no dimensions."""
        return replace(self, q=torch.zeros_like(self.q), k=torch.zeros_like(self.k))

    def apply(self, attention: LayerAttention, *, first: int = 0) -> LayerAttention:
        """Return the layer, of any texts, with these dimensions replaced at all tokens from ``first`` on."""
        later = torch.arange(attention.m, device=attention.rot_k.device)[:, None] >= first
        return replace(
            attention,
            rot_q=torch.where(self.q[:, None] & later[-attention.n :], self.mean_q[:, None], attention.rot_q),
            rot_k=torch.where(self.k[:, None] & later, self.mean_k[:, None], attention.rot_k),
        )


FAITHFUL = 1e-4
"""Largest relative change of the loss by an intervention that changes nothing."""


@dataclass(frozen=True)
class Masking:
    """Runs of a model on one text with planes masked or un-rotated.

    Attributes:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        heads: Heads to change by layer, each ``(heads,)`` bool. Other layers are unchanged.
        block_mib: Memory for one block of logits, in MiB.
    """

    subject: Subject
    ids: Tensor
    heads: Mapping[int, Tensor]
    block_mib: int

    def loss(
        self,
        planes: Mapping[int, Tensor],
        *,
        how: PlaneChange = "mask",
        reducer: Callable[[LayerAttention], None] = lambda _: None,
    ) -> float:
        """Return the loss with planes changed.

        Args:
            planes: True for the planes to change, ``(planes,)`` by layer; none in other layers.
            how: What to do to them.
            reducer: Called with each changed layer.
        """

        def edit(attention: LayerAttention) -> Tensor | None:
            heads = self.heads.get(attention.layer)
            if heads is None:
                return None
            assert attention.rotation is not None
            chosen = planes.get(attention.layer, torch.zeros(attention.rotation.planes, dtype=torch.bool))
            changed = without_planes(attention, ~chosen, heads=heads, how=how)
            reducer(changed)
            return attention_output(changed, block_mib=self.block_mib)

        return next_token_loss(self.subject.edited(self.ids, edit), self.ids)

    def check(self, expected: float, *, how: PlaneChange = "mask") -> None:
        """Raise an error if the loss with all planes kept differs from the expected loss."""
        dtypes: set[torch.dtype] = set()
        loss = self.loss({}, how=how, reducer=lambda changed: dtypes.add(changed.rot_q.dtype))
        what = "masking" if how == "mask" else "un-rotation"
        check_faithful(what, loss, expected, dtypes=dtypes, precision=FAITHFUL)

    def random(self, planes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return as many random planes of each layer, always the same for the same numbers of planes."""
        generator = torch.Generator().manual_seed(0)
        return {
            layer: x[torch.randperm(len(x), generator=generator)] for layer, x in planes.items() if layer in self.heads
        }
