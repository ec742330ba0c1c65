"""Mask or un-rotate planes of heads, or fix single dimensions, inside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wherewhat.caches.attention import only_causal
from wherewhat.caches.visibility import full_attention
from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import attention_output
from wherewhat.measures.batches import edited_rows, equal_runs
from wherewhat.measures.measurement import Subject
from wherewhat.measures.tensors import text_losses


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
        keep: True for the planes to keep as they are, ``(planes,)``, or for each text its own ``(texts, planes)``, or
            for each text and head its own ``(texts, heads, planes)``.
        heads: True for the heads to change, ``(heads,)``; None for all.
        how: What to do to the other planes.

    Returns:
        The changed layer. With planes un-rotated that are not the same for all heads, every head has its own keys, and
        the rotation, which is no longer the same for all heads or texts, is None.
    """
    if attention.rotation is None:
        raise MeasureError(f"layer {attention.layer} does not rotate its queries and keys: it has no planes to mask")
    shape = (attention.texts, attention.heads, attention.rotation.planes)
    if keep.shape not in (shape[2:], shape[::2], shape):
        raise MeasureError(
            f"keep {tuple(keep.shape)} must hold one entry for each of {attention.rotation.planes} planes"
        )
    if heads is not None and heads.shape != (attention.heads,):
        raise MeasureError(f"heads {tuple(heads.shape)} must hold one entry for each of {attention.heads} heads")
    device = attention.rot_q.device
    changed = ~keep.to(device).bool()
    if how == "unrotate":
        return _unrotated(attention, changed, heads)
    gone = torch.zeros(*changed.shape[:-1], attention.rot_q.shape[-1], dtype=torch.bool, device=device)
    for half in attention.rotation.halves:
        gone[..., half] = changed
    by_head = _of_heads(gone)
    if heads is not None:
        by_head = by_head & heads.to(device).bool()[:, None, None]
    return replace(attention, rot_q=attention.rot_q.masked_fill(by_head, 0.0))


def _of_heads(changed: Tensor) -> Tensor:
    """Return entries of all texts, of each text, or of each text and head, as those of queries or keys."""
    return changed if changed.ndim == 1 else changed[:, None, None] if changed.ndim == 2 else changed[:, :, None]


def _unrotated(attention: LayerAttention, changed: Tensor, heads: Tensor | None) -> LayerAttention:
    """Return the layer with some planes turned back to angle 0, of the shapes of :func:`without_planes`."""
    rotation = attention.rotation
    assert rotation is not None
    left, right = rotation.halves
    planes = _of_heads(changed)

    def turned_back(x: Tensor, positions: Tensor) -> Tensor:
        """Turn only these planes, without a scaling, so that the model's own stays."""
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        angles = rotation.angles(positions.to(x.device)).to(out.dtype)
        theta = (angles if angles.ndim == 2 else angles[:, None]) * planes
        cos, sin = theta.cos(), -theta.sin()
        u, v = out[..., left], out[..., right]
        out[..., left], out[..., right] = u * cos - v * sin, v * cos + u * sin
        return out.to(x.dtype)

    rot_q = turned_back(attention.rot_q, attention.positions[..., attention.m - attention.n :])
    before = attention.rot_k
    if changed.ndim == 3:
        before = before.repeat_interleave(attention.heads // attention.kv_heads, 1)
    rot_k = turned_back(before, attention.positions)
    if heads is None or bool(heads.all()):
        inv_freq = rotation.inv_freq
        same = changed.ndim == 1
        remaining = replace(rotation, inv_freq=inv_freq.masked_fill(changed.to(inv_freq.device), 0.0)) if same else None
        return replace(attention, rot_q=rot_q, rot_k=rot_k, rotation=remaining)
    chosen = heads.bool().to(rot_q.device)[:, None, None]
    before, after = (x.repeat_interleave(attention.heads // x.shape[1], 1) for x in (before, rot_k))
    return replace(
        attention,
        rot_q=torch.where(chosen, rot_q, attention.rot_q),
        rot_k=torch.where(chosen, after, before),
        rotation=None,
    )


def output_of(attention: LayerAttention, *, block_mib: int) -> Tensor:
    """Return the output ``(texts, n, heads, d_v)`` of a changed layer, by its model's kernel if the mask allows it."""
    if only_causal(attention) and attention.value.shape[1] == attention.kv_heads:  # not if heads have their own keys
        return full_attention(attention)
    return attention_output(attention, block_mib=block_mib)


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
        return self.apply_from(attention, torch.full((), first, device=attention.rot_k.device))

    def apply_from(self, attention: LayerAttention, first: Tensor) -> LayerAttention:
        """Return the same with a first token ``()``, or ``(texts, 1, 1, 1)`` for each text its own.

        Dimensions and values may have a first axis of texts.
        """
        later = torch.arange(attention.m, device=attention.rot_k.device)[:, None] >= first
        q, k, mean_q, mean_k = (x.unsqueeze(-2) for x in (self.q, self.k, self.mean_q, self.mean_k))
        return replace(
            attention,
            rot_q=torch.where(q & later[..., -attention.n :, :], mean_q, attention.rot_q),
            rot_k=torch.where(k & later, mean_k, attention.rot_k),
        )

    @staticmethod
    def stacked(parts: Sequence[FixedDimensions]) -> FixedDimensions:
        """Return the dimensions of several texts, with a first axis of texts."""
        return FixedDimensions(
            *(torch.stack([getattr(part, name) for part in parts]) for name in ("q", "k", "mean_q", "mean_k"))
        )


FAITHFUL = 1e-4
"""Largest relative change of the loss by an intervention that changes nothing."""


@dataclass(frozen=True)
class PlaneVariant:
    """A variant of the model with planes changed.

    Attributes:
        name: Name of its loss.
        planes: True for the planes to change by layer, ``(planes,)``, or ``(texts, heads, planes)`` in all variants;
            none in other layers.
        how: What is done to them.
        scored: Whether its changed layers are passed to the reducer.
    """

    name: str
    planes: Mapping[int, Tensor]
    how: PlaneChange = "mask"
    scored: bool = False


@dataclass(frozen=True)
class Masking:
    """Runs of a model on texts with planes masked or un-rotated, as rows of a batch.

    Attributes:
        subject: The model.
        ids: Tokens, ``(texts, n)``.
        heads: Heads to change by layer, each ``(heads,)`` bool. Other layers are unchanged.
        block_mib: Memory for one block of logits, in MiB.
        most: Largest number of rows of a pass.
    """

    subject: Subject
    ids: Tensor
    heads: Mapping[int, Tensor]
    block_mib: int
    most: int

    def losses(
        self,
        variants: Sequence[PlaneVariant],
        reducer: Callable[[LayerAttention, Sequence[tuple[str, int]]], None] = lambda *_: None,
    ) -> dict[str, Tensor]:
        """Return the loss of each text under each variant, ``(texts,)`` float64 by name.

        Args:
            variants: The variants.
            reducer: Called with each changed layer of variants that are scored, and with the names and texts of its
                rows.
        """

        def read(logits: Tensor, texts: Sequence[int]) -> list[Tensor]:
            return list(text_losses(logits, self.ids[list(texts)]).mean(-1))

        return self.numbers(variants, read, reducer)

    def numbers(
        self,
        variants: Sequence[PlaneVariant],
        read: Callable[[Tensor, Sequence[int]], Sequence[Tensor]],
        reducer: Callable[[LayerAttention, Sequence[tuple[str, int]]], None] = lambda *_: None,
    ) -> dict[str, Tensor]:
        """Return numbers of each text under each variant, ``(texts, …)`` float64 by name.

        ``read`` returns them from the logits of some rows, whose texts are given; the reducer is that of
        :meth:`losses`.
        """
        count = len(self.ids)
        # Variants of one kind are consecutive, so that the rows of a pass are few groups.
        ordered = sorted(variants, key=lambda variant: (variant.how, variant.scored))
        rows = [(variant, text) for variant in ordered for text in range(count)]
        device_planes: dict[int, Tensor] = {}
        device_heads: dict[int, Tensor | None] = {}

        def edit(attention: LayerAttention, chunk: slice) -> Tensor | None:
            heads = self.heads.get(attention.layer)
            if heads is None:
                return None
            assert attention.rotation is not None
            layer, device = attention.layer, attention.rot_q.device
            if layer not in device_planes:  # copied once for all passes: a copy waits for the device
                known = [x.planes[layer] for x in ordered if layer in x.planes]
                none = torch.zeros_like(known[0]) if known else torch.zeros(attention.rotation.planes, dtype=torch.bool)
                planes = torch.stack([~x.planes.get(layer, none) for x in ordered])  # (variants, …, planes)
                by_row = planes.repeat_interleave(count, 0) if planes.ndim == 2 else planes.flatten(0, 1)
                device_planes[layer] = by_row.to(device)
                device_heads[layer] = None if bool(heads.all()) else heads.to(device)
            keep = device_planes[layer][chunk]
            outputs = []
            for _, own in equal_runs([(variant.how, variant.scored) for variant, _ in rows[chunk]]):
                variant = rows[chunk][own.start][0]
                part = attention.selected(own)
                changed = without_planes(part, keep[own], heads=device_heads[layer], how=variant.how)
                if variant.scored:
                    reducer(changed, [(row.name, text) for row, text in rows[chunk][own]])
                outputs.append(output_of(changed, block_mib=self.block_mib))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        def read_rows(logits: Tensor, chunk: slice) -> Sequence[Tensor]:
            return read(logits, [text for _, text in rows[chunk]])

        ids = self.ids.repeat(len(ordered), 1)
        found = torch.stack(edited_rows(self.subject.edited, ids, edit, read_rows, most=self.most))
        return {variant.name: part for variant, part in zip(ordered, torch.split(found, count), strict=True)}

    def random(self, planes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return as many random planes of each layer, always the same for the same numbers of planes."""
        generator = torch.Generator().manual_seed(0)
        return {
            layer: x[torch.randperm(len(x), generator=generator)] for layer, x in planes.items() if layer in self.heads
        }
