"""Positional and symbolic scores from all swaps of two keys that have a weight, and head labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wherewhat.measures.swaps import LABELS, SINK, TAU
from wherewhat.measures.swaps.logits import QueryLogits, block_logits, in_blocks, to_real
from wherewhat.measures.tensors import over_documents
from wherewhat.numerics import constant_tensor
from wherewhat.options import short_repr


def label(s_pos: Tensor, s_sym: Tensor, gamma: float, *, sink: Tensor | None = None) -> Tensor:
    """Return the code of each head, an index into :data:`LABELS`, in the shape of the scores.

    A head is *pure* if one score is at least 1 - γ and the other at most γ, *uniform* if both are at least 1 - γ: only
    uniform attention is both positional and symbolic (arXiv 2605.31558). NaN scores give -1. Sink heads, where they are
    given, have the label *sink* whatever their scores.

    Args:
        s_pos: Positional scores.
        s_sym: Symbolic scores, the same shape.
        gamma: Largest distance of a pure head's scores from 0 and 1.
        sink: True for sink heads, see :func:`sink_heads`; None labels heads by their scores alone.
    """
    high_pos, high_sym = s_pos >= 1 - gamma, s_sym >= 1 - gamma
    codes = {
        "positional": high_pos & (s_sym <= gamma),
        "symbolic": high_sym & (s_pos <= gamma),
        "uniform": high_pos & high_sym,
    }
    code = torch.zeros_like(s_pos, dtype=torch.int64)
    for name, heads in codes.items():
        code = code.masked_fill(heads, LABELS.index(name))
    code = code.masked_fill(s_pos.isnan() | s_sym.isnan(), -1)
    return code if sink is None else code.masked_fill(sink, LABELS.index("sink"))


def sink_heads(excess: Tensor, threshold: float = SINK) -> Tensor:
    """Return which heads are attention sinks, ``(heads,)`` bool.

    Their attention on the first tokens exceeds that of uniform attention by the threshold on average, and the 95 %
    interval of the excess over documents, where there are several, is above 0.

    Args:
        excess: Share of attention on the first tokens minus that of uniform attention, ``(heads, documents)``.
        threshold: Smallest mean excess.
    """
    low = over_documents(excess[..., None])[:, 0]  # NaN for a single document
    return (excess.double().nanmean(-1) >= threshold) & ~(low <= 0)


LEFT_OUT = 1e-7
"""Largest total weight of the swaps that are left out."""

_EVEN = 1 / 8
"""All swaps of a query are computed if more than this share of its keys takes part in swaps with a weight."""

_TILE = {"cpu": 128, "cuda": 512}
"""Smallest side, in blocks, of the tiles of all swaps; larger on a GPU, where each tile has a launch overhead."""

_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Swaps computed at a time, to fit into a processor's cache or a GPU's memory."""

_SLOTS = 4
"""Pivots per query, on average, whose swaps are computed where their number is not read first."""


@dataclass(frozen=True)
class SwapScores:
    """Swap scores of queries; NaN for queries with fewer than two blocks of keys.

    Attributes:
        s_pos: Positional score, in [0, 1], ``(groups, rows, taus)``.
        s_sym: Symbolic score, in [0, 1], ``(groups, rows, taus)``.
        bound: Upper bound on the error of both scores, ``(groups, rows)``: the weight of the swaps that were left out.
        kept: Share of the swaps that were computed, ``(groups, rows)``.
        effective: Effective number of swaps at the first temperature, ``(groups, rows)``; exact, from all swaps.
    """

    s_pos: Tensor
    s_sym: Tensor
    bound: Tensor
    kept: Tensor
    effective: Tensor

    __repr__ = short_repr


@dataclass(frozen=True)
class Blocks:
    """Keys of queries in blocks: ``logits`` and ``weights`` ``(groups, rows, blocks)``, ``seen`` ``(rows, blocks)``."""

    query: QueryLogits
    size: int
    logits: Tensor
    weights: Tensor
    counts: Tensor
    seen: Tensor

    @classmethod
    def of(cls, query: QueryLogits, size: int) -> Blocks:
        """Return the keys of queries in blocks of ``size``; keys left over at the end are not in them."""
        logits, weights, count = query.logits, query.weights, query.logits.shape[-1] // size
        if size > 1:
            logits, weights = (torch.unflatten(x[..., : count * size], -1, (count, size)) for x in (logits, weights))
            logits, weights = logits.logsumexp(-1), weights.mean(-1)
        counts = constant_tensor(query.counts, logits.device) // size
        seen = torch.arange(count, device=logits.device) < counts[:, None]
        return cls(query, size, logits, weights, counts, seen)

    def keys(self, blocks: Tensor) -> Tensor:
        """Return indices of the keys of blocks ``(...)``, ``(..., size)``."""
        return blocks[..., None] * self.size + torch.arange(self.size, device=blocks.device)

    def limit(self, by_device: dict[str, int]) -> int:
        """Return the limit that holds on the device of the keys."""
        return by_device.get(self.logits.device.type, by_device["cpu"])


@torch.no_grad()
def score_swaps(
    query: QueryLogits, *, taus: tuple[float, ...] = (TAU,), block: int = 1, effective: bool = True
) -> SwapScores:
    """Return exact scores from all swaps of two blocks of keys.

    ``s_pos = Σ α cos(v', v)`` and ``s_sym = Σ α cos(v', reversed v)`` over all swaps of blocks I < J, with
    ``v = (D_I, D_J)`` the block means of the attention before and ``v'`` after the swap, and
    ``α = softmax |D_I - D_J| / τ`` over the swaps.

    Only swaps with a block whose weight is within ``τ ln(n / 1e-7)`` of the largest (or of the smallest, where those
    are fewer) are computed: the others weigh less than 1e-7 together. Where most blocks are, as in uniform attention at
    the scale of τ, tiles of all swaps are computed, except those that weigh too little. Time is O(n d) per query for a
    fixed number of such blocks and O(n² d) at worst; memory is O(n).

    Args:
        query: Queries and their keys.
        taus: Temperatures τ of the swap weights.
        block: Keys per block. Keys left over at the end are not swapped.
        effective: Whether to compute the effective number of swaps; otherwise it is NaN.
    """
    pivots = Pivots.of(query, taus, block)
    scores = pivots.scores(pivots.sums(int(pivots.each.amax())), effective=effective)
    for where, parts in _tiled_swaps(pivots.blocks, pivots.even, pivots.number, taus):
        for values, part in zip((scores.s_pos, scores.s_sym, scores.bound, scores.kept), parts, strict=True):
            values[where] = part
    return scores


def effective_swaps(weights: Tensor, seen: Tensor, tau: float) -> Tensor:
    """Return the exponential of the entropy of the swap weights α, ``(...)`` float64: 1 if one swap has all the weight.

    Exact, over all swaps: for weights sorted in ascending order, α of the swap of i < j is a product of ``e^(w_j / τ)``
    and ``e^(-w_i / τ)``, so that the sums over pairs are cumulative sums, in O(n log n).

    Args:
        weights: Attention weights of blocks, ``(..., blocks)``.
        seen: True for the blocks that take part, broadcastable to ``weights``.
        tau: Temperature τ.

    Returns:
        Number between 1 and the number of swaps; NaN with fewer than two blocks.
    """
    # Blocks that are not seen come last and have no weight.
    ordered = weights.double().masked_fill(~seen, torch.inf).sort().values
    count = seen.sum(-1, keepdim=True).expand(*weights.shape[:-1], 1)
    here = torch.arange(weights.shape[-1], device=weights.device) < count
    lowest, highest = ordered[..., :1], ordered.gather(-1, (count - 1).clamp_min(0))
    # Both exponents are at most 0, and 0 for the swap of the smallest with the largest weight. Those of blocks that are
    # not seen are set to 0, to be finite: they are multiplied by a weight of 0.
    rise, fall = ((x / tau).masked_fill_(~here, 0.0) for x in (ordered - highest, lowest - ordered))
    up, down = (x.exp().masked_fill_(~here, 0.0) for x in (rise, fall))
    return torch.where(count[..., 0] > 1, swap_entropy(rise, fall, up, down).exp(), torch.nan)


def swap_entropy(rise: Tensor, fall: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the entropy of α, nats, ``(...)``, from its factors for weights in ascending order.

    Args:
        rise: Logarithm of the factor of the larger weight, ``(..., blocks)`` float64.
        fall: Logarithm of the factor of the smaller weight.
        up: Factor of the larger weight, zero for blocks that do not take part.
        down: Factor of the smaller weight.
    """
    before, before_exponents = (x.cumsum(-1) - x for x in (down, down * fall))  # sums over i < j
    total = (up * before).sum(-1)
    exponents = (up * (rise * before + before_exponents)).sum(-1)
    return (total.log() - exponents / total).clamp_min(0)


@dataclass(frozen=True)
class Pivots:
    """Blocks with the largest (or the smallest) weights of each query, whose swaps with all others are computed.

    Attributes:
        blocks: Keys in blocks.
        taus: Temperatures.
        chosen: True for the pivots, ``(groups, rows, blocks)``; none for the queries of ``even``.
        even: Queries with so many pivots that tiles of all swaps are computed instead, ``(groups, rows)``.
        number: Number of pivots, of those queries too, ``(groups, rows)``.
        least: Whether they have the smallest weights, ``(groups, rows)``.
        highest: Largest weight, ``(groups, rows, 1)``.
        lowest: Smallest weight, ``(groups, rows, 1)``.
    """

    blocks: Blocks
    taus: tuple[float, ...]
    chosen: Tensor
    even: Tensor
    number: Tensor
    least: Tensor
    highest: Tensor
    lowest: Tensor

    @classmethod
    def of(cls, query: QueryLogits, taus: tuple[float, ...], block: int) -> Pivots:
        """Return the pivots of queries for temperatures and a block size."""
        blocks = Blocks.of(query, block)
        weights, counts, seen = blocks.weights, blocks.counts, blocks.seen
        highest = weights.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        lowest = weights.masked_fill(~seen, torch.inf).amin(-1, keepdim=True)
        reach = max(taus) * (counts.clamp_min(1) / LEFT_OUT).log()[:, None]
        near_highest, near_lowest = seen & (weights >= highest - reach), seen & (weights <= lowest + reach)
        least = near_lowest.sum(-1) < near_highest.sum(-1)
        chosen = torch.where(least[..., None], near_lowest, near_highest)
        number = chosen.sum(-1)
        even = (number > counts * _EVEN) & (counts > 1)
        chosen &= ~(even | (counts < 2))[..., None]
        return cls(blocks, taus, chosen, even, number, least, highest, lowest)

    @cached_property
    def each(self) -> Tensor:
        """Number of pivots of each group, ``(groups,)``."""
        return self.chosen.sum((-1, -2))

    def first_scores(self, *, effective: bool = True) -> tuple[SwapScores, Tensor]:
        """Return scores from the swaps of as many pivots as fit, without synchronisation, and whether these are all."""
        groups, rows, count = self.chosen.shape
        slots = min(_SLOTS * rows, self.blocks.limit(_ENTRIES) // (groups * count * self.blocks.size))
        complete = (self.each.amax() <= slots) & ~self.even.any()
        return self.scores(self.sums(slots, everywhere=True), effective=effective), complete

    def scores(self, sums: Tensor, *, effective: bool = True) -> SwapScores:
        """Return scores from the sums of all pivots, ``(groups, rows, 3, taus)``; see :func:`score_swaps`."""
        weights, counts, seen = self.blocks.weights, self.blocks.counts, self.blocks.seen
        total, middle, apart = sums.unbind(-2)
        left = torch.empty_like(total)
        for index, tau in enumerate(self.taus):
            rise, fall = (
                (x / tau).masked_fill_(~seen, -torch.inf).exp_()
                for x in (weights - self.highest, self.lowest - weights)
            )
            ours, partners = (torch.where(self.least[..., None], *both) for both in ((fall, rise), (rise, fall)))
            left[..., index] = ours.masked_fill(self.chosen, 0).sum(-1) * partners.sum(-1)
        return SwapScores(
            s_pos=((middle + apart) / total).clamp(0, 1),
            s_sym=((middle - apart) / total).clamp(0, 1),
            bound=(left / (total + left)).amax(-1),
            kept=self.number * (2 * counts - self.number - 1) / (counts * (counts - 1)).double(),
            effective=effective_swaps(weights, seen, self.taus[0])
            if effective
            else torch.full_like(total[..., 0], torch.nan),
        )

    def sums(self, number: int, *, everywhere: bool = False) -> Tensor:
        """Return sums over the swaps of the first pivots of each group, which are ordered by query, with all blocks.

        Args:
            number: Number of pivots of each group.
            everywhere: Whether to compute groups that have fewer pivots too; otherwise, on a GPU, their number is read.

        Returns:
            Sums of α, and of α times both :func:`cosine_parts`, ``(groups, rows, 3, taus)`` float64.
        """
        blocks, query, (groups, rows, count) = self.blocks, self.blocks.query, self.chosen.shape
        sums = torch.zeros(groups, rows, 3 * len(self.taus), dtype=torch.float64, device=self.chosen.device)
        if number == 0:
            return torch.unflatten(sums, -1, (3, -1))
        step = max(1, blocks.limit(_ENTRIES) // (groups * count * blocks.size))
        contents, places = in_blocks(query.k, blocks.size), in_blocks(query.turns, blocks.size)
        ordered = self.chosen.flatten().cumsum(0)  # number of pivots up to each block
        each = self.each
        before, every = each.cumsum(0) - each, torch.arange(groups, device=each.device)
        for first in range(0, number, step):
            group = every if everywhere else (each > first).nonzero()[:, 0]
            slots = torch.arange(first, min(first + step, number), device=each.device)
            index = torch.searchsorted(ordered, before[group, None] + slots + 1).clamp_max_(len(ordered) - 1)
            row, block = index // count % rows, index % count  # (groups, slots)
            real = slots < each[group, None]  # the others are any blocks, without weight
            chosen = slice(None) if len(group) == groups else group
            parts = self._swaps(
                group[:, None], row, block, real, contents[chosen], places if len(places) == 1 else places[chosen]
            )
            own = row[:, None] == torch.arange(rows, device=row.device)[:, None]  # (groups, rows, slots)
            sums[chosen] += own.double() @ parts  # in a fixed order, unlike index_add_ on a GPU
        return torch.unflatten(sums, -1, (3, -1))

    def _swaps(
        self, group: Tensor, row: Tensor, block: Tensor, real: Tensor, contents: Tensor, places: Tensor
    ) -> Tensor:
        """Return the sums of single pivots, ``(groups, slots, 3 taus)``.

        Args:
            group: Groups, ``(groups, 1)``.
            row: Query of each pivot, ``(groups, slots)``.
            block: Its block, ``(groups, slots)``.
            real: Whether it counts, ``(groups, slots)``.
            contents: Keys of these groups in blocks.
            places: Rotations of positions in blocks.
        """
        blocks, query = self.blocks, self.blocks.query
        keys, q, every = blocks.keys(block), query.q[group, row][:, :, None], group[..., None]
        turns = query.turns.expand(len(query.k), -1, -1)
        bias_here = bias_there = None
        if query.bias is not None:
            bias = query.bias[group, row][..., : self.chosen.shape[-1] * blocks.size]
            bias_here = bias.gather(-1, keys).transpose(1, 2)[..., None]
            bias_there = torch.unflatten(bias, -1, (-1, blocks.size)).permute(0, 3, 1, 2)
        from_here, to_here = (to_real(q * x[every, keys].conj()).transpose(1, 2) for x in (query.k, turns))
        moved = block_logits(from_here, places, bias_there, query.softcap)
        moved = moved - block_logits(to_here, contents, bias_here, query.softcap)
        own = blocks.logits[group, row]
        middle, apart = cosine_parts(
            (own - own.gather(-1, block[..., None])).to(moved.dtype).mul_(0.5), moved.mul_(0.5)
        )
        own = blocks.weights[group, row]
        gap = own.gather(-1, block[..., None]) - own
        gap = torch.where(self.least[group, row][..., None], -gap, gap)
        # A swap of two pivots is counted once: of the one beyond the other, or half of each if they are equal.
        once = torch.heaviside(gap, torch.full_like(gap[:1, :1, :1], 0.5)).mul_(blocks.seen[row]).mul_(real[..., None])
        once = once.scatter_(-1, block[..., None], 0.0).to(moved.dtype)
        gap = gap.sub_((self.highest - self.lowest)[group, row]).clamp_(max=0)
        gap = gap.to(moved.dtype)  # after the differences, which are exact near zero, where weights are large
        totals: list[list[Tensor]] = [[], [], []]
        for tau in self.taus:
            alpha = (gap / tau).clamp_(min=-80).exp_().mul_(once)  # subnormal numbers would be slow and negligible
            for sums, x in zip(totals, (alpha, alpha * middle, alpha.mul(apart)), strict=True):
                sums.append(x.sum(-1, dtype=torch.float64))
        return torch.stack([x for sums in totals for x in sums], -1)


def _tiled_swaps(
    blocks: Blocks, chosen: Tensor, number: Tensor, taus: tuple[float, ...]
) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]]:
    """Yield indices ``(m,)``, ``(m,)`` of chosen queries ``(groups, rows)`` and their scores, bound and share.

    Queries with a similar ``number`` ``(groups, rows)`` of blocks that take part are computed together.
    """
    group, row = chosen.nonzero(as_tuple=True)
    side, entries = (blocks.limit(x) for x in (_TILE, _ENTRIES))
    for count in sorted(set(blocks.counts[row].tolist())):
        alike = (blocks.counts[row] == count).nonzero()[:, 0]
        alike = alike[number[group, row][alike].argsort()]
        step = max(1, entries // (blocks.size * min(side, count) ** 2))
        for index in torch.split(alike, step):
            where = group[index], row[index]
            longest = max(side, math.isqrt(entries // (blocks.size * len(index))))
            yield where, _tiles(blocks, *where, count, longest, taus)


def _tiles(
    blocks: Blocks, group: Tensor, row: Tensor, count: int, side: int, taus: tuple[float, ...]
) -> tuple[Tensor, ...]:
    """Return scores ``(m, taus)``, bound and share of swaps ``(m,)`` of m queries that see ``count`` blocks of keys."""
    query = blocks.query
    weights, order = blocks.weights[group, row, :count].sort()
    logits = blocks.logits[group, row].gather(-1, order)
    # Of two sorted blocks i < j, α is a product of one factor of each.
    rise, fall = (  # (m, taus, blocks)
        torch.stack([(x / tau).clamp_(min=-50).exp_() for tau in taus], 1)  # subnormal products would be slow
        for x in (weights - weights[:, -1:], weights[:, :1] - weights)
    )
    total = (rise[..., 1:] * fall.cumsum(-1)[..., :-1]).sum(-1)
    parts = [slice(start, min(count, start + side)) for start in range(0, count, side)]
    up, down = (torch.stack([x[..., part].sum(-1) for part in parts], -1) for x in (rise, fall))
    mass = (up[..., :, None] * down[..., None, :] / total[..., None, None]).tril_()  # (m, taus, tiles, tiles)
    needed = mass.amax((0, 1)) > LEFT_OUT / len(parts) ** 2
    bound = mass.masked_fill_(needed, 0).sum((-1, -2)).amax(-1)

    keys = blocks.keys(order).transpose(1, 2)  # (m, size, blocks)
    q = query.q[group, row][:, None, None]
    contents = to_real(query.k[group[:, None, None], keys])
    placed = to_real(q * query.turns.expand(len(query.k), -1, -1)[group[:, None, None], keys].conj())
    bias = None if query.bias is None else query.bias[group[:, None, None], row[:, None, None], keys]
    logits = ((logits - logits.mean(-1, keepdim=True)) / 2).to(placed.dtype)  # centred: the logits may be large
    rise, fall = rise.to(placed.dtype), fall.to(placed.dtype)
    sums = torch.zeros(2, *total.shape, dtype=total.dtype, device=total.device)
    pairs = 0
    for upper, lower in needed.nonzero().tolist():
        j, i = parts[upper], parts[lower]
        moved = block_logits(
            contents[:, :, j], placed[:, :, i], None if bias is None else bias[:, :, None, i], query.softcap
        )
        moved = moved - block_logits(
            placed[:, :, j], contents[:, :, i], None if bias is None else bias[:, :, j, None], query.softcap
        )
        once = torch.ones_like(moved[0]).tril_(-1) if upper == lower else None
        for total_of, part in zip(
            sums, cosine_parts(logits[:, None, i] - logits[:, j, None], moved.mul_(0.5), once), strict=True
        ):
            total_of += ((rise[..., j] @ part) * fall[..., i]).sum(-1, dtype=torch.float64)
        size = j.stop - j.start
        pairs += size * (size - 1) // 2 if upper == lower else size * (i.stop - i.start)
    kept = torch.full_like(bound, pairs / (count * (count - 1) / 2))
    middle, apart = sums / total
    return (middle + apart).clamp(0, 1), (middle - apart).clamp(0, 1), bound, kept


def cosine_parts(before: Tensor, after: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return half the sum and half the difference of two cosines of a swap; overwrites its arguments.

    The cosines are those of the weights ``v = (e^a, e^b)`` before the swap with the ones after it, v', and of the
    reversed v with v'. With ``t = tanh((b - a) / 2)`` before and t' after, they are
    ``(1 ± t t') / √((1 + t²) (1 + t'²))``.

    Args:
        before: ``(b - a) / 2`` before the swap.
        after: The same after it.
        counted: Factor on both results, if given.
    """
    before.tanh_(), after.tanh_()
    unit = before.new_ones(())
    size = torch.addcmul(unit, before, before)
    size.mul_(torch.addcmul(unit, after, after)).rsqrt_()
    if counted is not None:
        size.mul_(counted)
    return size, before.mul_(after).mul_(size)
