"""Mask bands of frequencies in heads inside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention.weights import attention_output
from wherewhat.measures.measurement import Subject
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.tensors import check_faithful, next_token_loss


def frequency_bands(inv_freq: Tensor, bands: int) -> Tensor:
    """Return the planes of each band, ``(bands, planes)`` bool: equal parts in order of frequency, fastest first."""
    planes = len(inv_freq)
    if planes < bands:
        raise MeasureError(f"bands={bands} cannot be made of {planes} planes: choose at most {planes}")
    order = inv_freq.abs().argsort(descending=True, stable=True).cpu()
    found = torch.zeros(bands, planes, dtype=torch.bool)
    for row, which in zip(found, order.tensor_split(bands), strict=True):
        row[which] = True
    return found


def without_planes(attention: LayerAttention, keep: Tensor, *, heads: Tensor | None = None) -> LayerAttention:
    """Return the layer with only some planes in its logits.

    The other planes of the queries are set to zero. Unrotated dimensions, bias, soft-cap, sinks and values are
    unchanged.

    Args:
        attention: One layer, with rotation.
        keep: True for the planes to keep, ``(planes,)``.
        heads: True for the heads to change, ``(heads,)``; None for all.
    """
    if attention.rotation is None:
        raise MeasureError(f"layer {attention.layer} does not rotate its queries and keys: it has no planes to mask")
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


_FAITHFUL = 1e-4
"""Largest relative change of the loss with all planes kept."""


@dataclass(frozen=True)
class Masked:
    """Loss and scores of a model with some planes masked.

    Attributes:
        loss: Mean next-token loss, nats.
        s_pos: Mean positional score over the masked heads with swap scores; NaN if there are none.
        s_sym: Mean symbolic score, likewise.
    """

    loss: float
    s_pos: float
    s_sym: float


class Masking:
    """Run a model on one text with bands of frequencies masked.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        heads: Heads to mask by layer, each ``(heads,)`` bool. Other layers are unchanged.
        bands: Number of bands.
        queries: Positions of the queries of swap scores.
        tau: Temperature of the swap weights.
        scored: Layers with swap scores.
        block_mib: Memory for one block of logits, in MiB.
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
        """Return the loss and the scores without one band."""
        return self._run(lambda bands: ~bands[band], scores=True)

    def only(self, band: int) -> float:
        """Return the loss with only one band."""
        return self._run(lambda bands: bands[band], scores=False).loss

    def random(self, seed: int) -> tuple[float, float]:
        """Return the loss without random planes in each layer, as many as a band has, and with only those."""

        def drawn(bands: Tensor) -> Tensor:
            return bands[0, torch.randperm(bands.shape[1], generator=generator)]

        generator = torch.Generator().manual_seed(seed)
        without = self._run(lambda bands: ~drawn(bands), scores=False).loss
        generator = torch.Generator().manual_seed(seed)
        return without, self._run(drawn, scores=False).loss

    def check(self, expected: float) -> None:
        """Raise an error if the loss with all planes kept differs from the expected loss."""
        dtypes: set[torch.dtype] = set()
        found = self._run(lambda bands: bands.any(0), scores=False, dtypes=dtypes).loss
        check_faithful("masking", found, expected, dtypes=dtypes, precision=_FAITHFUL)

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
            return attention_output(masked, block_mib=self._block_mib)

        loss = next_token_loss(self._subject.edited(self._ids, edit), self._ids)
        return Masked(loss, *(float(torch.cat(x).mean()) if x else torch.nan for x in (s_pos, s_sym)))
