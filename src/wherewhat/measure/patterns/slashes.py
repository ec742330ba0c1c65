"""Attention by lag: the mean weight on each sub-diagonal, a slash across the attention matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.attention.weights import WeightBlock


@dataclass(frozen=True)
class Slashes:
    """Mean attention weight at every lag Δ = i - j, over all n - Δ pairs of the text.

    Attributes:
        by_lag: ``(heads, lags)`` float64.
        uniform: The same for uniform attention over the visible keys, ``(lags,)`` float64.
        compared: Number of lags, from 0, that the maximum is taken over: those that half of the queries or more have.
            At larger lags few pairs are left, and the queries that look at the first token pass for a slash.
    """

    by_lag: Tensor
    uniform: Tensor
    compared: int

    @property
    def largest(self) -> Tensor:
        """The largest mean weight at a lag, ``(heads,)``."""
        return self.by_lag[:, : self.compared].amax(-1)

    @property
    def lag(self) -> Tensor:
        """The lag of the largest mean weight, ``(heads,)`` float64."""
        return self.by_lag[:, : self.compared].argmax(-1).double()

    @property
    def largest_uniform(self) -> float:
        """The largest that uniform attention has."""
        return float(self.uniform[: self.compared].amax())


class SlashSums:
    """Sums behind ``Slashes``, one block of queries after the other.

    Args:
        attention: The layer whose blocks will be added, n queries over n keys.
        max_lag: Largest lag; n - 1 where the text is too short for it.
    """

    def __init__(self, attention: LayerAttention, max_lag: int) -> None:
        self.lags = min(attention.n, max_lag + 1)
        self._n = attention.n
        # Uniform attention is one more head.
        self._sums = torch.zeros(attention.heads + 1, self.lags, dtype=torch.float64, device=attention.rot_q.device)

    def add(self, block: WeightBlock) -> None:
        """Take in the next block."""
        uniform = block.visible / block.seen.clamp_min(1)[:, None]
        self._sums[:-1] += lag_sums(block.weights, block.rows.start, self.lags)
        self._sums[-1:] += lag_sums(uniform[None], block.rows.start, self.lags)

    def result(self) -> Slashes:
        """Means over the pairs of all blocks."""
        pairs = self._n - torch.arange(self.lags, device=self._sums.device)
        means = (self._sums / pairs).cpu()
        return Slashes(means[:-1], means[-1], compared=min(self.lags, self._n // 2 + 1))


def lag_sums(weights: Tensor, start: int, lags: int) -> Tensor:
    """Sums over queries of the weights at each lag, ``(heads, lags)``.

    Args:
        weights: Rows ``start``, ``start + 1``, … of attention matrices, ``(heads, rows, m)``.
        start: Index of the first query.
        lags: Number of lags, from 0.
    """
    heads, rows, _ = weights.shape
    first = start - lags + 1  # the key at the largest lag from the first query; before the text if negative
    band = torch.nn.functional.pad(weights[..., max(0, first) : start + rows], (max(0, -first), 0)).contiguous()
    width = band.shape[-1]
    # One step more than a row makes each sub-diagonal a column of the same storage.
    skewed = band.as_strided((heads, rows, lags), (rows * width, width + 1, 1))
    return skewed.sum(1).flip(-1)
