"""Remove bands of frequencies from heads inside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.measurement import Subject
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.tensors import allowed_change, next_token_loss


def frequency_bands(inv_freq: Tensor, bands: int) -> Tensor:
    """Planes of each band, ``(bands, planes)`` bool: sorted by speed, fastest first, and cut into equal parts."""
    planes = len(inv_freq)
    if planes < bands:
        raise MeasureError(f"bands={bands} cannot be made of {planes} planes: choose at most {planes}")
    order = inv_freq.abs().argsort(descending=True, stable=True).cpu()
    found = torch.zeros(bands, planes, dtype=torch.bool)
    for row, which in zip(found, order.tensor_split(bands), strict=True):
        row[which] = True
    return found


def without_planes(attention: LayerAttention, keep: Tensor, *, heads: Tensor | None = None) -> LayerAttention:
    """The same layer with only some planes left in its logits.

    The other planes of the queries are zero, so they add nothing to any logit. Dimensions that are not rotated stay, as
    do bias, soft-cap, sinks and values.

    Args:
        attention: One layer, with rotation.
        keep: True for the planes that stay, ``(planes,)``.
        heads: True for the heads to change, ``(heads,)``; None for all.
    """
    if attention.rotation is None:
        raise MeasureError(
            f"layer {attention.layer} does not rotate its queries and keys: it has no planes to take out"
        )
    if keep.shape != (attention.rotation.planes,):
        raise MeasureError(
            f"keep {tuple(keep.shape)} must hold one entry for each of {attention.rotation.planes} planes"
        )
    if heads is not None and heads.shape != (attention.heads,):
        raise MeasureError(f"heads {tuple(heads.shape)} must hold one entry for each of {attention.heads} heads")
    device = attention.rot_q.device
    gone = torch.zeros(attention.rot_q.shape[-1], dtype=torch.bool, device=device)
    gone[attention.rotation.pairs[~keep.bool().cpu()].flatten().to(device)] = True
    changed = torch.ones(attention.heads, dtype=torch.bool) if heads is None else heads.bool()
    both = changed.to(device)[:, None] & gone  # (heads, d)
    return replace(attention, rot_q=attention.rot_q.masked_fill(both[None, :, None], 0.0))


def masked_attention(
    attention: LayerAttention, keep: Tensor, *, heads: Tensor | None = None, block_mib: int = 64
) -> Tensor:
    """Attention output with only some planes left in the logits, a block of queries at a time.

    Args:
        attention: One layer, batch 1, with rotation.
        keep: True for the planes that stay, ``(planes,)``.
        heads: True for the heads to change, ``(heads,)``; None for all.
        block_mib: Memory for one block of logits.

    Returns:
        Output ``(1, n, heads, d_v)``.
    """
    return attend(without_planes(attention, keep, heads=heads), block_mib=block_mib)


def attend(attention: LayerAttention, *, block_mib: int = 64) -> Tensor:
    """Attention output ``(batch, n, heads, d_v)`` computed anew, a block of queries at a time."""
    n, count = attention.n, attention.heads
    rows = max(1, block_mib * 2**20 // (4 * count * attention.m))
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    value = attention.value.to(dtype).repeat_interleave(count // attention.value.shape[1], 1)
    output = torch.empty(value.shape[0], n, count, value.shape[-1], dtype=dtype, device=value.device)
    for start in range(0, n, rows):
        block = slice(start, min(n, start + rows))
        output[:, block] = (attention.pattern(block) @ value).transpose(1, 2)
    return output


_FAITHFUL = 1e-4
"""Share of the loss that a replacement which changes nothing may change."""


@dataclass(frozen=True)
class Masked:
    """What a model is with some planes masked.

    Attributes:
        loss: Mean next-token loss, nats.
        s_pos: Mean positional score over the masked heads that can be scored; NaN if there is none.
        s_sym: Mean symbolic score, likewise.
    """

    loss: float
    s_pos: float
    s_sym: float


class Masking:
    """Passes of one model over one text with bands of frequencies masked.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        heads: Heads to mask by layer, each ``(heads,)`` bool. Layers that are not there are left alone.
        bands: Number of bands.
        queries: Positions of the queries that swap scores are taken at.
        tau: Temperature of the weights of swaps.
        scored: Layers that swap scores are taken of.
        block_mib: Memory for one block of logits.
    """

    def __init__(
        self,
        subject: Subject,
        ids: Tensor,
        heads: Mapping[int, Tensor],
        *,
        bands: int,
        queries: Sequence[int],
        tau: float,
        scored: frozenset[int],
        block_mib: int,
    ) -> None:
        self._subject, self._ids, self._heads = subject, ids, heads
        self._bands, self._queries, self._tau = bands, queries, tau
        self._scored, self._block_mib = scored, block_mib

    def without(self, band: int) -> Masked:
        """One band removed, with the scores of the heads as they then are."""
        return self._run(lambda bands: ~bands[band], scores=True)

    def only(self, band: int) -> float:
        """Loss with no other band than this one."""
        return self._run(lambda bands: bands[band], scores=False).loss

    def random(self, seed: int) -> tuple[float, float]:
        """Loss without as many planes as a band has, drawn at random in each layer, and with no others than those."""

        def drawn(bands: Tensor) -> Tensor:
            return bands[0, torch.randperm(bands.shape[1], generator=generator)]

        generator = torch.Generator().manual_seed(seed)
        without = self._run(lambda bands: ~drawn(bands), scores=False).loss
        generator = torch.Generator().manual_seed(seed)
        return without, self._run(drawn, scores=False).loss

    def check(self, untouched: float) -> None:
        """Make sure that masking nothing changes nothing."""
        dtypes: set[torch.dtype] = set()
        found = self._run(lambda bands: bands.any(0), scores=False, dtypes=dtypes).loss
        if not abs(found - untouched) <= allowed_change(untouched, dtypes, _FAITHFUL):
            raise MeasureError(
                f"with every frequency kept the loss is {found:.5f}, that of the untouched model {untouched:.5f}: "
                "masking is not faithful on this model"
            )

    def _run(self, keep: Callable[[Tensor], Tensor], *, scores: bool, dtypes: set[torch.dtype] | None = None) -> Masked:
        s_pos, s_sym = [], []

        def edit(attention: LayerAttention) -> Tensor | None:
            heads = self._heads.get(attention.layer)
            if heads is None:
                return None
            assert attention.rotation is not None
            if dtypes is not None:
                dtypes.add(attention.rot_q.dtype)
            kept = keep(frequency_bands(attention.rotation.inv_freq, self._bands))
            masked = without_planes(attention, kept, heads=heads)
            if scores and attention.layer in self._scored:
                swaps = layer_swaps(masked, self._queries, tau=self._tau)
                s_pos.append(swaps.s_pos[heads].mean(-1))
                s_sym.append(swaps.s_sym[heads].mean(-1))
            return attend(masked, block_mib=self._block_mib)

        loss = next_token_loss(self._subject.edited(self._ids, edit), self._ids)
        return Masked(loss, *(float(torch.cat(x).mean()) if x else torch.nan for x in (s_pos, s_sym)))
