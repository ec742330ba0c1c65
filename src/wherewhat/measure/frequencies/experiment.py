"""Bands of frequencies taken out of heads, or left alone in them, inside the forward pass: the causal side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measure.base import Subject
from wherewhat.measure.frequencies.masking import attend, frequency_bands, without_planes
from wherewhat.measure.losses import allowed_change, next_token_loss
from wherewhat.measure.swaps.layer import layer_swaps

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
        """Make sure that masking nothing changes nothing.

        Raises:
            MeasureError: If the loss is not that of the untouched model.
        """
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
