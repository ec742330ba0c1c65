"""Positional and symbolic scores from all swaps of two keys, without re-running the model, and head labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measures.swaps import LABELS, TAU


def label(s_pos: Tensor, s_sym: Tensor, gamma: float) -> Tensor:
    """Code of each head, an index into :data:`LABELS`, in the shape of the scores.

    A head is *pure* if one score is at least 1 - γ and the other at most γ, *uniform* if both are at least 1 - γ: only
    even attention can be both positional and symbolic (arXiv 2605.31558). NaN scores give -1.
    """
    high_pos, high_sym = s_pos >= 1 - gamma, s_sym >= 1 - gamma
    code = torch.zeros_like(s_pos, dtype=torch.int64)
    code[high_pos & (s_sym <= gamma)] = LABELS.index("positional")
    code[high_sym & (s_pos <= gamma)] = LABELS.index("symbolic")
    code[high_pos & high_sym] = LABELS.index("uniform")
    code[s_pos.isnan() | s_sym.isnan()] = -1
    return code


_TILE = {"cpu": 128, "cuda": 512}
"""Blocks on a side of the tiles M is made in; a GPU waits for each to be launched."""

_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Entries of M made at a time: what a processor's cache, or a GPU's memory, holds easily."""


@dataclass(frozen=True)
class QueryLogits:
    """What one query's logits would be with any key's content at any other key's place.

    Attributes:
        contents: Keys before rotation, ``(heads, n, d)``.
        placed: The query as each place sees it, scale included, ``(heads, n, d)``: the logit of content c at place p
            is ``contents[c] · placed[p]``.
        logits: The logits as they are, bias included, ``(heads, n)`` float64.
        weights: The attention weights as they are, ``(heads, n)`` float64; they need not sum to one, because other keys
            (the query's own, a sink) may take part in the softmax.
        bias: Additive bias of each place, ``(heads, n)``, if any.
        softcap: ``softcap · tanh(logit / softcap)`` is applied before the bias, if given.
    """

    contents: Tensor
    placed: Tensor
    logits: Tensor
    weights: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    def heads(self, which: slice) -> QueryLogits:
        """Some of the heads."""
        bias = None if self.bias is None else self.bias[which]
        contents, placed, logits, weights = (x[which] for x in (self.contents, self.placed, self.logits, self.weights))
        return QueryLogits(contents, placed, logits, weights, bias, self.softcap)


@dataclass(frozen=True)
class SwapScores:
    """Scores of heads at one query.

    Attributes:
        s_pos: Positional score, in [0, 1], ``(heads, taus)``.
        s_sym: Symbolic score, in [0, 1], ``(heads, taus)``.
        variance: Variance of the logits over places, ``(heads,)``.
        positional_deviation: Mean over contents c and places p of ``(M[c, p] - L_p)²``, ``(heads,)``: zero for a
            positional head.
        symbolic_deviation: Mean of ``(M[c, p] - L_c)²``, ``(heads,)``: zero for a symbolic head.
    """

    s_pos: Tensor
    s_sym: Tensor
    variance: Tensor
    positional_deviation: Tensor
    symbolic_deviation: Tensor

    @property
    def exclusion(self) -> Tensor:
        """``(positional + symbolic deviation) / variance``, ``(heads,)``: never below 1, infinite for constant logits.

        ``(L_c - L_p)² ≤ 2 (M - L_p)² + 2 (M - L_c)²``, averaged over all c and p: only constant logits can be both.
        """
        total = self.positional_deviation + self.symbolic_deviation
        return torch.where(self.variance > 0, total / self.variance, torch.inf)


def score_swaps(query: QueryLogits, *, taus: tuple[float, ...] = (TAU,), block: int = 1) -> SwapScores:
    """Scores from all swaps of two blocks of keys, exactly.

    ``s_pos = Σ α cos(v', v)`` and ``s_sym = Σ α cos(v', reversed v)`` over all swaps of blocks I < J, with
    ``v = (D_I, D_J)`` the block means of the attention before and ``v'`` after the swap, and
    ``α = softmax |D_I - D_J| / τ`` over the swaps.

    Time O(n² d / block) per head, memory bounded whatever n is. Deviations are those of single keys if ``block`` is 1,
    of the logarithm of block sums otherwise.

    Args:
        query: One query of some heads.
        taus: Temperatures τ of the weights.
        block: Keys per block. Keys left over at the end stay where they are.
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
    # The largest exponent is known beforehand, so sums over tiles need no running maximum.
    largest = (weights.amax(-1) - weights.amin(-1))[:, None, None]
    total, positional, symbolic = (torch.zeros(heads, len(taus), dtype=torch.float64).to(logits) for _ in range(3))
    from_place, from_content = (torch.zeros(heads, dtype=torch.float64).to(logits) for _ in range(2))
    middle = logits.mean(-1, keepdim=True)
    centred = (logits - middle).to(query.contents.dtype)  # differences of large logits would lose digits in float32
    shift = middle[:, None].to(centred)
    for rows, columns in _tiles(count, _TILE.get(logits.device.type, 128)):
        forth = _logits(query, rows, columns, block).sub_(shift)  # contents of rows at the places of columns
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
        gap = gap.to(same.dtype)  # after the differences: near zero, where weights are large, nothing is lost
        if rows is columns:
            # Each swap once: the lower triangle is the upper one seen from the other side.
            once = torch.ones(gap.shape[1:], dtype=gap.dtype, device=gap.device).triu_(1)
        for index, tau in enumerate(taus):
            alpha = (gap / tau).clamp_(min=-80).exp_()  # less would be slow (subnormal) and nothing
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
    """Cosine of the angle from ``(e^a, e^b)`` to the same after a swap, and to its reverse, by ``a - b`` of each."""
    # A direction is (1, e) / √(1 + e²). Differences beyond ±21 turn it by less than 1e-9, and squares stay finite.
    ratio, ratio_after = (x.clamp(-21, 21).neg_().exp_() for x in (before, after))
    size = ratio.square().add_(1).mul_(ratio_after.square().add_(1)).rsqrt_()
    same = (ratio * ratio_after).add_(1).mul_(size)
    return same, ratio.add_(ratio_after).mul_(size)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of products over all but the first dimension, ``(heads,)`` float64."""
    products: Tensor = torch.linalg.vecdot(x.flatten(1), y.flatten(1))
    return products.double()


def _tiles(count: int, side: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of ``side`` by ``side`` that cover all pairs of blocks once; the very same slice twice on the diagonal."""
    parts = [slice(start, min(count, start + side)) for start in range(0, count, side)]
    for i, rows in enumerate(parts):
        for columns in parts[i:]:
            yield rows, columns


def _logits(query: QueryLogits, contents: slice, places: slice, block: int) -> Tensor:
    """Logits of blocks of contents at blocks of places, ``(heads, contents, places)``, as log of sums over a block."""

    def blocks(x: Tensor, which: slice) -> Tensor:
        """``(heads, n, …)`` as ``(heads, block, blocks, …)``: the first keys of all blocks together, and so on."""
        part = x[:, which.start * block : which.stop * block]
        return part.view(x.shape[0], -1, block, *x.shape[2:]).transpose(1, 2)

    logits = blocks(query.contents, contents) @ blocks(query.placed, places).mT
    if query.softcap is not None:
        logits = query.softcap * torch.tanh(logits / query.softcap)
    if query.bias is not None:
        logits = logits + blocks(query.bias, places)[:, :, None].to(logits.dtype)
    return logits[:, 0] if block == 1 else logits.logsumexp(1)
