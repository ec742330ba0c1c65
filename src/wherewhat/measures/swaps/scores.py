"""Positional and symbolic scores from all swaps of two keys, without running the model again, and head labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measures.swaps import LABELS, TAU
from wherewhat.options import short_repr


def label(s_pos: Tensor, s_sym: Tensor, gamma: float) -> Tensor:
    """Return the code of each head, an index into :data:`LABELS`, in the shape of the scores.

    A head is *pure* if one score is at least 1 - γ and the other at most γ, *uniform* if both are at least 1 - γ: only
    uniform attention is both positional and symbolic (arXiv 2605.31558). NaN scores give -1.
    """
    high_pos, high_sym = s_pos >= 1 - gamma, s_sym >= 1 - gamma
    code = torch.zeros_like(s_pos, dtype=torch.int64)
    code[high_pos & (s_sym <= gamma)] = LABELS.index("positional")
    code[high_sym & (s_pos <= gamma)] = LABELS.index("symbolic")
    code[high_pos & high_sym] = LABELS.index("uniform")
    code[s_pos.isnan() | s_sym.isnan()] = -1
    return code


_TILE = {"cpu": 128, "cuda": 512}
"""Side, in blocks, of the tiles in which M is computed; larger on a GPU, where each tile has a launch overhead."""

_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Entries of M computed at a time, to fit into a processor's cache or a GPU's memory."""


@dataclass(frozen=True)
class QueryLogits:
    """The logits of one query with any key at the position of any other key.

    Attributes:
        contents: Keys before rotation, ``(heads, n, d)``.
        placed: The query rotated back by each position, scale included, ``(heads, n, d)``: the logit of key c at
            position p is ``contents[c] · placed[p]``.
        logits: The actual logits, bias included, ``(heads, n)`` float64.
        weights: The actual attention weights, ``(heads, n)`` float64; they need not sum to one, because other keys (the
            query's own, a sink) may take part in the softmax.
        bias: Additive bias of each position, ``(heads, n)``, if any.
        softcap: ``softcap · tanh(logit / softcap)`` is applied before the bias, if given.
    """

    contents: Tensor
    placed: Tensor
    logits: Tensor
    weights: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    __repr__ = short_repr

    def heads(self, which: slice) -> QueryLogits:
        """Return some of the heads."""
        bias = None if self.bias is None else self.bias[which]
        contents, placed, logits, weights = (x[which] for x in (self.contents, self.placed, self.logits, self.weights))
        return QueryLogits(contents, placed, logits, weights, bias, self.softcap)


@dataclass(frozen=True)
class SwapScores:
    """Swap scores of heads at one query.

    Attributes:
        s_pos: Positional score, in [0, 1], ``(heads, taus)``.
        s_sym: Symbolic score, in [0, 1], ``(heads, taus)``.
        variance: Variance of the logits over positions, ``(heads,)``.
        positional_deviation: Mean over keys c and positions p of ``(M[c, p] - L_p)²``, ``(heads,)``: zero for a
            positional head.
        symbolic_deviation: Mean of ``(M[c, p] - L_c)²``, ``(heads,)``: zero for a symbolic head.
    """

    s_pos: Tensor
    s_sym: Tensor
    variance: Tensor
    positional_deviation: Tensor
    symbolic_deviation: Tensor

    __repr__ = short_repr

    @property
    def exclusion(self) -> Tensor:
        """``(positional + symbolic deviation) / variance``, ``(heads,)``: at least 1, infinite for constant logits.

        ``(L_c - L_p)² ≤ 2 (M - L_p)² + 2 (M - L_c)²``, averaged over all c and p.
        """
        total = self.positional_deviation + self.symbolic_deviation
        return torch.where(self.variance > 0, total / self.variance, torch.inf)


def score_swaps(query: QueryLogits, *, taus: tuple[float, ...] = (TAU,), block: int = 1) -> SwapScores:
    """Return exact scores from all swaps of two blocks of keys.

    ``s_pos = Σ α cos(v', v)`` and ``s_sym = Σ α cos(v', reversed v)`` over all swaps of blocks I < J, with
    ``v = (D_I, D_J)`` the block means of the attention before and ``v'`` after the swap, and
    ``α = softmax |D_I - D_J| / τ`` over the swaps.

    Time O(n² d / block) per head, memory independent of n. Deviations are of single keys if ``block`` is 1, of the
    logarithm of block sums otherwise.

    Args:
        query: One query of some heads.
        taus: Temperatures τ of the swap weights.
        block: Keys per block. Keys left over at the end are not swapped.
    """
    heads, n, _ = query.contents.shape
    count = n // block
    device = query.contents.device.type
    step = max(1, _ENTRIES.get(device, 2**22) // (block * min(count, _TILE.get(device, 128)) ** 2))
    found = [_score(query.heads(slice(h, h + step)), taus, block, count) for h in range(0, heads, step)]
    return SwapScores(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _score(query: QueryLogits, taus: tuple[float, ...], block: int, count: int) -> tuple[Tensor, ...]:
    heads = query.contents.shape[0]
    used = count * block
    logits = query.logits[:, :used].view(heads, count, block).logsumexp(-1)
    weights = query.weights[:, :used].view(heads, count, block).mean(-1)
    # The largest exponent is known in advance, so sums over tiles need no running maximum.
    largest = (weights.amax(-1) - weights.amin(-1))[:, None, None]
    total, positional, symbolic = (torch.zeros(heads, len(taus), dtype=torch.float64).to(logits) for _ in range(3))
    from_place, from_content = (torch.zeros(heads, dtype=torch.float64).to(logits) for _ in range(2))
    middle = logits.mean(-1, keepdim=True)
    centred = (logits - middle).to(query.contents.dtype)  # avoids cancellation of large logits in float32
    shift = middle[:, None].to(centred)
    for rows, columns in _tiles(count, _TILE.get(logits.device.type, 128)):
        forth = _logits(query, rows, columns, block).sub_(shift)  # keys of rows at the positions of columns
        back = forth if rows is columns else _logits(query, columns, rows, block).sub_(shift)
        for there, contents, places in ((forth, rows, columns), (back, columns, rows)):
            squares = there.square().sum((-1, -2)).double()
            at_place, of_content = centred[:, places], centred[:, contents]
            from_place += squares + _dot(at_place, there.shape[1] * at_place - 2 * there.sum(1))
            from_content += squares + _dot(of_content, there.shape[2] * of_content - 2 * there.sum(2))
            if rows is columns:
                break
        same, reverse = _cosines(centred[:, rows, None] - centred[:, None, columns], back.mT - forth)
        gap = (weights[:, rows, None] - weights[:, None, columns]).abs_().sub_(largest)
        gap = gap.to(same.dtype)  # after the differences, which are exact near zero, where weights are large
        if rows is columns:
            # Count each swap once: the lower triangle holds the same swaps as the upper one.
            once = torch.ones(gap.shape[1:], dtype=gap.dtype, device=gap.device).triu_(1)
        for index, tau in enumerate(taus):
            alpha = (gap / tau).clamp_(min=-80).exp_()  # subnormal numbers would be slow and negligible
            if rows is columns:
                alpha *= once
            total[:, index] += alpha.sum((-1, -2)).double()
            positional[:, index] += _dot(alpha, same)
            symbolic[:, index] += _dot(alpha, reverse)
    pairs = count**2
    variance = logits.var(-1, correction=0)
    scores = (positional / total).clamp(0, 1), (symbolic / total).clamp(0, 1)
    return *scores, variance, from_place / pairs, from_content / pairs


def _cosines(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine of ``(e^a, e^b)`` before and after a swap, and with its reverse, from ``a - b``."""
    # A direction is (1, e) / √(1 + e²). Clamping at ±21 changes it by less than 1e-9; squares stay finite.
    ratio, ratio_after = (x.clamp(-21, 21).neg_().exp_() for x in (before, after))
    size = ratio.square().add_(1).mul_(ratio_after.square().add_(1)).rsqrt_()
    same = (ratio * ratio_after).add_(1).mul_(size)
    return same, ratio.add_(ratio_after).mul_(size)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of products over all but the first dimension, ``(heads,)`` float64."""
    products: Tensor = torch.linalg.vecdot(x.flatten(1), y.flatten(1))
    return products.double()


def _tiles(count: int, side: int) -> Iterator[tuple[slice, slice]]:
    """Yield tiles of ``side`` by ``side`` over all pairs of blocks; the same slice object twice on the diagonal."""
    parts = [slice(start, min(count, start + side)) for start in range(0, count, side)]
    for i, rows in enumerate(parts):
        for columns in parts[i:]:
            yield rows, columns


def _logits(query: QueryLogits, contents: slice, places: slice, block: int) -> Tensor:
    """Return log-sum-exp logits of blocks of keys at blocks of positions, ``(heads, contents, places)``."""

    def blocks(x: Tensor, which: slice) -> Tensor:
        """Return ``(heads, n, …)`` as ``(heads, block, blocks, …)``: the first keys of all blocks come first."""
        part = x[:, which.start * block : which.stop * block]
        return part.view(x.shape[0], -1, block, *x.shape[2:]).transpose(1, 2)

    logits = blocks(query.contents, contents) @ blocks(query.placed, places).mT
    if query.softcap is not None:
        logits = query.softcap * torch.tanh(logits / query.softcap)
    if query.bias is not None:
        logits = logits + blocks(query.bias, places)[:, :, None].to(logits.dtype)
    return logits[:, 0] if block == 1 else logits.logsumexp(1)
