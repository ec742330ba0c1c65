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
class Masking:
    """Runs of a model on one text with bands of frequencies masked.

    Attributes:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        heads: Heads to mask by layer, each ``(heads,)`` bool. Other layers are unchanged.
        bands: Number of bands.
        queries: Positions of the queries of swap scores.
        tau: Temperature of the swap weights.
        scored: Layers with swap scores.
        block_mib: Memory for one block of logits, in MiB.
    """

    subject: Subject
    ids: Tensor
    heads: Mapping[int, Tensor]
    bands: int
    queries: Sequence[int]
    tau: float
    scored: frozenset[int]
    block_mib: int

    def without(self, band: int) -> tuple[float, float, float]:
        """Return the loss without one band, and the mean scores of the masked heads, NaN if none has scores."""
        s_pos: list[Tensor] = []
        s_sym: list[Tensor] = []

        def score(masked: LayerAttention) -> None:
            if masked.layer in self.scored:
                swaps = layer_swaps(masked, self.queries, tau=self.tau)
                s_pos.append(swaps.s_pos[self.heads[masked.layer]].mean(-1))
                s_sym.append(swaps.s_sym[self.heads[masked.layer]].mean(-1))

        loss = self._loss(lambda bands: ~bands[band], score)
        positional, symbolic = (float(torch.cat(x).mean()) if x else torch.nan for x in (s_pos, s_sym))
        return loss, positional, symbolic

    def only(self, band: int) -> float:
        """Return the loss with only one band."""
        return self._loss(lambda bands: bands[band])

    def random(self, seed: int) -> tuple[float, float]:
        """Return the loss without random planes in each layer, as many as a band has, and with only those."""

        def drawn(bands: Tensor) -> Tensor:
            return bands[0, torch.randperm(bands.shape[1], generator=generator)]

        generator = torch.Generator().manual_seed(seed)
        without = self._loss(lambda bands: ~drawn(bands))
        generator = torch.Generator().manual_seed(seed)
        return without, self._loss(drawn)

    def check(self, expected: float) -> None:
        """Raise an error if the loss with all planes kept differs from the expected loss."""
        dtypes: set[torch.dtype] = set()
        found = self._loss(lambda bands: bands.any(0), lambda masked: dtypes.add(masked.rot_q.dtype))
        check_faithful("masking", found, expected, dtypes=dtypes, precision=_FAITHFUL)

    def _loss(
        self, keep: Callable[[Tensor], Tensor], reducer: Callable[[LayerAttention], None] = lambda _: None
    ) -> float:
        """Return the loss with the planes that ``keep`` returns for bands ``(bands, planes)``.

        ``reducer`` is called with each masked layer.
        """

        def edit(attention: LayerAttention) -> Tensor | None:
            heads = self.heads.get(attention.layer)
            if heads is None:
                return None
            assert attention.rotation is not None
            kept = keep(frequency_bands(attention.rotation.inv_freq, self.bands))
            masked = without_planes(attention, kept, heads=heads)
            reducer(masked)
            return attention_output(masked, block_mib=self.block_mib)

        return next_token_loss(self.subject.edited(self.ids, edit), self.ids)
